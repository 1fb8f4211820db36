"""`python -m calibrate` is the calibrate job."""

from .cli import calibrate_main

calibrate_main()
