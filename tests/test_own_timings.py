"""Timings from elsewhere: a CSV file, a data frame, records; what is wrong is named by place and column."""

import datetime
import json
import os

import numpy as np
import pytest
from _models import LINE, LINE_TRUTH, TILED, TILED_TRUTH, runs_of, timings_of

import rlxjax as rx
from rlxjax import Timings
from rlxjax.models import FFT, WELCH

#: Timings of every variant, the second input among them.
TIMED = timings_of(TILED_TRUTH, runs_of(TILED, depth=2.0), noise_sd=0.02)
COLUMNS = {
    "variant": [TILED.variants[code] for code in TIMED.runs.variant],
    **TIMED.runs.inputs,
    "time_ns": TIMED.time_ns,
}


def csv_of(columns):
    """Return the text of a CSV file."""
    rows = zip(*columns.values(), strict=True)
    return "\n".join([",".join(map(str, row)) for row in ([*columns], *rows)]) + "\n"


class Frame:
    """Columns by name, as data frames have them; those of Arrow have their names apart."""

    def __init__(self, columns, is_arrow=False):
        self.held, self.columns = columns, list(columns.values() if is_arrow else columns)
        if is_arrow:
            self.column_names = list(columns)

    def __getitem__(self, name):
        return self.held[name]


def test_all_ways_in_give_the_timings_that_arrays_do(tmp_path):
    path = tmp_path / "timings.csv"
    path.write_text(csv_of(COLUMNS))
    rows = list(zip(*COLUMNS.values(), strict=True))
    struct = np.array(rows, [(name, "U9" if name == "variant" else "f8") for name in COLUMNS])
    records = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    for found in (
        *(Timings.of(TILED, file) for file in (path, os.fspath(path))),
        *(Timings.of(TILED, frame) for frame in (COLUMNS, Frame(COLUMNS), Frame(COLUMNS, True), struct)),
        *(Timings.of(TILED, rows) for rows in (records, iter(records))),
    ):
        assert found == TIMED


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_frames_of_other_libraries_are_read(library):
    module = pytest.importorskip(library, reason="no dependency; `Frame` has what is used of it")
    make = module.table if library == "pyarrow" else module.DataFrame
    assert Timings.of(TILED, make({name: list(column) for name, column in COLUMNS.items()})) == TIMED


def test_what_has_a_default_and_the_only_variant_may_be_missing_and_other_columns_are_left_alone():
    columns = {"n": [1, 2], "time_ns": [3.0, 4.0], "host": ["a", "b"], "when": [None, object()]}
    found = Timings.of(TILED, columns | {"variant": ["loop", "pair"]})
    assert found.runs.inputs["depth"].tolist() == [1.0, 1.0]
    assert Timings.of(TILED, columns | {"variant": [0, 2]}) == found
    plain = Timings.of(FFT, {"batch": [8], "n_fft": [64], "time_ns": [5.0]})
    assert plain == Timings.checked(FFT, variant="fft", batch=[8], n_fft=[64], time_ns=[5.0])


@pytest.mark.parametrize(("unit", "unit_ns"), [("ns", 1), ("us", 1e3), ("ms", 1e6), ("s", 1e9)])
def test_a_column_of_times_is_in_the_unit_that_its_name_ends_in(unit, unit_ns, tmp_path):
    sizes, expected = {"batch": [8, 8], "n_fft": [64, 128]}, [1.5 * unit_ns, 2.5 * unit_ns]
    assert Timings.of(FFT, sizes | {f"time_{unit}": [1.5, 2.5]}).time_ns.tolist() == expected
    own = Timings.of(FFT, sizes | {f"p25_{unit}": [1.5, 2.5], "time_ns": [9, 9]}, time_ns=f"p25_{unit}")
    assert own.time_ns.tolist() == expected
    path = tmp_path / "own.csv"
    path.write_text(f"\ufeffbatch, n_fft ,p25_{unit},how\r\n\r\n8,64,1.5,fft\r\n8,128, 2.5,fft\r\n", encoding="utf-8")
    assert Timings.of(FFT, path, time_ns=f"p25_{unit}", variant="how") == own


def refusal_of(call, *arguments):
    """Return the one sentence that a call is refused with."""
    with pytest.raises(ValueError, match=".") as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


HEADER = "n,depth,variant,time_us\n"
#: Texts of files, and how the refusal of each begins, after the path.
FILES = {
    "": ": expected a header and a line for each timing, got an empty file",
    HEADER: ": expected a row for each timing, got none",
    "n,variant\n1,loop\n": ": expected a column 'time_ns' (or time_us, time_ms, time_s), got n, variant",
    "depth,variant,time_ns\n1,loop,2\n": ": expected a column 'n', a number of items, got depth, variant, ",
    "n,time_ns\n1,2\n": ": expected a column 'variant', one of loop, tile, pair, got n, time_ns",
    "n,n,time_ns\n1,1,2\n": ": expected columns of different names, got 'n' twice",
    "n,variant,time_us,time_ms\n1,loop,1,1\n": ": expected a single column of times, got time_us and time_ms",
    HEADER + "1,1,loop\n": ", line 2: expected 4 cells, one per name, got 3",
    HEADER + "1,1,loop,2\n\n1,1,loop,fast\n": ", line 4: time_us: expected a positive finite number, got 'fast'",
    HEADER + "1,1,loop,-3\n": ", line 2: time_us: expected a positive finite number, got '-3'",
    HEADER + "1,1,loop,1\n1,1,loop,\n": ", line 3: time_us: expected a positive finite number, got nothing",
    HEADER + "1,inf,loop,2\n": ", line 2: depth: expected a finite number, got 'inf'",
    HEADER + "1,1,loop,2\n0,1,loop,2\n": ", line 3: n: expected a size of at least 1.0, got 0.0",
    HEADER + "1,1,loop,2\n1.5,1,loop,2\n": ", line 3: n: expected a whole number, got 1.5",
    HEADER + "1,1,heap,2\n": ", line 2: variant: expected one of loop, tile, pair, got 'heap'",
    HEADER + '1,1,"loop,2\n': ": cannot be read as CSV (unexpected end of data)",
    "," * 70_000 + "1\n": ": cannot be read as CSV (line 1: expected at most 65,536 cells, got 70,001)",
    b"n,time_ns\n\xff,1\n": ": cannot be read as CSV ('utf-8' codec",
}


def test_a_file_that_cannot_be_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "own.csv"
    for text, said in FILES.items():
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert refusal_of(Timings.of, TILED, path).startswith(f"{path}{said}")
    assert refusal_of(Timings.of, TILED, tmp_path / "missing.csv").endswith("missing.csv: no such file")
    assert "expected a file, got a folder" in refusal_of(Timings.of, TILED, tmp_path)
    wide = {"n": [8], "variant": ["loop"], "time_ns": [1.0], **{f"c{number}": [1] for number in range(60_000)}}
    path.write_text(csv_of(wide))
    assert Timings.of(TILED, path).time_ns == [1.0]


def test_nothing_takes_no_time(tmp_path):
    assert WELCH.inputs["batch"].least == 0.0  # a prediction of nothing is asked for, a timing is not given
    for size in ("0", "-2"):
        (tmp_path / "own.csv").write_text(f"variant,batch,n_fft,k,time_ns\nhost,8,64,4,5\nhost,{size},64,4,5\n")
        said = refusal_of(Timings.of, WELCH, tmp_path / "own.csv")
        assert said.endswith(f"own.csv, line 3: batch: expected a positive size, got {size}")


GOOD = {"n": [1, 2], "variant": ["loop", "loop"], "time_ns": [1.0, 2.0]}
FRAMES = [
    (3, "frame: expected named columns (a DataFrame or a dictionary), got int"),
    ({}, "frame: expected a column 'time_ns' (or time_us, time_ms, time_s), got none"),
    (GOOD | {"n": [1, None]}, "frame, row 1: n: expected a finite number, got nothing"),
    (GOOD | {"n": [1, np.nan]}, "frame, row 1: n: expected a finite number, got nan"),
    (GOOD | {"n": [1, 2, 3]}, "frame: expected columns of the same length, got time_ns 2, variant 2, n 3"),
    (GOOD | {"n": [[1, 2]]}, "frame: n: expected a column with one cell per row, got shape (1, 2)"),
    (GOOD | {"time_ns": np.array([1, 2], "m8[ns]")}, "frame, row 0: time_ns: expected a positive finite number"),
    (GOOD | {"n": np.array(["2024-05-01"] * 2, "M8[D]")}, "frame, row 0: n: expected a finite number, got 2024-05-01"),
    (GOOD | {"n": [1, datetime.timedelta(hours=1)]}, "frame, row 1: n: expected a finite number, got 1:00:00"),
    (GOOD | {"variant": [0, 3]}, "frame, row 1: variant: expected names, or indices from 0 to 2, got 3"),
    (GOOD | {"variant": ["loop", np.nan]}, "frame, row 1: variant: expected one of loop, tile, pair, got 'nan'"),
]
RECORDS = [
    ([], "records: expected a column 'time_ns' (or time_us, time_ms, time_s), got none"),
    (
        [{"n": 1, "variant": "loop", "time_ns": 1}, 3],
        "records, record 1: expected a mapping from column to cell, got int",
    ),
    (
        [{"n": 1, "variant": "loop", "time_ns": 1}, {"n": 1, "variant": "loop"}],
        "records, record 1: time_ns: expected a positive finite number, got nothing",
    ),
    *(
        (
            [{"n": 1, "variant": cell, "time_ns": 1}],
            f"records, record 0: variant: expected one of loop, tile, pair, got {str(cell)!r}",
        )
        for cell in (["loop"], np.array(["loop", "tile"]), True)
    ),
]


def test_a_frame_and_records_that_cannot_be_are_refused_in_one_sentence():
    for given, said in (*FRAMES, *RECORDS):
        assert refusal_of(Timings.of, TILED, given).startswith(said)
    for model in (type(TILED), "tiled", None):
        said = refusal_of(Timings.of, model, GOOD)
        assert said.startswith("model: expected an instance of a LatencyModel, got ")


def test_a_csv_file_becomes_a_calibration_that_predicts_and_picks(tmp_path):
    timed = timings_of(LINE_TRUTH, runs_of(LINE), noise_sd=0.01)
    names = [LINE.variants[code] for code in timed.runs.variant]
    (tmp_path / "own.csv").write_text(
        csv_of({"n": timed.runs.inputs["n"], "variant": names, "time_ms": timed.time_ns / 1e6})
    )
    fit = rx.fit_posterior(Timings.of(LINE, tmp_path / "own.csv"))
    assert fit.terms.coefficients == pytest.approx(LINE_TRUTH, rel=0.1)
    rx.save_calibration(tmp_path / "own.json", fit)
    assert json.loads((tmp_path / "own.json").read_text())["models"].keys() == {"line"}
    found = rx.load_calibration(tmp_path / "own.json", models=[LINE])
    # `item n / 2` is saved for `block`, so the blocks win beyond `2 block / item`.
    crossing = 2 * LINE_TRUTH["block_ns"] / LINE_TRUTH["item_ns"]
    assert (found.pick(crossing / 2), found.pick(2 * crossing)) == ("plain", "blocked")
    truth = LINE_TRUTH["call_ns"] + LINE_TRUTH["item_ns"] * 1e3
    assert float(found.predict_ns("plain", 1e3)) == pytest.approx(truth, rel=0.05)
    low, high = found.interval_ns("plain", 1e3)
    assert low < truth < high
