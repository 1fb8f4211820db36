"""A differentiable cost model that decides, by numbers measured on this machine, whether fusing pays.

`Graph -> GraphIoProfile -> FusionBenefit -> gate score -> decision`, and
`timings -> fit -> Calibration -> the same decisions, now true here`.

The names of every day, by task:

- should my jitted functions be one program? `advise`
- which of several functions is the fastest here? `choose`
- what does a function do, and take here? `profile_function`, `default_calibration().predict_function`
- decide by what was measured here: `default_calibration`, `load_calibration`, `save_calibration`; a `Calibration`
  predicts, picks, compares and explains
- decide by built-in prices: `Graph`, `profile_graph_io`, `fusion_benefit`, `io_fusion_gate_for_target`, `rank_devices`
- fuse graphs of operations: `plan_fusion`, `execute_plan`
- a latency model of your own: `LatencyModel`, `Input`, `Suite`, `Cell`, `Timings`, `fit_posterior`
- decide for files of rows, larger than memory: `evaluate`
- run Welch peaks: `WelchPeakParams`, `welch_peaks`
- choices with gradients: `soft_step`, `soft_minimum`, `straight_through`, `temperature_from_sd`

All others stand in the modules: `rlxjax.graph`, `rlxjax.jaxpr`, `rlxjax.gate`, `rlxjax.fusion`, `rlxjax.fit`,
`rlxjax.models`, `rlxjax.calibration`, `rlxjax.choices`, `rlxjax.welch`, `rlxjax.learned`, `rlxjax.plot`,
`rlxjax.tables`, `rlxjax.targets`; `help(rlxjax.fit)` lists one of them.
"""

import ast as _ast
from pathlib import Path as _Path

import lazy_loader as _lazy_loader

__version__ = "0.1.0"
#: The names, and what imports each when it is first used, come from the stub.
__getattr__, __dir__, _ = _lazy_loader.attach_stub(__name__, __file__)
_STUB = _ast.parse(_Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
__all__ = next(_ast.literal_eval(line.value) for line in _STUB.body if isinstance(line, _ast.Assign))  # pyright: ignore
