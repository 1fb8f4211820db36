"""A step of a loop that does not wait for its results: the longer of what the device and the host take."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rlxjax._numerics import soft_roofline
from rlxjax._typing import RealLike
from rlxjax.fit import Facts, LatencyModel, LatencyPrior, Runs

from ._functions import CountsModel
from ._gpu_kernels import GPU_KERNELS, gpu_parts_ns
from ._tpu_kernels import TPU_KERNELS, tpu_parts_ns

#: How sharply the longer one decides.
SHARPNESS = 4


@dataclasses.dataclass(frozen=True)
class PipelinedModel(CountsModel):
    """The runs of another model, called again and again without waiting; coefficients and facts are those of that one.

    Attributes:
        called: the model of one call that is waited for.
        parts_ns: of its coefficients, runs and facts: what the device takes, and the host to dispatch, `[*batch]`.
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
        """Return what the device takes, and what the host takes longer, in ns, `[*batch]` each."""
        device_ns, dispatch_ns = self.parts_ns(coefficients, runs, facts)
        step_ns = soft_roofline(device_ns, dispatch_ns, SHARPNESS)
        return {"device_ns": device_ns, "dispatch_ns": step_ns - device_ns}


#: A step of a loop that does not wait, by the name of the model of one call.
PIPELINED: Mapping[str, PipelinedModel] = {
    GPU_KERNELS.name: PipelinedModel(GPU_KERNELS, gpu_parts_ns),
    TPU_KERNELS.name: PipelinedModel(TPU_KERNELS, tpu_parts_ns),
}
