"""What else than language models instances run: workloads, which plug-ins publish. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_modelkit.errors import ModelNotReadable
from headrace_servicekit.registry import Registry

if TYPE_CHECKING:
    import torch
    from headrace_schema.openings import RolloutConfig
    from headrace_schema.sections.generating import ModelSection
    from headrace_servicekit.memory.blobs import BlobReader
    from torch import nn

    from headrace_rollout.runs.opened import OpenedRun


class Workload(Protocol):
    """What an entry point of `headrace.rollout_workloads` names, as a Plugin; it is built without torch."""

    def policy_of(self, section: ModelSection) -> ActingPolicy | None:
        """The policy that a run's `model` names; None where it is of another workload. Raises ModelNotReadable."""


class ActingPolicy(Protocol):
    """A policy that acts in environments, as `model` names it."""

    def open_run(
        self,
        name: str,
        config: RolloutConfig,
        devices: tuple[torch.device, ...],
        blobs: BlobReader,
        token: str | None,
    ) -> OpenedRun:
        """A run of it, with all but its weights. Raises ModelNotReadable."""

    def initial(self, seed: int) -> tuple[nn.Module, torch.dtype]:
        """The model that a run begins with, and the type that its weights are published in. Raises ModelNotReadable."""


WORKLOADS: Registry[Workload] = Registry("headrace.rollout_workloads", "workload", "model", "model", {})


def acting_policy(section: ModelSection) -> ActingPolicy | None:
    """The policy of the workload that recognises `model`; None for a language model.

    Raises ModelNotReadable, and PluginError for a workload that cannot be had.
    """
    for workload in WORKLOADS.build_all():
        if (policy := workload.policy_of(section)) is not None:
            return policy
    if section.policy is not None:
        raise ModelNotReadable(
            "model.policy: no plug-in of this instance recognises it; install the one of its kind"
        )
    return None
