"""The frozen reference model of a run, divided like the policy. Knows no steps and no loss.

Where the device is a GPU, its weights lie in host memory but for the infer rounds that use them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from headrace_modelkit.loading import DTYPES
from headrace_modelkit.model_files import empty_model
from headrace_schema.openings import TrainerConfig
from torch import Tensor

from headrace_trainer.backends._base import ReferenceFacts
from headrace_trainer.backends.fsdp.reference import reference_facts
from headrace_trainer.backends.megatron.architecture import read_architecture
from headrace_trainer.backends.megatron.groups import Groups
from headrace_trainer.backends.megatron.model import ParallelModel, Settings
from headrace_trainer.backends.megatron.pipeline import Pipeline
from headrace_trainer.backends.shared.distributing import open_source, types_of, weights_digest
from headrace_trainer.group.group import TrainerGroup


class Reference:
    """`trainer.reference`, or the run's initial policy: `warmed` are its weights where a warm-up has changed them."""

    def __init__(
        self,
        config: TrainerConfig,
        ranks: TrainerGroup,
        groups: Groups,
        settings: Settings,
        warmed: Iterator[tuple[str, Tensor]] | None,
    ) -> None:
        section = config.trainer.reference or config.model
        self._device = ranks.device
        self.facts = ReferenceFacts(section.path, "")
        """Of the weights as they were read; the leader's alone has a digest."""
        model = empty_model(section)
        source = open_source(ranks, section, model)
        if ranks.leads and source is not None:
            self.facts = reference_facts(config, section.path, weights_digest(source, model))
        own = replace(settings, dtype=DTYPES[section.dtype], recompute=False)
        self._model = ParallelModel(read_architecture(section), ranks, groups, own, frozen=True)
        if warmed is None:
            self._model.load(source.read if source else None, types_of(model))
        else:
            self._model.load_whole(warmed)
        self.pipeline = Pipeline(self._model)
        self._away = False
        self.park()

    @property
    def size_bytes(self) -> int:
        """Bytes of this rank's part."""
        return self._model.shards.size_bytes

    @property
    def model(self) -> ParallelModel:
        """The model, with its weights on the device."""
        if self._away:
            self._model.shards.move(lambda tensor: tensor.to(self._device))
            self._away = False
        return self._model

    def park(self) -> None:
        """Takes the weights to host memory until they are used again; nothing to do where they are there."""
        if self._device.type != "cpu" and not self._away:
            self._model.shards.move(lambda tensor: tensor.to("cpu"))
            self._away = True
