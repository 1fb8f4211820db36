"""Pages of the site that no file in this folder holds: the README as its first, the reference, and the notebooks."""

import base64
import importlib
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
    for module, names in rlxjax._NAMES.items():
        files.append(File.generated(config, f"api/{module.strip('_')}.md", content=reference(module, names.split())))
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


def reference(name, names):
    """Return the page of a module: what it is for, and the docstrings of its public names."""
    module = importlib.import_module(f"rlxjax.{name}")
    # One without names at the top is asked for by its own: `rlxjax.plot.terms`.
    paths = names or [f"{name}.{own}" for own in vars(module) if not own.startswith("_")]
    summary = module.__doc__.partition("\n\n")[0]
    return "\n\n".join([f"# {name.strip('_')}", summary, *(f"::: rlxjax.{path}" for path in paths)])


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
