"""Environments that others wrote, as backends of the simulator: each is loaded in a child process when a pool asks."""

from headrace_servicekit.registry import Plugin
from headrace_simulator.backends import WAITS

VERIFIERS = Plugin(
    f"{__name__}.taskset:build",
    description="tasksets of verifiers 0.4, as agents",
    features=(WAITS,),
)
OPENENV = Plugin(
    f"{__name__}.openenv:build", description="environments behind servers of OpenEnv, by address"
)
NEMO_GYM = Plugin(f"{__name__}.nemo_gym:build", description="resources servers of NeMo Gym, by address")
WEB = Plugin(
    f"{__name__}.web.backend:build", description="web pages in a browser: a made shop, and a user's own sites"
)
