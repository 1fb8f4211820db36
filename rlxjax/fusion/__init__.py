"""Kernel fusion: plans, their execution, and rewrites of graphs."""

from ._edges import FusionEdge as FusionEdge
from ._execute import execute_kernel as execute_kernel
from ._execute import execute_plan as execute_plan
from ._plan import FusedKernel as FusedKernel
from ._plan import FusionPlan as FusionPlan
from ._plan import plan_fusion as plan_fusion
from ._rewrites import REWRITES as REWRITES
from ._rewrites import rewrite_graph as rewrite_graph
from ._rewrites import select_peaks_only_outputs as select_peaks_only_outputs
