"""What the simulator service finds here."""

from __future__ import annotations

from headrace_servicekit.registry import Plugin

WAITS = "waits"
"""See `headrace_simulator.backends`: what a container does is waited for."""
CONTAINER = Plugin(
    "headrace_containers.backend:build",
    description="tasks in containers, where agents run commands",
    features=(WAITS,),
    broker="headrace_containers.broker",
)
CONTAINER_AGENT = Plugin(
    "headrace_containers.tasks.agents:build",
    description="agents on coding tasks: commands in the task's container, or on this host against it",
    features=(WAITS,),
    broker="headrace_containers.broker",
)
