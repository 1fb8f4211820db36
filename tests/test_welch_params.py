"""Names of strategies, parameters of a run, and the sizes that batches are padded to."""

import numpy as np
import pytest
from _welch_reference import assert_peaks_of, noise, reference_power

import rlxjax as rx

FAST = rx.WelchPeakParams.fast(n_fft=64, k=5)

ALIASES = {
    "auto": ("auto", "", " AUTO "),
    "ultra": ("ultra", "ultra_fast", "Ultra-Fast", "ultra_fast_rustfft", "1seg"),
    "fast": ("fast", "streaming", "fast_streaming", "FAST-streaming_rustfft", "rustfft", "2SEG"),
    "rlx": ("rlx", "rlx_compiled", "RLX-compiled", "compiled", "gpu", "fused"),
    "learned": ("learned", "learned_compiled", "Learned-Compiled"),
}


@pytest.mark.parametrize(("meaning", "name"), [(m, name) for m, names in ALIASES.items() for name in names])
def test_every_alias_is_parsed_and_runs_with_the_segments_of_the_parameters(meaning, name):
    assert rx.parse_welch_peaks_strategy(name) == meaning
    signal = noise(3, FAST)
    if meaning == "learned":
        with pytest.raises(ValueError, match="model"):
            rx.welch_peaks(signal, FAST, name)
    else:
        assert_peaks_of(reference_power(signal, FAST), rx.welch_peaks(signal, FAST, name), FAST)


@pytest.mark.parametrize("name", ["host", "block", "fastest", "1 seg", "ultra fast"])
def test_the_parser_refuses_other_names(name):
    with pytest.raises(ValueError, match=f"expected one of auto, ultra.*got '{name}'"):
        rx.parse_welch_peaks_strategy(name)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((255, 2, 4), "n_fft: expected an even number, got 255"),
        ((0, 2, 4), "n_fft: expected an integer of at least 2, got 0"),
        ((64, 0, 4), "n_segments: expected an integer of at least 1, got 0"),
        ((64, 2, 0), "k: expected an integer of at least 1, got 0"),
        ((64, 2, 1.5), "k: expected an integer, got 1.5"),
    ],
)
def test_parameters_of_no_run_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        rx.WelchPeakParams(*sizes)


def test_bins_divide_the_sample_rate():
    frequencies = FAST.bin_frequencies_hz(np.arange(FAST.n_bins), 48_000.0)
    np.testing.assert_allclose(frequencies, np.fft.rfftfreq(FAST.n_fft, 1 / 48_000.0), rtol=1e-15)


def test_padded_batches_are_monotone_and_at_most_four_an_octave():
    padded = np.array([rx.padded_batch(batch) for batch in range(5001)])
    batches = np.arange(5001)
    assert np.all(padded >= batches)
    assert np.all(padded <= 1.25 * batches)
    assert np.all(np.diff(padded) >= 0)
    assert all(rx.padded_batch(int(size)) == size for size in padded)
    for octave in 2 ** np.arange(12):
        assert len({size for size in padded if octave < size <= 2 * octave}) <= 4
    assert rx.padded_batch(np.int64(9)) == rx.padded_batch(9)
