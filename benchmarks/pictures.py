"""Draw the pictures of a page with the page's own code.

python -m benchmarks.pictures [PAGE]

The script runs each block of Python of the page. If an image follows a block, the script saves the figure of `ax` as
this image. It uses the calibration of the notebooks, and `timings` are the timings of its campaign. Run the script from
the root of the repository.
"""

import argparse
import os
import re
import warnings
from pathlib import Path
from typing import Any

import matplotlib

import rlxjax as rx
from calibrate.samples import quantile_ns, read_samples
from rlxjax.fit import cell_runs
from rlxjax.models import WELCH

PAGE, HOME = Path("docs/pictures.md"), Path("notebooks/data")
SAMPLES = Path("docs/evidence/campaign-3-cpu.welch.samples.jsonl.gz")
#: A block of Python, and the image that follows the block, if any.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n!\[[^\]]*\]\(([^)]+\.svg)\))?", re.DOTALL | re.MULTILINE)
#: The hash salt makes the same file from the same data.
STYLE: dict[Any, Any] = {"figure.figsize": (5.6, 3.8), "font.size": 9.0, "svg.hashsalt": "rlxjax", "savefig.dpi": 200}


def draw(page: Path) -> list[Path]:
    """Run the code of a page; return the saved images."""
    from matplotlib import pyplot

    saved: list[Path] = []
    namespace: dict[str, Any] = {"timings": timings()}
    for code, image in BLOCK.findall(page.read_text(encoding="utf-8")):
        exec(code, namespace)
        if image:
            path = page.parent / image
            path.parent.mkdir(exist_ok=True)
            namespace["ax"].figure.savefig(path, metadata={"Date": None})
            saved.append(path)
        pyplot.close("all")
    return saved


def timings() -> rx.Timings:
    """Return the timings of the campaign of the calibration."""
    cells, visits = read_samples(SAMPLES).timed()
    runs = cell_runs(WELCH, cells)
    return rx.Timings.checked(WELCH, variant=runs.variant, time_ns=quantile_ns(visits), **runs.inputs)


def main() -> None:
    """Draw the images of the page that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path, default=PAGE)
    page = parser.parse_args().page
    matplotlib.use("agg")
    os.environ["RLXJAX_HOME"] = str(HOME)
    # The calibration of the page is of another machine.
    warnings.simplefilter("ignore", rx.calibration.MachineMismatchWarning)
    with matplotlib.rc_context(STYLE):
        for path in draw(page):
            print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
