"""The `model` section of a run, as rollout and trainer read it. Knows no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class ModelConfig(BaseModel):
    """Which model, from where, in which type."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(min_length=1, description="Hugging Face id or local directory of the model")
    revision: str | None = Field(default=None, description="revision of a Hugging Face id")
    gguf_file: str | None = Field(
        default=None, description="GGUF file inside the directory, dequantised on load"
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="bfloat16", description="type of the forward pass")
    max_context: PositiveInt | None = Field(
        default=None, description="context limit in tokens; default: the model's own"
    )


class ModelNotReadable(ValueError):
    """`model.path` names no model that can be read; the message says what to change."""
