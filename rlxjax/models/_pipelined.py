"""The time of a call in a loop that does not wait for results: the longer of device and host time."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rlxjax._numerics import soft_roofline
from rlxjax._typing import RealLike
from rlxjax.fit import Facts, LatencyModel, LatencyPrior, Runs

from ._functions import CountsModel
from ._gpu_kernels import GPU_KERNELS, gpu_parts_ns
from ._tpu_kernels import TPU_KERNELS, tpu_parts_ns

#: Sharpness of the maximum of both times.
SHARPNESS = 4


@dataclasses.dataclass(frozen=True)
class PipelinedModel(CountsModel):
    """Repeated calls without waiting; coefficients and facts are those of the model of one call.

    Attributes:
        called: the model of one call with a wait.
        parts_ns: returns device and dispatch times in ns, `[*batch]` each, for coefficients, runs and facts.
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
    def prior(self) -> LatencyPrior[Any]:
        return self.called.prior

    def terms_ns(self, coefficients: Any, runs: Runs, facts: Facts) -> Mapping[str, RealLike]:
        """Return the time of the device, and the further time of the host, in ns, `[*batch]` each."""
        device_ns, dispatch_ns = self.parts_ns(coefficients, runs, facts)
        step_ns = soft_roofline(device_ns, dispatch_ns, SHARPNESS)
        return {"device_ns": device_ns, "dispatch_ns": step_ns - device_ns}


#: Models of repeated calls, by the name of the model of one call.
PIPELINED: Mapping[str, PipelinedModel] = {
    GPU_KERNELS.name: PipelinedModel(GPU_KERNELS, gpu_parts_ns),
    TPU_KERNELS.name: PipelinedModel(TPU_KERNELS, tpu_parts_ns),
}
