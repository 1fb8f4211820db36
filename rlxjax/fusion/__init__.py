"""Kernel fusion: plans, their execution, and rewrites of graphs.

`plan_fusion` decides which nodes of a graph share a kernel and returns a `FusionPlan`. `execute_plan` runs the plan.
`plan_stages` takes the time of each group of stages, decides which stages share a program, and returns `StagePlan`s.
"""

from ._kernels import FusedKernel as FusedKernel
from ._kernels import execute_kernel as execute_kernel
from ._plan import FusionEdge as FusionEdge
from ._plan import FusionPlan as FusionPlan
from ._plan import execute_plan as execute_plan
from ._plan import plan_fusion as plan_fusion
from ._rewrites import REWRITES as REWRITES
from ._rewrites import rewrite_graph as rewrite_graph
from ._rewrites import select_peaks_only_outputs as select_peaks_only_outputs
from ._stages import StagePlan as StagePlan
from ._stages import plan_stages as plan_stages
from ._stages import soft_plan_ns as soft_plan_ns

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
