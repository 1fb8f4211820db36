"""All commands of rlxjax, such as the calibrate job, which measures this machine and fits latency models."""
