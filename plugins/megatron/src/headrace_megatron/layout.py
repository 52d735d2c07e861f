"""How ranks are divided: which of them hold one model between them, and which replica a rank belongs to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_trainer.errors import invalid

from headrace_megatron.plugin import MegatronOptions


@dataclass(frozen=True)
class Layout:
    """Sizes in Megatron's order of ranks: tensor first, then context, data (the replicas), pipeline."""

    tensor: int
    context: int
    pipeline: int
    replicas: int
    experts: int = 1
    """Ranks that divide the experts: so many neighbours among context-parallel ranks and replicas."""
    virtual: int = 1
    """Chunks of layers of each stage, which follow each other round the stages."""

    @classmethod
    def of(cls, options: MegatronOptions, ranks: int) -> Layout:
        """The layout of this number of ranks. Raises Refusal INVALID where they do not divide."""
        model = options.tensor_parallel * options.pipeline_parallel * options.context_parallel
        if ranks % model:
            raise invalid(
                f"trainer.ranks: {ranks} ranks are no multiple of the {model} that hold one model "
                f"(tensor_parallel {options.tensor_parallel} x pipeline_parallel {options.pipeline_parallel} x "
                f"context_parallel {options.context_parallel}); set trainer.ranks: {-(-ranks // model) * model}",
                key="trainer.ranks",
            )
        replicas, experts = ranks // model, options.expert_parallel
        if replicas * options.context_parallel % experts:
            key = "trainer.backend_options.expert_parallel"
            raise invalid(
                f"{key}: {replicas} replicas x context_parallel {options.context_parallel} are no multiple of the "
                f"{experts} ranks that divide the experts; set trainer.ranks: {model * experts}, or expert_parallel to "
                f"a divisor of {replicas * options.context_parallel}",
                key=key,
            )
        return cls(
            options.tensor_parallel,
            options.context_parallel,
            options.pipeline_parallel,
            replicas,
            experts,
            options.virtual_stages,
        )

    @property
    def multiple(self) -> int:
        """Places of a row that are always divided: its length is a multiple of so many."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def most_kept(self) -> int:
        """Of how many parts, by chunk, the first stage keeps activations before the first gradient comes: 1F1B's."""
        if self.virtual == 1:
            return self.pipeline
        return 2 * (self.pipeline - 1) + (self.virtual - 1) * self.pipeline + 1

    def __str__(self) -> str:
        sizes = {
            "tensor": self.tensor,
            "context": self.context,
            "replicas": self.replicas,
            "pipeline": self.pipeline,
            "virtual stages": self.virtual,
            "experts": self.experts,
        }
        kept = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        return " x ".join(kept) or "one rank"

    def first_layer(self, stage: int, chunk: int, layers: int) -> int:
        """Of a chunk of a stage, where the model has so many layers."""
        return (chunk * self.pipeline + stage) * (layers // (self.pipeline * self.virtual))

    def replica(self, rank: int) -> int:
        """Which replica of the model a rank belongs to: all ranks of one learn from the same rows."""
        return rank // (self.tensor * self.context) % self.replicas
