"""How a model lies on its ranks, and in which order layouts are tried: the cheapest first. Knows no bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from headrace_schema.openings import TrainerConfig

from headrace_trainer.algorithms._base import Algorithm
from headrace_trainer.backends.fsdp.experts import check_experts
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.errors import invalid

GPUS_PER_HOST = 8
"""Where ranks have not met yet and nobody knows on how many hosts they are."""
_OPTIONS = "trainer.backend_options"


@dataclass(frozen=True)
class Layout:
    """`shard_ranks` hold one copy of the model between them. What `shard` and `offload` mean is in FsdpOptions."""

    shard: Literal["state", "gradients", "weights"]
    shard_ranks: int
    checkpointing: bool = False
    offload: Literal["none", "optimizer", "parameters"] = "none"
    keeps_attention: bool = False
    """Of layers that are computed again what attention gave, where there is room; costs nothing else."""
    activations_away: bool = False
    """Inputs of layers that are computed again lie in host memory."""

    def __str__(self) -> str:
        """For people: the keys that fix it."""
        parts = [f"shard: {self.shard}", f"shard_ranks: {self.shard_ranks}"]
        if self.checkpointing:
            parts.append("gradient_checkpointing: true")
        if self.offload != "none":
            parts.append(f"offload: {self.offload}")
        if self.activations_away:
            parts.append("offload_activations: true")
        return ", ".join(parts)


def plain_layout(ranks: int) -> Layout:
    """Whole weights and gradients on each rank: the fastest one."""
    return Layout("state", ranks)


def candidates(
    config: TrainerConfig, options: FsdpOptions, ranks: int, ranks_per_host: int, *, on_gpu: bool
) -> list[Layout]:
    """Layouts that the run allows, the cheapest first. On a CPU nothing is gained by offloading: none does of itself.

    Reducing after each micro-batch costs a collective a layer, gathering weights two more, recomputing a forward, a
    mesh of all ranks the links between hosts, and moving state to the host those to it, once a step or at every layer.
    """
    found: list[Layout] = []
    copies = options.expert_parallel == 1  # divided experts have one copy
    for layout in _ladder(ranks, ranks_per_host if copies else ranks):
        if layout.offload != "none" and not on_gpu:
            continue
        lora = config.trainer.lora
        if lora is not None and lora.quantization and layout.offload == "parameters":
            continue
        layout = _fixed(layout, config, options)
        if layout not in found:
            found.append(layout)
    return found


def _ladder(ranks: int, ranks_per_host: int) -> Iterator[Layout]:
    yield plain_layout(ranks)
    divides = 1 < ranks_per_host < ranks and ranks % ranks_per_host == 0
    for mesh in ([ranks_per_host] if divides else []) + [ranks]:
        yield Layout("gradients", mesh)
        yield Layout("weights", mesh)
        yield Layout("weights", mesh, checkpointing=True)
    yield Layout("weights", ranks, checkpointing=True, offload="optimizer")
    yield Layout("weights", ranks, checkpointing=True, offload="parameters")


def _fixed(layout: Layout, config: TrainerConfig, options: FsdpOptions) -> Layout:
    wanted = {
        "shard": options.shard,
        "shard_ranks": options.shard_ranks,
        "checkpointing": config.trainer.gradient_checkpointing,
        "offload": options.offload,
    }
    if options.offload_activations:
        wanted |= {"checkpointing": True, "activations_away": True}
    return replace(layout, **{name: value for name, value in wanted.items() if value is not None})  # type: ignore[arg-type]


def check_run(options: FsdpOptions, config: TrainerConfig, algorithm: Algorithm) -> None:
    """Raises Refusal INVALID, naming the key, for options that contradict each other, and ModelNotReadable."""
    check_experts(options, config, algorithm)
    trainer = config.trainer
    for ranks in sorted(
        {trainer.ranks, trainer.min_ranks or trainer.ranks, trainer.max_ranks or trainer.ranks}
    ):
        check_ranks(options, ranks)


def check_ranks(options: FsdpOptions, ranks: int) -> None:
    """Raises Refusal INVALID if `shard_ranks` does not divide the ranks."""
    wanted = options.shard_ranks
    if wanted is not None and ranks % wanted:
        key = f"{_OPTIONS}.shard_ranks"
        divisors = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        raise invalid(f"{key}: {wanted} does not divide {ranks} ranks; give one of {divisors}", key=key)
