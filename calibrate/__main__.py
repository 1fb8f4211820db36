"""`python -m calibrate` is the calibrate job."""

from .interrupts import main

main("calibrate_main")
