"""Write docs/commands.md by typer's own generator: `python docs/commands.py`; `make docs` runs it first."""

import html
import re
import subprocess
import sys
from pathlib import Path

HEAD = """# Commands

Made from what `rlxjax COMMAND -h` says. Exit status 0 means done, 2 bad input, 130 interrupted, unless another meaning
is given. `--quiet` prints warnings and errors alone, `--json`
prints [documented keys](json.md). `rlxjax --install-completion` completes all of it in your shell.
"""
#: What many commands have, and what the page says above.
LEFT_OUT = (
    r"^( *\* `(-q, )?--(help|json|quiet)`: .*"
    r"|\*\*Usage\*\*:\n\n```console\n.*\n```\n|\*\*(Arguments|Options)\*\*:\n"
    r"|\*\*Commands\*\*:\n\n(?:\* .*\n)+"
    r"|  (0: done|2: bad input, said in one line|130: interrupted))\n"
)


def page() -> str:
    """Return the page: one section a command, and below a group of commands one for each of them."""
    command = [sys.executable, "-m", "typer", "calibrate.cli", "utils", "docs", "--name", "rlxjax"]
    made = html.unescape(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    made = re.sub(r"^(\* `[^`]*?) <[^`]*>`", r"\1`", made, flags=re.MULTILINE)
    made = re.sub(LEFT_OUT, "", made[made.index("## `rlxjax ") :], flags=re.MULTILINE)
    made = re.sub(r"^Exit status:\n\n?(?!  )", "", made, flags=re.MULTILINE)
    made = re.sub(r"^(Examples?|Exit status):\n((?:  .*\n)+)", listed, made, flags=re.MULTILINE)
    return HEAD + "\n" + re.sub(r"\n{3,}", "\n\n", made).strip() + "\n"


def listed(match: re.Match[str]) -> str:
    """Return what stands below a command's options: examples as code, exit statuses as a sentence."""
    head, lines = match[1], [line.strip() for line in match[2].splitlines()]
    if head == "Exit status":
        return f"Exit status {'; '.join(lines)}.\n"
    return "```console\n" + "\n".join(f"$ {line}" for line in lines) + "\n```\n"


if __name__ == "__main__":
    (Path(__file__).parent / "commands.md").write_text(page(), encoding="utf-8")
