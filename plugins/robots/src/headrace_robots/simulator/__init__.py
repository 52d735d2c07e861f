"""The simulator's side: backends of robots' simulators, each loaded in a child process when a pool asks for it."""

from headrace_servicekit.registry import Plugin

METAWORLD = Plugin(
    f"{__name__}.metaworld.backend:build", description="Meta-World's tasks, a new goal each episode"
)
MANISKILL = Plugin(
    f"{__name__}.maniskill.backend:build", description="ManiSkill 3's tasks, on the CPU or many on a GPU"
)
ISAACLAB = Plugin(f"{__name__}.isaaclab:build", description="Isaac Lab's tasks, many in one process on a GPU")
LIBERO = Plugin(f"{__name__}.libero:build", description="LIBERO's five suites with their initial states")
WORLD = Plugin(f"{__name__}.world:build", description="dynamics that were learned from real episodes")
ROBOT = Plugin(
    f"{__name__}.robot.backend:build",
    description="the real robot of a simulator's host",
    features=("waits",),
    broker=f"{__name__}.robot.broker",
)
