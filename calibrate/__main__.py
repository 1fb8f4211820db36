"""`python -m calibrate` runs the calibrate job."""

from .interrupts import main

main("calibrate_main")
