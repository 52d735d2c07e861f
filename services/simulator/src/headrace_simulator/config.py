"""Typed settings of the simulator service."""

from __future__ import annotations

import os

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt


class SimulatorSettings(BaseModel):
    """Limits; from the environment, `HEADRACE_SIMULATOR_<FIELD>`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    children: PositiveInt = Field(
        default_factory=lambda: 4 * (os.cpu_count() or 1),
        description="most processes of one pool; more environments share them",
    )
    environments: PositiveInt = Field(1024, description="most environments of all pools together")
    step_timeout_s: PositiveFloat = Field(60.0, description="limit of a step where the pool names none")
    reset_timeout_s: PositiveFloat = Field(60.0, description="least limit of a reset and of a picture")
    gather_s: PositiveFloat = Field(
        10.0,
        description="how long environments that are stepped in one call wait for the action of one whose episode goes "
        "on; that episode is then lost",
    )
    robot: str = Field(
        "",
        description="PATH.py:FUNCTION of this host's robot file: the instance is that robot, and opens nothing else",
    )
    open_timeout_s: PositiveFloat = Field(300.0, description="limit of making one process's environments")
