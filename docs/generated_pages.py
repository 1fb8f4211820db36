"""Pages of the site that no file holds: the README as its first, the commands, the reference, and the notebooks."""

import base64
import html
import inspect
import re
import subprocess
import sys
from pathlib import Path

import nbformat
from mkdocs.structure.files import File

import rlxjax

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "notebooks"
COMMANDS = """# Commands

`rlxjax COMMAND -h` says the same in a shell, and `rlxjax --install-completion` completes commands and options there.
Exit status 0 means done, 2 bad input, 130 interrupted, unless a command says otherwise. `--json` prints [one
object](json.md), `--quiet` warnings and errors alone.
"""
#: What the page says once, above all commands.
LEFT_OUT = (
    r"^( *\* `(-q, )?--(help|json|quiet)`: .*"
    r"|\*\*Usage\*\*:\n\n```console\n.*\n```\n|\*\*(Arguments|Options)\*\*:\n"
    r"|\*\*Commands\*\*:\n\n(?:\* .*\n)+"
    r"|  (0: done|2: bad input, said in one line|130: interrupted))\n"
)


def on_files(files, config):
    """Add the README, and a page for each module of the package and each notebook; mkdocs calls this."""
    files.append(File.generated(config, "index.md", content=first_page()))
    files.append(File.generated(config, "commands.md", content=commands()))
    for name in ["numerics", *filter(is_module, rlxjax.__all__)]:
        files.append(File.generated(config, f"api/{name}.md", content=reference(name)))
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        page, pictures = notebook(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def first_page():
    """Return the README as a page of the site, whose links stay within it."""
    text = re.sub(
        r"\[([^\]]*)\]\((?:CONTRIBUTING|CHANGELOG)\.md\)", r"\1", (ROOT / "README.md").read_text(encoding="utf-8")
    )
    first = f"notebooks/{min(NOTEBOOKS.glob('*.ipynb')).stem}.md"
    return text.replace("](docs/", "](").replace("](notebooks)", f"]({first})")


def commands():
    """Return the page of commands, as typer writes it: one section a command."""
    command = [sys.executable, "-m", "typer", "calibrate.cli", "utils", "docs", "--name", "rlxjax"]
    made = html.unescape(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    made = re.sub(r"^(\* `[^`]*?) <[^`]*>`", r"\1`", made, flags=re.MULTILINE)
    made = re.sub(LEFT_OUT, "", made[made.index("## `rlxjax ") :], flags=re.MULTILINE)
    made = re.sub(r"^Exit status:\n\n?(?!  )", "", made, flags=re.MULTILINE)
    made = re.sub(r"^(Examples?|Exit status):\n((?:  .*\n)+)", listed, made, flags=re.MULTILINE)
    return COMMANDS + "\n" + re.sub(r"\n{3,}", "\n\n", made).strip() + "\n"


def listed(match):
    """Return the end of a command's section: examples as code, exit statuses as a sentence."""
    head, lines = match[1], [line.strip() for line in match[2].splitlines()]
    if head == "Exit status":
        return f"Exit status {'; '.join(lines)}.\n"
    return "```console\n" + "\n".join(f"$ {line}" for line in lines) + "\n```\n"


def is_module(name):
    """Whether a public name is one of the package's modules."""
    return inspect.ismodule(getattr(rlxjax, name))


def reference(name):
    """Return the page of a module: what it is for, and the docstrings of its public functions and classes."""
    if name == "numerics":  # the only one whose names stand at the top alone
        module, paths = rlxjax._numerics, [own for own in rlxjax.__all__ if is_of(getattr(rlxjax, own), "_numerics")]
    else:
        module = getattr(rlxjax, name)
        paths = [f"{name}.{own}" for own in dir(module) if own[0] != "_" and is_of(getattr(module, own), name)]
    summary = module.__doc__.partition("\n\n")[0]
    return "\n\n".join([f"# {name}", summary, *(f"::: rlxjax.{path}" for path in paths)])


def is_of(value, module):
    """Whether a value is a function or class of a module of the package."""
    where = getattr(value, "__module__", None) or ""
    return callable(value) and f"{where}.".startswith(f"rlxjax.{module}.")


def notebook(path):
    """Return a notebook as Markdown, and its pictures by name."""
    parts, pictures = [], {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source.replace("](../docs/", "](../"))
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![picture {len(pictures)}]({name})")
            else:
                parts.append(f"```text\n{data['text/plain'].rstrip()}\n```")
    return "\n\n".join(parts), pictures
