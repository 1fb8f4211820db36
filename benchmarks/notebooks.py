"""Run the notebooks and keep their outputs.

    python benchmarks/notebooks.py [NAME ...]

NAME is the beginning of the name of a notebook: 02, for instance. Without a name, all notebooks run.
"""

import sys
import time
from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).parent.parent / "notebooks"
OPTIONS = {"kernel_name": "python3", "record_timing": False, "coalesce_streams": True}


def main() -> None:
    """Run the command."""
    wanted = tuple(sys.argv[1:]) or ("",)
    for path in sorted(FOLDER.glob("*.ipynb")):
        if path.name.startswith(wanted):
            notebook, start = nbformat.read(path, as_version=4), time.perf_counter()
            resources = {"metadata": {"path": str(FOLDER)}}
            nbclient.NotebookClient(notebook, **OPTIONS, resources=resources).execute()
            nbformat.write(notebook, path)
            print(f"{path.name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
