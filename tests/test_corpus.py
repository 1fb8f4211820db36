"""Programs that a grammar draws: the same ones each time, as data that run; and the file of their timings."""

import gzip
import json
import warnings

import jax
import numpy as np
import pytest

from benchmarks._grammar import TEMPLATES, Program, drawn, single
from benchmarks.corpus import Corpus, Recording, numbers_of, read_corpus

HEADER = {"version": 1, "protocol": 2, "fingerprint": {}}


def small(fn, args):
    """Return a cost that lets small programs pass."""
    return float("inf") if sum(arg.size for arg in args) > 4096 else 0.0


@pytest.fixture
def as_users_do():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("as_users_do")
def test_a_program_is_drawn_the_same_again_and_runs_from_what_a_file_keeps():
    for number in range(4):
        program = drawn(number, small)
        assert program == drawn(number, small)
        again = Program.of(json.loads(json.dumps(program._asdict())))
        assert again.lines == program.lines
        arrays = [draw.array(np.random.default_rng(0)) for draw in again.draws()]
        assert again.n_bytes >= sum(array.nbytes for array in arrays if array.dtype != jax.random.key(0).dtype)
        assert jax.tree.leaves(again.function()(*arrays))
        assert {template.text for template in TEMPLATES} >= {*program.templates}


@pytest.mark.usefixtures("as_users_do")
def test_programs_of_one_operation_go_through_the_templates_in_usual_shapes():
    for number in (0, 5, len(TEMPLATES) + 5):
        program = single(number, small)
        assert program == single(number, small)
        assert (len(program.lines), program.templates) == (1, (TEMPLATES[number % len(TEMPLATES)].text,))
        sizes = [size for argument in program.arguments[:1] for size in argument["shape"]]
        assert all(size & (size - 1) == 0 or (size % 3 == 0 and (size // 3) & (size // 3 - 1) == 0) for size in sizes)


def test_a_corpus_goes_on_where_its_file_ends_and_the_second_half_is_of_the_first(tmp_path):
    path = tmp_path / "corpus.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        recording = Recording(Corpus(HEADER), file)
        recording.keep(**HEADER)
        recording.keep(kind="failed", number=1, reason="too dear")
        columns = {"round": [0, 0, 1, 1], "cell": [0, 1, 1, 0], "time_ns": [100, 1000, 1000, 100]}
        recording.keep(kind="batch", half=0, numbers=[0, 3], **columns)
        file.write('{"kind": "batch", "half": 0, "numb')  # cut short
    found = read_corpus(path, mend_tail=True)
    with open(path, "a", encoding="utf-8") as file:
        Recording(found, file).keep(kind="batch", half=1, numbers=[3], round=[0], cell=[0], time_ns=[900])
    assert read_corpus(path).times_ns(1) == pytest.approx({3: 900})
    assert found.failed == {1: "too dear"}
    assert found.times_ns(0) == pytest.approx({0: 100, 3: 1000})
    assert numbers_of(found, 0, 5) == [2, 4]
    assert numbers_of(found, 1, 5) == [0, 3]
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(ValueError, match="not compressed"):
        read_corpus(packed, mend_tail=True)
    for text in (path.read_text(), ""):
        path.write_text(text)
        with pytest.raises(ValueError, match="expected a corpus of version 1"):
            read_corpus(path)
