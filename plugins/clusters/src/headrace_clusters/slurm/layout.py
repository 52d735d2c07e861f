"""Which instances each node of a job has, by what its run takes. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_cli.errors import user_error

if TYPE_CHECKING:
    from headrace_schema.spec import RunSpec

    from headrace_clusters.slurm.script import JobOptions


@dataclass(frozen=True)
class Layout:
    """Trainers and rollouts, by node."""

    trainers: list[int]
    rollouts: list[int]

    def counts(self, node: int, simulators: int) -> dict[str, int]:
        """Instances of a node; what computes on no GPU is at the first one."""
        return {
            "rollout": self.rollouts[node],
            "trainer": self.trainers[node],
            "reward": 0 if node else 1,
            "simulator": 0 if node else simulators,
        }


def lay_out(spec: RunSpec, options: JobOptions, nodes: int, gpus: int) -> Layout:
    """What nodes with so many GPUs each have.

    Raises CommandError (exit code 2) where that is less than the run takes: it would wait for ever.
    """
    ranks, wanted, size = _taken(spec)
    trainer = options.trainer or (min(ranks, gpus) if gpus else ranks)
    trainer_nodes = options.trainer_nodes or -(-ranks // trainer)
    trainers = [trainer if node < trainer_nodes else 0 for node in range(nodes)]
    if options.rollout is not None:
        rollouts = [options.rollout] * nodes
    elif gpus:
        apart = spec.placement.mode == "disaggregated"
        rollouts = [(gpus - (each if apart else 0)) // size for each in trainers]
    else:
        rollouts = [-(-wanted // nodes)] * nodes
    for key, found, count in (
        ("trainer.ranks", sum(trainers), ranks),
        ("rollout.instances", sum(rollouts), wanted),
    ):
        if found < count:
            kind = key.partition(".")[0]
            each = f"{nodes} nodes with {gpus} GPUs each" if gpus else f"{nodes} nodes"
            needs = f" of {size} GPUs" if kind == "rollout" and size > 1 else ""
            problem = f"the run takes {count}{needs}, and {each} have {found} {kind}s"
            raise user_error(
                key,
                problem,
                f"ask for more nodes or GPUs (--nodes, --gpus), for more by --{kind}, or lower it",
            )
    return Layout(trainers, rollouts)


def idle_gpus(spec: RunSpec, nodes: int, gpus: int) -> Iterator[str]:
    """Says where a run uses fewer GPUs than its job has."""
    ranks, instances, size = _taken(spec)
    sides = (ranks, instances * size)
    used = sum(sides) if spec.placement.mode == "disaggregated" else max(sides)
    if used < nodes * gpus:
        yield (
            f"the run uses {used} of the job's {nodes * gpus} GPUs: trainer.ranks is {ranks}, rollout.instances "
            f"{instances}"
        )


def _taken(spec: RunSpec) -> tuple[int, int, int]:
    """Ranks, rollout instances, and GPUs of one."""
    from headrace_schema.sections.generating import instance_gpus

    return spec.trainer.ranks, spec.rollout.instances, instance_gpus(spec.rollout.engine_options)
