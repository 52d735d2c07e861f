"""Settings of the pool of children."""

from __future__ import annotations

import os

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt


class PoolSettings(BaseModel):
    """How children are run; from the environment, `HEADRACE_REWARD_<FIELD>`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    children: PositiveInt = Field(default_factory=lambda: min(4, os.cpu_count() or 1))
    batch: PositiveInt = Field(64, description="answers sent to a child at once")
    load_timeout_s: PositiveFloat = Field(120.0, description="limit of listing the scorers, imports included")
    memory_bytes: int = Field(16 * 1024**3, ge=0, description="address space of a child; 0: unlimited")
    remembered: PositiveInt = Field(65536, description="results kept for repeated requests, per run")
