"""The planner: from a workflow, profiles and devices to the fastest plan tree and its predicted seconds.

A pure library over plain data: no I/O, no torch, no grpc, no store. Stages measured in one mode predict another one;
here the 30B mixture of experts of the published file at 32 GPUs: collocated it generated for 732 s and learned for
263 s; what if each side has 16 GPUs of its own and finished trajectories are streamed?

>>> shape = Lengths.from_quantiles({0.5: 60, 0.9: 111, 0.95: 127, 1: 260}, group=16)
>>> lengths = shape.scaled(mean=9300, limit=20480)
>>> generate = Profile("generate", fixed_s=160, item_s=1, lengths=lengths).measured_as(732, items=1536, devices=32)
>>> learn = Profile("learn", item_s=1, scaling_loss=0.14).measured_as(263, items=1536, devices=32)
>>> workflow = Workflow("moe", ("generate", "learn"), (Edge("generate", "learn", Granularity.GROUP),), group_size=16)
>>> tree = Split(Leaf("generate", "gpu", 16), Leaf("learn", "gpu", 16), chunks=32)
>>> round(predict(tree, workflow, [generate, learn], {"gpu": DeviceKind(32)}, items=1536))
879
>>> best = plan(workflow, [generate, learn], {"gpu": DeviceKind(32)}, items=1536)
>>> best.seconds <= 880
True
"""

from headrace_planner.errors import PlanError, PlanProblem
from headrace_planner.graph import Edge, Granularity, Workflow, embodied, reasoning
from headrace_planner.planning import Plan, lower_bound, plan, predict
from headrace_planner.profiling.fitting import Point, fit
from headrace_planner.profiling.lengths import Lengths
from headrace_planner.profiling.profiles import Memory, Profile
from headrace_planner.trees.costs import DeviceKind, Sync, Workload
from headrace_planner.trees.search import Shapes
from headrace_planner.trees.tree import Cycle, Leaf, Node, Share, Split

__all__ = [
    "Cycle",
    "DeviceKind",
    "Edge",
    "Granularity",
    "Leaf",
    "Lengths",
    "Memory",
    "Node",
    "Plan",
    "PlanError",
    "PlanProblem",
    "Point",
    "Profile",
    "Shapes",
    "Share",
    "Split",
    "Sync",
    "Workflow",
    "Workload",
    "embodied",
    "fit",
    "lower_bound",
    "plan",
    "predict",
    "reasoning",
]
