"""The fsdp backend: PyTorch's fully_shard over Gloo (CPU) or NCCL (GPU); one rank is the same code."""

from headrace_schema.openings import TrainerConfig

from headrace_trainer.algorithms._base import Algorithm
from headrace_trainer.backends._base import Backend
from headrace_trainer.backends.fsdp.backend import FsdpBackend
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.group.group import TrainerGroup


def build(options: FsdpOptions, config: TrainerConfig, algorithm: Algorithm, ranks: TrainerGroup) -> Backend:
    """The backend of one rank, without weights yet."""
    return FsdpBackend(config, algorithm, ranks, options)
