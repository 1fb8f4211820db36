"""Pages of the site that no file in this folder holds: the README as its first, the reference, and the notebooks."""

import base64
import inspect
import re
from pathlib import Path

import nbformat
from mkdocs.structure.files import File

import rlxjax

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "notebooks"


def on_files(files, config):
    """Add the README, and a page for each module of the package and each notebook; mkdocs calls this."""
    files.append(File.generated(config, "index.md", content=first_page()))
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
