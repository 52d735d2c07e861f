"""Containers for Headrace: environments in which agents run commands, as a plug-in of the simulator service."""

from headrace_servicekit.registry import Plugin

WAITS = "waits"
"""See `headrace_simulator.backends`: what a container does is waited for."""
CONTAINER = Plugin(
    f"{__name__}.backend:build",
    description="tasks in containers, where agents run commands",
    features=(WAITS,),
    broker=f"{__name__}.broker",
)
CONTAINER_AGENT = Plugin(
    f"{__name__}.tasks.agents:build",
    description="agents on coding tasks: commands in the task's container, or on this host against it",
    features=(WAITS,),
    broker=f"{__name__}.broker",
)
