"""How ranks are divided: which of them hold one model between them, and which replica a rank belongs to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_trainer.backends.plugins import MegatronOptions
from headrace_trainer.errors import invalid


@dataclass(frozen=True)
class Layout:
    """Sizes in Megatron's order of ranks: tensor first, then context, data (the replicas), pipeline."""

    tensor: int
    context: int
    pipeline: int
    replicas: int

    @classmethod
    def of(cls, options: MegatronOptions, ranks: int) -> Layout:
        """The layout of so many ranks. Raises Refusal INVALID where they do not divide."""
        model = options.tensor_parallel * options.pipeline_parallel * options.context_parallel
        if ranks % model:
            raise invalid(
                f"trainer.ranks: {ranks} ranks are no multiple of the {model} that hold one model "
                f"(tensor_parallel {options.tensor_parallel} x pipeline_parallel {options.pipeline_parallel} x "
                f"context_parallel {options.context_parallel}); set trainer.ranks: {-(-ranks // model) * model}",
                key="trainer.ranks",
            )
        return cls(
            options.tensor_parallel, options.context_parallel, options.pipeline_parallel, ranks // model
        )

    def replica(self, rank: int) -> int:
        """Which replica of the model a rank belongs to: all ranks of one learn from the same rows."""
        return rank // (self.tensor * self.context) % self.replicas
