"""Run the command `rlxjax` by `python -m rlxjax`."""

from ._commands.interrupts import main

main()
