"""The frozen reference model of a run, sharded like the policy. Knows no steps and no loss.

Where the device is a GPU, its weights lie in host memory but for the infer rounds that use them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from headrace_modelkit.experts import take_routers
from headrace_modelkit.loading import DTYPES
from headrace_modelkit.model_files import empty_model
from headrace_modelkit.pinned import rooms_of
from headrace_schema.openings import TrainerConfig
from torch import Tensor

from headrace_trainer.backends._base import ReferenceFacts
from headrace_trainer.backends.fsdp.attending.checking import FormCheck
from headrace_trainer.backends.fsdp.attending.context import ContextGroup
from headrace_trainer.backends.fsdp.experts import ExpertMesh
from headrace_trainer.backends.fsdp.layouts.layout import Layout
from headrace_trainer.backends.fsdp.loading import layers_of
from headrace_trainer.backends.fsdp.policy import Policy, computed
from headrace_trainer.backends.fsdp.sharding import ShardedModel
from headrace_trainer.backends.shared.distributing import distribute, open_source, types_of, weights_digest
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.packing import MicroBatch


class Reference:
    """`trainer.reference`, or the run's initial policy: `warmed` are its weights where a warm-up has changed them."""

    def __init__(
        self,
        config: TrainerConfig,
        ranks: TrainerGroup,
        warmed: Iterator[tuple[str, Tensor]] | None,
        shard_ranks: int,
        experts: ExpertMesh | None = None,
        context: ContextGroup | None = None,
    ) -> None:
        section = config.trainer.reference or config.model
        self._ranks = ranks
        self._temperature = config.sampling.temperature
        model = empty_model(section).requires_grad_(False)
        source, types = open_source(ranks, section, model), types_of(model)
        self.facts = ReferenceFacts(section.path, "")
        """Of the weights as they were read; the leader's alone has a digest."""
        if ranks.leads and source is not None:
            self.facts = reference_facts(config, section.path, weights_digest(source, model))
        own = config.model_copy(update={"model": section})
        # It chooses experts itself, whatever the engine did with the policy.
        self._experts = divided = experts if take_routers(model) is not None else None
        # Resharded after every layer: a whole copy would stand beside the policy's.
        layout = Layout("weights", shard_ranks)
        policy = Policy(model)
        policy.context = context
        layers = layers_of(model)
        self._model = ShardedModel(
            policy, layers, ranks, DTYPES[section.dtype], layout=layout, experts=divided
        )
        if warmed is None:
            places = self._model.places(self._model.tensors(), types)
            distribute(ranks, places, source.read if source else None)
        else:
            self._model.fill_from(warmed)
        started = time.monotonic()
        self.attention = FormCheck(own, self._model, ranks).settle()
        self.check_seconds = time.monotonic() - started
        self._away = False
        self.park()

    @property
    def size_bytes(self) -> int:
        """Bytes of this rank's shards."""
        return self._model.size_bytes

    def log_probs(self, batch: MicroBatch) -> Tensor:
        """Log-probs of the trained tokens at the temperature that each was drawn at, (K,)."""
        device = self._ranks.device
        if self._away:
            self._model.move(rooms_of(device).to_device)
            self._away = False
        with torch.no_grad():
            anchor = torch.zeros((), device=device)
            policy: Any = self._model.policy
            found = computed(
                self._experts,
                policy.model,
                policy.routing,
                batch,
                lambda: policy(batch, anchor, self._temperature),
            )
        return found[0]

    def park(self) -> None:
        """Takes the weights to host memory until they are used again; nothing to do where they are there."""
        if self._ranks.device.type != "cpu" and not self._away:
            self._model.move(rooms_of(self._ranks.device).to_host)
            self._away = True


def base_facts(config: TrainerConfig, digest: xxhash.xxh3_128) -> tuple[ReferenceFacts, ReferenceFacts]:
    """Facts of weights that are frozen below adapters: as they are, and as the reference that the run begins at."""
    path = config.model.path
    return ReferenceFacts(path, digest.hexdigest()), reference_facts(config, path, digest)


def reference_facts(config: TrainerConfig, path: str, digest: xxhash.xxh3_128) -> ReferenceFacts:
    """What tells this reference from another: its weights as read, whose digest is given, and its warm-up."""
    digest, warmup = digest.copy(), config.trainer.warmup
    if config.trainer.reference is not None or not warmup.steps:
        return ReferenceFacts(path, digest.hexdigest())
    examples = [example.model_dump() for example in config.warmup_examples]
    settings = [warmup.model_dump(), examples, config.seed, config.optimizer.model_dump()]
    digest.update(json.dumps(settings, sort_keys=True).encode())
    name = f"{path} after {warmup.steps} warm-up steps of seed {config.seed}"
    return ReferenceFacts(name, digest.hexdigest())
