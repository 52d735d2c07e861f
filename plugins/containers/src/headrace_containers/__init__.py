"""Containers for Headrace: environments in which agents run commands, as a plug-in of the simulator service."""

from headrace_servicekit.registry import Plugin

CONTAINER = Plugin(
    f"{__name__}.backend:build",
    description="tasks in containers, where agents run commands",
    broker=f"{__name__}.broker",
)
