"""Kernel fusion: plans, their execution, and rewrites of graphs.

`plan_fusion` decides which nodes of a graph run as one kernel (a `FusionPlan`), and `execute_plan` runs them.
`plan_stages` decides which stages of a program are one (a `StagePlan`), by a `StageGraph` of what each takes.
"""

from ._edges import FusionEdge as FusionEdge
from ._execute import execute_kernel as execute_kernel
from ._execute import execute_plan as execute_plan
from ._plan import FusedKernel as FusedKernel
from ._plan import FusionPlan as FusionPlan
from ._plan import plan_fusion as plan_fusion
from ._rewrites import REWRITES as REWRITES
from ._rewrites import rewrite_graph as rewrite_graph
from ._rewrites import select_peaks_only_outputs as select_peaks_only_outputs
from ._soft_stages import soft_plan_ns as soft_plan_ns
from ._stage_planner import pareto_plans as pareto_plans
from ._stage_planner import plan_stages as plan_stages
from ._stages import StageGraph as StageGraph
from ._stages import StagePlan as StagePlan

__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
