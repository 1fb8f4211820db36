"""The calibrate job: it measures this machine, fits, validates, reports, and holds every command."""
