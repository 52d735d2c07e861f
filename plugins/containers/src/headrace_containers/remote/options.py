"""Options of remote containers."""

from __future__ import annotations

from headrace_servicekit.registry import Options
from pydantic import Field, PositiveFloat


class RemoteOptions(Options):
    """What every provider of remote containers may be told."""

    unheld: list[str] = Field(
        default_factory=list,
        description="limits, such as limits.processes, that may be the service's own where it cannot hold the spec's",
    )
    timeout_s: PositiveFloat = Field(300.0, description="seconds in which a container has to be ready")
