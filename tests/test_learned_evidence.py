"""The trained models behind the documentation: what they find of peaks that no training saw."""

import json
import pathlib

import jax
import pytest

import rlxjax as rx
from benchmarks.learned_fft import magnitude_gates, random_gates

ROOT = pathlib.Path(__file__).parent.parent
EVIDENCE = ROOT / "docs" / "evidence" / "learned-fft"
REPORT = json.loads((EVIDENCE / "learned-fft.json").read_text(encoding="utf-8"))
TRAINED = [row for row in REPORT["rows"] if "recall_at_16" in row]
BANDS = {"full": rx.ToneSignals(), "low": rx.ToneSignals(high=0.125)}
#: Other rows than those of the report, and fewer.
ROWS, SEED, TOLERANCE = 512, 77, 0.02
recall = jax.jit(rx.peak_recall, static_argnames="k")


def test_a_quarter_of_the_gates_finds_twice_what_as_many_untrained_ones_find():
    for band in BANDS:
        for n_fft in (256, 1024):
            (row,) = (row for row in TRAINED if (row["n_fft"], row["name"]) == (n_fft, f"{band}-0.25"))
            model = rx.load_learned_fft(EVIDENCE / f"learned-fft-{n_fft}-{band}-0.25.json", n_fft)
            assert model.active_gates == row["active_gates"] < model.total_gates / 4
            key, *keys = jax.random.split(jax.random.key(SEED), 3)
            segments, others = (BANDS[band].sample(k, ROWS, n_fft) for k in keys)
            trained = float(recall(model, segments, k=16))
            at_random = float(recall(random_gates(n_fft, model.active_gates, key), segments, k=16))
            by_magnitude = float(recall(magnitude_gates(n_fft, model.active_gates, others), segments, k=16))
            assert trained >= 2 * max(at_random, by_magnitude)
            assert trained == pytest.approx(row["recall_at_16"]["trained"], abs=TOLERANCE)


def test_the_table_in_the_documentation_is_the_reports():
    text = (ROOT / "docs" / "learned-fft.md").read_text(encoding="utf-8")
    for row in TRAINED:
        (line,) = (s for s in text.splitlines() if s.startswith(f"| {row['n_fft']} | {row['name']} |"))
        assert f" {row['active_gates']}/{row['total_gates']} " in line
        assert f" {row['recall_at_16']['trained']:.3f} " in line
        assert f" {row['time_over_exact']:.2f} " in line


def test_the_documentation_names_what_is_slower_than_the_exact_path():
    text = (ROOT / "docs" / "learned-fft.md").read_text(encoding="utf-8")
    (line,) = (s for s in text.split("\n\n") if s.startswith("Slower than the exact path"))
    ratios = {f"{row['name']} at {row['n_fft']}": row["time_over_exact"] for row in REPORT["rows"]}
    assert {name for name in ratios if name in line} == {name for name, ratio in ratios.items() if ratio > 1}
