"""What a run tells a rollout instance: the spec's `model` and `rollout` sections and its seed."""

from __future__ import annotations

from typing import Annotated

from headrace_modelkit.config import ModelConfig
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

# Bodies that an instance keeps for one run before it takes no more work.
CUSTODY_BYTES = 1 << 30
# Samples without a row, beyond which a stream's next assignment waits.
WAITING_SAMPLES = 4096
# Most bytes of one streamed response.
RESPONSE_BYTES = 1 << 20


class RolloutSection(BaseModel):
    """The generating side."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str = Field(default="transformers", description="name in the registry of engines")
    instances: PositiveInt = Field(default=1, description="rollout instances the run takes")
    max_concurrency: PositiveInt = Field(default=64, description="sequences decoded together by one instance")
    chunk_tokens: Annotated[int, Field(ge=0)] = Field(
        default=0, description="tokens of a streamed chunk; 0: whole answers"
    )


class RunConfig(BaseModel):
    """`OpenRunRequest.config_json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelConfig
    rollout: RolloutSection = RolloutSection()
    seed: int = 0
