"""What else than answers of a language model runs learn from: workloads, which plug-ins publish. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_servicekit.registry import Registry

if TYPE_CHECKING:
    from headrace_schema.openings import TrainerConfig

    from headrace_trainer.kinds import RunKind


class Workload(Protocol):
    """What an entry point of `headrace.trainer_workloads` names, as a Plugin; it is built without torch."""

    def facets(self) -> dict[str, list[str]]:
        """What an instance registers that can learn so, by facet."""

    def run_kind(self, config: TrainerConfig) -> RunKind | None:
        """A run of this workload; None where its model is of another. Raises ModelNotReadable."""


WORKLOADS: Registry[Workload] = Registry("headrace.trainer_workloads", "workload", "model", "model", {})
