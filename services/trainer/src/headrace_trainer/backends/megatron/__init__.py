"""The megatron backend: megatron-core's parallel layers over NCCL (GPU) or Gloo (CPU), imported when one is built."""

from __future__ import annotations

from headrace_schema.openings import TrainerConfig

from headrace_trainer.algorithms._base import Algorithm
from headrace_trainer.backends._base import Backend
from headrace_trainer.backends.plugins import MegatronOptions
from headrace_trainer.group.group import TrainerGroup


def build(
    options: MegatronOptions, config: TrainerConfig, algorithm: Algorithm, ranks: TrainerGroup
) -> Backend:
    """The backend of one rank, without weights yet. Raises Refusal INVALID for ranks that do not divide."""
    from headrace_trainer.backends.megatron.backend import MegatronBackend

    return MegatronBackend(config, algorithm, ranks, options)
