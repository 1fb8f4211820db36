"""A call of every public function that computes something, and of the methods that do."""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import rlxjax as rx
from rlxjax.models import FFT

CALIBRATION = Path(__file__).parents[1] / "notebooks" / "data" / "calibration-cpu.json"

#: A call with values that depend on its turn, 0 or 1; the shapes never do.
Call = Callable[[int], object]


def a_graph() -> rx.Graph:
    """Three elementwise ops and a reduction."""
    graph = rx.Graph("chain")
    x = graph.input("x", (4096,))
    graph.set_outputs([graph.add("reduce_sum", [graph.add("exp", [graph.add("mul", [x, x])])])])
    return graph


def low_band_model(n_fft: int, turn: int = 0) -> rx.learned.LearnedFft:
    """Return the exact transform with the upper half of its bins masked, which prunes part of it."""
    exact = rx.learned.LearnedFft.exact(n_fft)
    mask = np.where(np.arange(exact.n_bins) <= n_fft // 4, 1.0 + turn / 8, 0.0)
    return dataclasses.replace(exact, mask=mask)


def timings(turn: int, factor: float = 1.0) -> rx.Timings:
    """Return timings of a batched FFT."""
    batch, n_fft = (grid.ravel() for grid in np.meshgrid(2.0 ** np.arange(8), [256.0, 1024.0, 4096.0]))
    time_ns = factor * (4e4 + 10 * batch * n_fft) * (1 + turn)
    return rx.Timings.checked(FFT, variant="fft", batch=batch, n_fft=n_fft, time_ns=time_ns)


def candidates(turn: int) -> rx.fit.Estimate:
    """Return what is known of four workloads, of two runs each, before any timing."""
    batch = np.array([[1.0], [16.0], [256.0], [4096.0]]) * (1 + turn)
    return rx.fit.estimate(
        rx.fit.prior_posterior(FFT), rx.fit.Runs.checked(FFT, "fft", batch=batch, n_fft=[[256, 4096]])
    )


def stages(turn: int) -> np.ndarray:
    """Return what each group of four stages takes."""
    return 800.0 + turn + np.arange(16.0).reshape(4, 4)


def two_devices(turn: int) -> list[rx.Timings]:
    """Return the timings of a batched FFT on two devices."""
    return [timings(turn, factor) for factor in (1.0, 3.0)]


def public_calls() -> dict[str, Call]:
    """Return a call of every public function, and of the methods that compute, by name."""
    graph, params = a_graph(), rx.WelchPeakParams.fast(256, 16)
    row, gate = rx.backend_coefficients("cuda"), rx.io_fusion_gate_for_target("cuda")
    plan, other_plan = (rx.plan_fusion(graph, coefficients="cuda", plan=name) for name in ("cost", "unfused"))
    before, after = other_plan.before, plan.after
    segments = np.random.default_rng(0).standard_normal((2, 8, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rx.calibration.MachineMismatchWarning)
        calibration = rx.load_calibration(CALIBRATION)

    def sizes(turn: int) -> tuple[int, int, int]:
        return (512, 1024)[turn], (256, 512)[turn], (16, 8)[turn]

    def profile(turn: int) -> rx.GraphIoProfile:
        return rx.GraphIoProfile(3 + turn, 1, 4096 * (1 + turn), 10**6)

    def benefit(turn: int) -> rx.FusionBenefit:
        return rx.fusion_benefit(rx.GraphIoProfile(9 + turn, 4, 10**6, 10**7), profile(turn))

    def number(turn: int) -> jax.Array:
        return jnp.full((3,), 1.5 + turn)

    def kernel_inputs(turn: int) -> dict[int, np.ndarray]:
        return {node.id: np.full(4096, 0.5 + turn, np.float32) for node in graph.nodes if node.op == "input"}

    soft = {"temperature_ns": 1e4}
    calls: dict[str, Call] = {
        "algorithm_bandwidth_gbps": lambda turn: rx.algorithm_bandwidth_gbps(2176 + turn, 1000.0 + turn),
        "backend_coefficients": lambda turn: rx.backend_coefficients(("cuda", "metal")[turn]),
        "block_graph_ns": lambda turn: rx.block_graph_ns(("cuda", "metal")[turn], *sizes(turn)),
        "coefficient_set": lambda turn: rx.welch.coefficient_set(("arch", "portable")[turn]),
        "compare": lambda turn: rx.fit.compare(
            *(jax.tree.map(lambda x, i=i: x[:, i], candidates(turn)) for i in (0, 1))
        ),
        "estimate": candidates,
        "estimate_welch_peaks_costs": lambda turn: rx.estimate_welch_peaks_costs("cuda", *sizes(turn)),
        "evaluate_welch_peaks": lambda turn: rx.welch.evaluate_welch_peaks("cuda", *sizes(turn), **soft),
        "execute_kernel": lambda turn: rx.fusion.execute_kernel(plan.kernels[0], kernel_inputs(turn)),
        "execute_plan": lambda turn: rx.execute_plan(plan, kernel_inputs(turn)),
        "fit_posteriors": lambda turn: rx.fit.fit_posteriors(rx.fit.stack_timings(two_devices(turn))[0]),
        "fit_posterior": lambda turn: rx.fit_posterior(timings(turn)),
        "fused_graph_ns": lambda turn: rx.fused_graph_ns("cuda", *sizes(turn)),
        "fusion_benefit": benefit,
        "graph_cost_ns": lambda turn: rx.graph_cost_ns(graph, rx.backend_coefficients(("cuda", "metal")[turn])),
        "host_fft_profile": lambda turn: rx.host_fft_profile(sizes(turn)[0], params),
        "host_path_ns": lambda turn: rx.welch.host_path_ns("cuda", *sizes(turn)),
        "io_cost_ns": lambda turn: rx.io_cost_ns(profile(turn), row),
        "io_fusion_gate_for_target": lambda turn: rx.io_fusion_gate_for_target(("cuda", "metal")[turn]),
        "learned_spectrum": lambda turn: rx.learned.learned_spectrum(low_band_model(64, turn), segments[turn]),
        "next_measurements": lambda turn: rx.fit.next_measurements(candidates(turn), 2),
        "peak_recall": lambda turn: rx.learned.peak_recall(low_band_model(64, turn), segments[turn], 4),
        "pick_weights": lambda turn: rx.pick_weights(number(turn), **soft),
        "pick_welch_peaks_strategy": lambda turn: rx.pick_welch_peaks_strategy("cuda", *sizes(turn)),
        "plan_fusion": lambda turn: rx.plan_fusion(graph, coefficients=("cuda", "metal")[turn]),
        "plan_stages": lambda turn: rx.fusion.plan_stages(stages(turn))[0].time_ns,
        "pooled_prior": lambda turn: rx.fit.pooled_prior(
            [rx.fit_posterior(own).terms for own in two_devices(turn)], FFT.prior
        ),
        "prior_posterior": lambda turn: rx.fit.prior_posterior(FFT, spread=0.05 + turn / 100),
        "rank_devices": lambda turn: rx.rank_devices(profile(turn)),
        "soft_estimate_welch_peaks_costs": lambda turn: rx.soft_estimate_welch_peaks_costs(
            "cuda", *sizes(turn), **soft
        ),
        "soft_fused_graph_ns": lambda turn: rx.soft_fused_graph_ns("cuda", *sizes(turn), **soft),
        "soft_maximum": lambda turn: rx.soft_maximum(number(turn), 1.0 + turn, 0.5),
        "soft_minimum": lambda turn: rx.soft_minimum(number(turn), 1.0 + turn, 0.5),
        "soft_pick_welch_peaks_strategy": lambda turn: rx.soft_pick_welch_peaks_strategy("cuda", *sizes(turn), **soft),
        "soft_plan_ns": lambda turn: rx.fusion.soft_plan_ns(stages(turn), 0.1 + turn),
        "soft_relu": lambda turn: rx.soft_relu(number(turn), 0.5 + turn),
        "soft_step": lambda turn: rx.soft_step(number(turn), 0.5 + turn),
        "stack_timings": lambda turn: rx.fit.stack_timings(two_devices(turn)),
        "straight_through": lambda turn: rx.straight_through(number(turn) > 2, number(turn)),
        "temperature_from_sd": lambda turn: rx.temperature_from_sd(number(turn)),
        "transferred_prior": lambda turn: rx.fit.transferred_prior(
            rx.fit.prior_posterior(FFT, spread=0.05 + turn / 100)
        ),
        "useful_bytes_touched": lambda turn: rx.useful_bytes_touched(sizes(turn)[0], params),
        "welch_peaks_fusion_gate_breakdown": lambda turn: rx.welch_peaks_fusion_gate_breakdown("cuda", *sizes(turn)),
        "Calibration.compare": lambda turn: calibration.compare("fused", "host", *sizes(turn)),
        "Calibration.in_domain": lambda turn: calibration.in_domain(*sizes(turn)),
        "Calibration.interval_ns": lambda turn: calibration.interval_ns("fused", *sizes(turn)),
        "Calibration.pick": lambda turn: calibration.pick(*sizes(turn)),
        "Calibration.pick_index": lambda turn: calibration.pick_index(*sizes(turn)),
        "Calibration.predict_ns": lambda turn: calibration.predict_ns("fused", *sizes(turn)),
        "Calibration.decide": lambda turn: calibration.decide(*sizes(turn)),
        "FusionBenefit.score_ns": lambda turn: benefit(turn).score_ns(gate),
        "IoFusionGate.evaluate": lambda turn: gate.evaluate(benefit(turn), **soft),
        "IoFusionGate.fuse_log_odds": lambda turn: gate.fuse_log_odds(benefit(turn), **soft),
        "IoFusionGate.fuse_probability": lambda turn: gate.fuse_probability(benefit(turn), **soft),
        "IoFusionGate.score_ns": lambda turn: gate.score_ns(benefit(turn)),
        "IoFusionGate.should_fuse": lambda turn: gate.should_fuse(before, after),
    }
    return calls | welch_calls()


def welch_calls() -> dict[str, Call]:
    """Return a call of `welch_peaks` a path."""
    params = rx.WelchPeakParams.fast(256, 16)

    def call(turn: int, path: str) -> object:
        signal = np.random.default_rng(turn).standard_normal((64, params.frame_len), np.float32)
        model = low_band_model(params.n_fft, turn) if path == "learned" else None
        return rx.welch_peaks(signal, params, path, model=model)

    return {f"welch_peaks {p}": lambda turn, p=p: call(turn, p) for p in ("host", "fused", "block", "learned")}
