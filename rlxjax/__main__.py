"""Run the command `rlxjax` as `python -m rlxjax`."""

from ._commands.interrupts import main

main()
