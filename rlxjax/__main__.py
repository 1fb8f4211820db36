"""`python -m rlxjax` is the command `rlxjax`."""

from calibrate.cli import main

main()
