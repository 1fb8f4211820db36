"""Predict how long your JAX functions take on a machine, and decide which of them to compile together.

The most used names, by task:

- decide whether your functions should be one program: `advise`
- find the fastest of several functions on this machine: `choose`
- count a function's work, and predict its time: `profile_function`, `default_calibration().predict_function`
- read, write and use a calibration of this machine: `default_calibration`, `load_calibration`, `save_calibration`
- decide from built-in coefficients: `Graph`, `profile_graph_io`, `fusion_benefit`, `io_fusion_gate_for_target`,
  `rank_devices`
- fuse graphs of operations: `plan_fusion`, `execute_plan`
- write a latency model of your own: `LatencyModel`, `Input`, `Suite`, `Cell`, `Timings`, `fit_posterior`
- add the answers of a gate or a model to a table: `tables.evaluate`
- find the strongest bins of a signal's spectrum: `WelchPeakParams`, `welch_peaks`
- differentiate through choices: `soft_step`, `soft_minimum`, `straight_through`, `temperature_from_sd`

All other names are in modules: `rlxjax.graph`, `rlxjax.jaxpr`, `rlxjax.gate`, `rlxjax.fusion`, `rlxjax.fit`,
`rlxjax.models`, `rlxjax.calibration`, `rlxjax.choices`, `rlxjax.welch`, `rlxjax.learned`, `rlxjax.plot`,
`rlxjax.tables`, `rlxjax.targets`. `help(rlxjax.fit)` lists the names in `rlxjax.fit`.
"""

import ast as _ast
from pathlib import Path as _Path

import lazy_loader as _lazy_loader

__version__ = "0.1.0"
#: The stub `__init__.pyi` lists the public names and their modules. The package may lie in a zip archive.
_SOURCE = __spec__.loader.get_data(str(_Path(__file__).with_suffix(".pyi")))  # pyright: ignore
_STUB = _ast.parse(_SOURCE).body
_FROM = [(line.module, [one.name for one in line.names]) for line in _STUB if isinstance(line, _ast.ImportFrom)]
_NAMES = {module: [name for own, names in _FROM if own == module for name in names] for module, _ in _FROM}
# The first use of a name imports its module.
__getattr__, __dir__, _ = _lazy_loader.attach(__name__, _NAMES.pop(None), _NAMES)  # pyright: ignore
__all__ = next(_ast.literal_eval(line.value) for line in _STUB if isinstance(line, _ast.Assign))  # pyright: ignore
