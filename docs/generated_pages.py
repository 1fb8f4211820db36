"""Pages of the site that no file in this folder holds: the reference, from the public names, and the notebooks."""

import base64
import importlib
from pathlib import Path

import nbformat
from mkdocs.structure.files import File

import rlxjax

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def on_files(files, config):
    """Add a page for each room of the package and each notebook; mkdocs calls this."""
    for room, names in rlxjax._NAMES.items():
        files.append(File.generated(config, f"api/{room.strip('_')}.md", content=reference(room, names.split())))
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        page, pictures = notebook(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def reference(room, names):
    """Return the page of a room: what it is for, and the docstrings of its public names."""
    module = importlib.import_module(f"rlxjax.{room}")
    # A room without names at the top is asked for by its own: `rlxjax.plot.terms`.
    paths = names or [f"{room}.{name}" for name in vars(module) if not name.startswith("_")]
    summary = module.__doc__.partition("\n\n")[0]
    return "\n\n".join([f"# {room.strip('_')}", summary, *(f"::: rlxjax.{path}" for path in paths)])


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
