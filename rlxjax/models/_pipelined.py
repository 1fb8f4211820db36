"""The latency model of a call in a loop that does not wait for results: the longer of device and host time."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rlxjax._numerics import soft_roofline
from rlxjax._typing import RealLike
from rlxjax.fit import Facts, LatencyModel, LatencyPrior, Runs

from ._functions import CountsModel
from ._gpu_kernels import GPU_KERNELS, gpu_parts_ns
from ._tpu_kernels import TPU_KERNELS, tpu_parts_ns

#: Sharpness of the maximum of device and host time.
SHARPNESS = 4


@dataclasses.dataclass(frozen=True)
class PipelinedModel(CountsModel):
    """The time of each call in a loop that does not wait. Coefficients and facts are the same as those of `called`.

    Attributes:
        called: the model of a single call that waits for its result.
        parts_ns: a function of coefficients, runs and facts. It returns device and host time in ns, `[*batch]` each.
    """

    called: LatencyModel
    parts_ns: Callable[[Any, Runs, Facts], tuple[RealLike, RealLike]]
    version = 1
    variants = ("pipelined",)

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"{self.called.name}, pipelined"

    @property
    def inputs(self) -> Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.called.inputs

    @property
    def kernels(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.called.kernels

    @property
    def prior(self) -> LatencyPrior[Any]:
        return self.called.prior

    def terms_ns(self, coefficients: Any, runs: Runs, facts: Facts) -> Mapping[str, RealLike]:
        """Return the device time, and the time that the host adds to it, in ns, `[*batch]` each."""
        device_ns, dispatch_ns = self.parts_ns(coefficients, runs, facts)
        step_ns = soft_roofline(device_ns, dispatch_ns, SHARPNESS)
        return {"device_ns": device_ns, "dispatch_ns": step_ns - device_ns}


#: Models of calls in a loop that does not wait, by the name of the model of a single call.
PIPELINED: Mapping[str, PipelinedModel] = {
    GPU_KERNELS.name: PipelinedModel(GPU_KERNELS, gpu_parts_ns),
    TPU_KERNELS.name: PipelinedModel(TPU_KERNELS, tpu_parts_ns),
}
