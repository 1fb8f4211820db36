"""`python -m rlxjax` is the command `rlxjax`."""

from calibrate.interrupts import main

main()
