import os
import re
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

from calibrate import bench_c
from calibrate.bench_check import TOLERANCE, disagreement, reference_power
from calibrate.peers import EXTRA, contenders
from rlxjax import WelchPeakParams, welch_peaks

ROOT = Path(__file__).parent.parent
#: Installed with the extra `bench`, which tests do without; scipy comes with the tests.
OPTIONAL = ("pyfftw", "mkl_fft", "torch")
IN_C = ("c-fftw", "c-fftw-insertion")
NAMES = ("fused", "fused-jax", "host", "auto", "naive", "naive-jax", "jax.scipy", "scipy", *OPTIONAL, *IN_C)

PARAMS = [
    WelchPeakParams(64, 1, 1),
    WelchPeakParams(64, 2, 64),
    WelchPeakParams(128, 3, 16),
    WelchPeakParams(256, 2, 16),
    WelchPeakParams(96, 8, 5),
    WelchPeakParams(4096, 2, 64),
    WelchPeakParams(6, 2, 4),
]


@pytest.fixture(autouse=True)
def _default_configuration():
    """What the benchmark runs under, and what JAX's own code needs."""
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
        yield


def signal_of(params, batch=4, seed=0):
    return np.random.default_rng(seed).standard_normal((batch, params.frame_len)).astype(np.float32)


def contender_called(name):
    if name in OPTIONAL:
        pytest.importorskip(name, reason=f"{name} comes with the extra `bench`")
    if name in IN_C and (reason := bench_c.c_unavailable()):
        pytest.skip(reason)
    found, skipped = contenders(names=[name])
    assert not skipped
    return found[0]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_contender_agrees_with_float64(name, params):
    signal = signal_of(params)
    run = contender_called(name).build(signal, params)
    assert disagreement(run(), signal, params) is None
    assert disagreement(run(), signal, params) is None


@pytest.mark.parametrize("name", ["pyfftw", "mkl_fft", "torch", *IN_C])
def test_a_batch_of_several_chunks_agrees(name):
    params = WelchPeakParams(64, 2, 8)
    signal = signal_of(params, batch=5003)
    assert disagreement(contender_called(name).build(signal, params)(), signal, params) is None


@pytest.mark.parametrize("k", [1, 16, 40, 2049])
@pytest.mark.parametrize("n_fft", [64, 4096])
@pytest.mark.parametrize("name", IN_C)
def test_the_c_program_selects_among_equal_and_sorted_powers(name, n_fft, k):
    params = WelchPeakParams(n_fft, 2, k)
    time = np.arange(params.frame_len, dtype=np.float32)
    rows = [0 * time, 0 * time + 1, time, (time == 5) * 1.0, np.sin(time), np.exp(-time)]
    signal = np.array(rows, np.float32)
    peaks = contender_called(name).build(signal, params)()
    assert disagreement(peaks, signal, params) is None
    np.testing.assert_array_equal(peaks[0], welch_peaks(signal[:1], params, "host")[0])


def test_every_contender_says_its_version():
    for contender in contenders()[0]:
        assert any(character.isdigit() for character in contender.version()), contender.name


def test_the_extra_brings_the_peers_that_are_said_to_come_with_it():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {re.match(r"\w+", wanted)[0] for wanted in extras["bench"]} == set(EXTRA)


@pytest.mark.parametrize("name", ["scipy", *OPTIONAL])
def test_a_peer_that_is_not_installed_is_skipped_with_a_sentence(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.signal" if name == "scipy" else name, None)
    found, skipped = contenders()
    wanted = "'rlxjax[bench]'" if name in OPTIONAL else name
    assert skipped[name] == f"not installed: pip install {wanted}"
    assert name not in [contender.name for contender in found]
    assert {"fused", "host", "auto", "naive"} <= {contender.name for contender in found}


def test_a_peer_that_is_broken_is_skipped_with_what_it_said(monkeypatch, tmp_path):
    (tmp_path / "cupy.py").write_text("raise AttributeError('no\\nlibrary')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert contenders()[1]["cupy"] == "cannot be imported: no library"


def test_cupy_is_for_a_gpu():
    assert "cupy" in contenders()[1]


def test_an_unknown_contender_is_refused():
    with pytest.raises(ValueError, match="--contender: expected one of fused, fused-jax, .*, got 'abacus'"):
        contenders(names=["abacus"])


@pytest.fixture
def _build_anew():
    bench_c._built.cache_clear()
    yield
    bench_c._built.cache_clear()


@pytest.mark.usefixtures("_build_anew")
def test_the_c_program_needs_its_source(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_c, "SOURCE", tmp_path / "welch_fftw.c")
    assert "source is not installed" in contenders()[1]["c-fftw"]


@pytest.mark.usefixtures("_build_anew")
def test_the_c_program_needs_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in contenders()[1]["c-fftw"]


@pytest.mark.usefixtures("_build_anew")
def test_a_c_program_that_does_not_compile_is_skipped_with_what_the_compiler_said(monkeypatch, tmp_path):
    if bench_c._compiler() is None:
        pytest.skip("there is no C compiler")
    source = tmp_path / "welch_fftw.c"
    source.write_text("#include <no_such_header.h>\n")
    monkeypatch.setattr(bench_c, "SOURCE", source)
    assert "no_such_header.h" in contenders()[1]["c-fftw"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_a_plan_of_the_c_program_is_freed_with_it():
    contender, params = contender_called("c-fftw"), WelchPeakParams(64, 2, 4)
    before = threading_count()
    run = contender.build(signal_of(params), params)
    assert threading_count() == before + bench_c.cores() - 1
    del run
    assert threading_count() == before


def threading_count():
    """Return the threads of this process, those of C included."""
    return len(os.listdir("/proc/self/task"))


def right_peaks(signal, params):
    """Return bins and powers by float64, and zeros beyond the bins."""
    power = reference_power(signal, params)
    bins = np.argsort(-power, axis=1, kind="stable")[:, : params.k]
    peaks = np.zeros((len(signal), params.k, 2))
    peaks[:, : bins.shape[1], 0], peaks[:, : bins.shape[1], 1] = bins, np.take_along_axis(power, bins, axis=1)
    return peaks


def spoilt(**changes):
    def spoil(peaks):
        for place, value in changes.values():
            peaks[place] = value(peaks[place])
        return peaks

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda p: p[:, :-1], "expected peaks of shape"),
        (lambda p: p[:-1], "expected peaks of shape"),
        (spoilt(a=((3, -1, 1), lambda _: 1e-9)), "beyond the bins"),
        (spoilt(a=((3, -1, 0), lambda _: 1.0)), "beyond the bins"),
        (spoilt(a=((3, 2, 0), lambda bin_: bin_ + 0.5)), "whole numbers"),
        (spoilt(a=((3, 2, 0), lambda _: 33)), "whole numbers"),
        (spoilt(a=((3, 2, 0), lambda _: np.nan)), "whole numbers"),
        (spoilt(a=((3, slice(0, 2), 0), lambda bins: bins[0])), "comes twice"),
        (spoilt(a=((3, 0, 1), lambda power: power * (1 + 3 * TOLERANCE))), "off by 3e-05"),
        (spoilt(a=((3, 0, 1), lambda _: np.nan)), "not finite"),
        (spoilt(a=((3, slice(0, 2), 0), lambda bins: bins[::-1])), "off by"),
        (spoilt(a=((3, slice(0, 2), 1), lambda powers: powers[::-1])), "off by"),
    ],
)
def test_what_is_wrong_is_found(spoil, said):
    params = WelchPeakParams(64, 2, 40)
    signal = signal_of(params)
    peaks = right_peaks(signal, params)
    assert disagreement(peaks.copy(), signal, params) is None
    assert said in disagreement(spoil(peaks), signal, params)


def test_bins_of_powers_closer_than_the_tolerance_may_change_places():
    params = WelchPeakParams(64, 1, 33)
    signal = signal_of(params, batch=128)
    power = reference_power(signal, params)
    order = np.argsort(-power, axis=1)
    gaps = -np.diff(np.take_along_axis(power, order, axis=1), axis=1) / power.max(1, keepdims=True)
    row, rank = np.unravel_index(np.argmin(gaps), gaps.shape)
    assert gaps[row, rank] < TOLERANCE
    peaks = right_peaks(signal, params)
    peaks[row, [rank, rank + 1], 0] = peaks[row, [rank + 1, rank], 0]
    assert disagreement(peaks, signal, params) is None


def test_the_reference_is_scipys_welch():
    welch = pytest.importorskip("scipy.signal", reason="scipy comes with the tests").welch
    params = WelchPeakParams(128, 8, 4)
    signal = signal_of(params).astype(np.float64)
    window = 0.5 * (1 - np.cos(2 * np.pi * np.arange(128) / 127))
    expected = welch(signal, window=window, nperseg=128, noverlap=64, detrend=False, scaling="spectrum")[1]
    np.testing.assert_allclose(reference_power(signal, params), expected * window.sum() ** 2, rtol=1e-12)
