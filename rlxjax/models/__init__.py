"""The latency models: of Welch peaks, batched FFTs, JAX functions, compiled GPU programs and collectives.

`WELCH`, `FFT`, `FUNCTIONS`, `GPU_KERNELS` and `COLLECTIVES` are instances of `rlxjax.fit.LatencyModel`. `BUILT_IN`
is a dict from the name of each model to the model.
"""

from ._collectives import COLLECTIVES as COLLECTIVES
from ._collectives import CollectiveCoefficients as CollectiveCoefficients
from ._collectives import collective_inputs as collective_inputs
from ._collectives import memory_link as memory_link
from ._fft import FFT as FFT
from ._fft import FftLatencyCoefficients as FftLatencyCoefficients
from ._fft import factor_ratio as factor_ratio
from ._fft import fft_flop as fft_flop
from ._functions import FUNCTIONS as FUNCTIONS
from ._functions import FunctionCoefficients as FunctionCoefficients
from ._functions import function_runs as function_runs
from ._functions import kernel_runs as kernel_runs
from ._functions import untimed_operations as untimed_operations
from ._gpu_kernels import GPU_KERNELS as GPU_KERNELS
from ._gpu_kernels import GpuCoefficients as GpuCoefficients
from ._gpu_kernels import gpu_facts as gpu_facts
from ._gpu_kernels import gpu_facts_of_kind as gpu_facts_of_kind
from ._gpu_kernels import gpu_inputs as gpu_inputs
from ._gpu_kernels import gpu_parts_ns as gpu_parts_ns
from ._gpu_kernels import gpu_runs as gpu_runs
from ._pipelined import PIPELINED as PIPELINED
from ._tpu_kernels import TPU_KERNELS as TPU_KERNELS
from ._tpu_kernels import TpuCoefficients as TpuCoefficients
from ._tpu_kernels import product_ns as product_ns
from ._tpu_kernels import tpu_facts as tpu_facts
from ._tpu_kernels import tpu_inputs as tpu_inputs
from ._weights import Weights as Weights
from ._weights import read_weights as read_weights
from ._welch import WELCH as WELCH
from ._welch import heap_rates as heap_rates
from ._welch import welch_micro_prior as welch_micro_prior
from ._welch_terms import LatencyCoefficients as LatencyCoefficients

#: The models that a calibration file may hold, by name. The first model is the default.
BUILT_IN = {model.name: model for model in (WELCH, FFT, FUNCTIONS, GPU_KERNELS, COLLECTIVES)}

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
