"""What the models of a run that learns from answers are loaded from: with FSDP2, each rank its parts.

Knows no layout and no forward.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from headrace_modelkit.critic import Critic, critic_section, hidden_size
from headrace_modelkit.families.draft_files import add_draft, open_draft
from headrace_modelkit.families.drafts import DRAFT
from headrace_modelkit.families.routing import router_biases
from headrace_modelkit.loading import body_of, body_prefix, load_architecture
from headrace_modelkit.lora import add_adapters, compute_merged, quantize_frozen
from headrace_modelkit.model_files import empty_model
from headrace_modelkit.tensor_files import Tensors
from headrace_modelkit.vision import freeze_vision
from headrace_modelkit.weights import CheckpointNames
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from headrace_trainer.algorithms._base import REFERENCE_LOG_PROBS
from headrace_trainer.backends._base import StateReader
from headrace_trainer.backends.fsdp.reference import base_facts
from headrace_trainer.backends.fsdp.resident import ResidentBase
from headrace_trainer.backends.fsdp.sharded import ShardedBackend
from headrace_trainer.backends.shared.distributing import (
    check_files,
    distribute,
    open_source,
    types_of,
    weights_digest,
)
from headrace_trainer.backends.shared.fit import CRITIC, check_fit
from headrace_trainer.backends.shared.model import LanguageModel


class FsdpState(ShardedBackend, LanguageModel):
    """Policy, critic and optimizer between files and the ranks; `Backend` has what each method promises."""

    _shares_base = True

    @abstractmethod
    def _shard(self, model: PreTrainedModel, critic: Critic | None) -> None:
        """Shards models that lie on meta."""

    @abstractmethod
    def _check_forms(self) -> None:
        """Tries the weights that are loaded, and settles how rows lie. Raises Refusal INVALID."""

    @override
    def _router_biases(self) -> dict[str, Tensor]:
        return router_biases(self._sharded.buffers)

    @override
    def _kept(self) -> dict[str, Tensor]:
        return super()._kept() | self._router_biases()

    @override
    def check_files(self, *, initial: bool) -> None:
        if initial or self._lora:
            check_files(self._config.model)
        section = self._config.trainer.reference
        if REFERENCE_LOG_PROBS in self._algorithm.columns and (section is not None or not self._lora):
            check_files(section or self._config.model, "trainer.reference.path" if section else "model.path")
        plan = self._algorithm.critic
        if initial and plan is not None and plan.path is not None:
            check_files(critic_section(self._config.model, plan.path), "algorithm.options.critic_path")

    @override
    def load_initial(self) -> None:
        _ = self.layout  # refuses what does not fit before anything is read
        model, source, types = self._read_model()
        plan, body, body_source = self._algorithm.critic, None, None
        if plan is not None and plan.own_model:
            section = critic_section(self._config.model, plan.path)
            body = empty_model(section)
            body_source, body_types = open_source(self._ranks, section, body), types_of(body)
        draft = self._draft
        head = add_draft(model, draft, self._config.model)
        drawn: Tensors | None = None
        if draft is not None and head is not None and self._ranks.leads:
            drawn = open_draft(draft, self._config.model, model, self._config.seed)
        self._shard(model, self._critic_of(body))
        self._fill_weights(source, types)
        if head is not None:
            self._fill_draft(drawn)
        if body is not None:
            before, prefix = f"{CRITIC}body.", body_prefix(body)
            names = {
                name: prefix + name.removeprefix(before)
                for name in self._sharded.critic_names
                if name.startswith(before)
            }
            own = self._sharded.places(names, {name: body_types[read] for name, read in names.items()})
            found = [replace(place, name=names[place.name]) for place in own]
            distribute(self._ranks, found, body_source.read if body_source else None)
        self._check_forms()

    @override
    def check_state(self, reader: StateReader) -> None:
        check_fit(reader, self._config, self._empty_critic())

    @override
    def load_state(self, reader: StateReader | None) -> None:
        _ = self.layout
        source: Tensors | None = None
        if self._lora:
            model, source, types = self._read_model()
        else:
            model = empty_model(self._config.model, dtype=torch.float32)
            add_draft(model, self._draft, self._config.model)
            self._freeze(model)
        self._shard(model, self._empty_critic())
        if self._lora:
            self._fill_weights(source, types)
            self._fill(self._sharded.adapter_names, reader.adapter if reader else None)
        else:
            self._fill(self._sharded.weight_names, reader.weight if reader else None)
        if self._sharded.critic_names:
            self._fill(self._sharded.critic_names, reader.critic_weight if reader else None)
        self._fill_moments(reader)
        self._check_forms()

    @override
    def _fill_weights(self, source: Tensors | None, types: dict[str, torch.dtype]) -> None:
        shared = set[str]()
        if source is not None and self._base_names is not None:
            shared = self._share_base(source, types, self._base_names)
        super()._fill_weights(source, {name: kind for name, kind in types.items() if name not in shared})

    def _share_base(self, source: Tensors, types: dict[str, torch.dtype], names: CheckpointNames) -> set[str]:
        """Computes with the frozen weights that the host shares; the names of those that need no memory here."""
        assert self.bases is not None and self._base_facts is not None
        facts, own = self._base_facts[0], self._sharded.buffers
        base = ResidentBase(facts.name, facts.digest, self.weight_layout(), names)
        self.base = base.take(self.bases, source, self._base_mark or "")
        found = set[str]()
        for name, view in base.views(self.base):
            frozen, changes = own.get(name), name in self._router_biases()
            if isinstance(frozen, nn.Parameter) and view.dtype == types[name] and not changes:
                frozen.data = view
                found.add(name)
        return found

    def _fill_draft(self, source: Tensors | None) -> None:
        """As the other weights, from the values that the engine computes with."""
        own = [name for name in self._sharded.weight_names if name.startswith(DRAFT)]
        buffers = self._sharded.buffers
        types = {name: buffers[name].dtype if name in buffers else self._dtype for name in own}
        places = self._sharded.places(own, types)
        found = [replace(place, name=place.name.removeprefix(DRAFT)) for place in places]
        distribute(self._ranks, found, source.read if source else None)

    def _read_model(self) -> tuple[PreTrainedModel, Tensors | None, dict[str, torch.dtype]]:
        """The configured model on meta, its own weights frozen where adapters learn; where to read them, and in which
        types.
        """
        section = self._config.model
        model = empty_model(section)
        self._freeze(model)
        source, types = open_source(self._ranks, section, model), types_of(model)
        if self._lora:
            self._base_facts = self.base = None
            shares = self._base_mark is not None and self.layout.offload != "parameters"
            self._base_names = CheckpointNames.of(model) if shares else None
            if self._ranks.leads and source is not None:
                digest = weights_digest(source, model)
                digest.update((self._lora.quantization or "").encode())  # of which codes are made
                self._base_facts = base_facts(self._config, digest)
            vision = not self._config.trainer.freezes_vision
            add_adapters(model, self._lora, self._config.seed, torch.device("cpu"), vision=vision)
            if self._lora.quantization is not None:
                quantize_frozen(model, self._lora.quantization)
            if self._config.deterministic:  # engines merge
                compute_merged(model)
        return model, source, types

    def _freeze(self, model: PreTrainedModel) -> None:
        """What of a model learns nothing, whether adapters learn or its own weights."""
        if self._config.trainer.freezes_vision:
            freeze_vision(model, self._dtype)

    def _empty_critic(self) -> Critic | None:
        """The critic whose body, if it has one, lies on meta."""
        plan = self._algorithm.critic
        if plan is None or not plan.own_model:
            return self._critic_of(None)
        section = critic_section(self._config.model, plan.path)
        return self._critic_of(empty_model(section, dtype=torch.float32))

    def _critic_of(self, model: PreTrainedModel | None) -> Critic | None:
        if (plan := self._algorithm.critic) is None:
            return None
        if model is None:
            return Critic(hidden_size(load_architecture(self._config.model)), bias=plan.bias)
        return Critic(hidden_size(model.config), body_of(model))
