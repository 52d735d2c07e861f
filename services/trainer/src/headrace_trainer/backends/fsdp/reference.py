"""The frozen reference model of a run, sharded like the policy. Knows no steps and no loss.

Where the device is a GPU, its weights lie in host memory but for the infer rounds that use them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
import xxhash
from headrace_modelkit.experts import take_routers
from headrace_modelkit.loading import DTYPES, load_model
from headrace_modelkit.weights import load_weights, state_tensors
from headrace_schema.openings import TrainerConfig
from torch import Tensor
from transformers import PreTrainedModel

from headrace_trainer.backends._base import ReferenceFacts
from headrace_trainer.backends.fsdp.context import ContextGroup
from headrace_trainer.backends.fsdp.experts import ExpertMesh
from headrace_trainer.backends.fsdp.layout import Layout
from headrace_trainer.backends.fsdp.prefixes import attends_along_paths, shares_prefixes
from headrace_trainer.backends.fsdp.sharding import ShardedModel
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.packing import MicroBatch


class Reference:
    """`trainer.reference`, or the run's initial policy: `warmed` are its weights where a warm-up has changed them."""

    def __init__(
        self,
        config: TrainerConfig,
        ranks: TrainerGroup,
        warmed: Mapping[str, Tensor] | None,
        shard_ranks: int,
        experts: ExpertMesh | None = None,
        context: ContextGroup | None = None,
    ) -> None:
        section = config.trainer.reference or config.model
        self._ranks = ranks
        self._temperature = config.sampling.temperature
        model = load_model(section, weights=ranks.leads).requires_grad_(False)
        self.facts = (
            reference_facts(config, section.path, model) if ranks.leads else ReferenceFacts(section.path, "")
        )
        """Of the weights as they were read; the leader's alone has a digest."""
        if warmed is not None and ranks.leads:
            load_weights(model, warmed)
        for _, tensor in state_tensors(model):
            ranks.share(tensor.data)
        own = config.model_copy(update={"model": section})
        self.shares_prefixes = shares_prefixes(own, [model.config])
        self.along_paths = attends_along_paths(own, [model])
        # It chooses experts itself, whatever the engine did with the policy.
        divided = experts if take_routers(model) is not None else None
        # Resharded after every layer: a whole copy would stand beside the policy's.
        layout = Layout("weights", shard_ranks)
        self._model = ShardedModel(model, ranks, DTYPES[section.dtype], layout=layout, experts=divided)
        self._model.policy.context = context
        self._away = False
        self.park()

    @property
    def size_bytes(self) -> int:
        """Bytes of this rank's shards."""
        return self._model.size_bytes

    def log_probs(self, batch: MicroBatch) -> Tensor:
        """Log-probs of the trained tokens at the sampling temperature, (K,)."""
        device = self._ranks.device
        if self._away:
            self._model.move(lambda tensor: tensor.to(device))
            self._away = False
        with torch.no_grad():
            found_K: Tensor = self._model.policy(batch, self._temperature, torch.zeros((), device=device))[0]
        return found_K

    def park(self) -> None:
        """Takes the weights to host memory until they are used again; nothing to do where they are there."""
        if self._ranks.device.type != "cpu" and not self._away:
            self._model.move(lambda tensor: tensor.to("cpu"))
            self._away = True


def reference_facts(config: TrainerConfig, path: str, model: PreTrainedModel) -> ReferenceFacts:
    """What tells this reference from another: its weights as read, and the warm-up that it went through."""
    return _facts(config, path, _weights_digest(model))


def base_facts(config: TrainerConfig, model: PreTrainedModel) -> tuple[ReferenceFacts, ReferenceFacts]:
    """Of the weights that stay frozen below adapters: as they are, and as the reference that the run begins at."""
    digest, path = _weights_digest(model), config.model.path
    return ReferenceFacts(path, digest.hexdigest()), _facts(config, path, digest)


def _weights_digest(model: PreTrainedModel) -> xxhash.xxh3_128:
    digest = xxhash.xxh3_128()
    for name, tensor in state_tensors(model):
        digest.update(name.encode())
        digest.update(memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest


def _facts(config: TrainerConfig, path: str, digest: xxhash.xxh3_128) -> ReferenceFacts:
    digest, warmup = digest.copy(), config.trainer.warmup
    if config.trainer.reference is not None or not warmup.steps:
        return ReferenceFacts(path, digest.hexdigest())
    examples = [example.model_dump() for example in config.warmup_examples]
    settings = [warmup.model_dump(), examples, config.seed, config.optimizer.model_dump()]
    digest.update(json.dumps(settings, sort_keys=True).encode())
    name = f"{path} after {warmup.steps} warm-up steps of seed {config.seed}"
    return ReferenceFacts(name, digest.hexdigest())
