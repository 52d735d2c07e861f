"""Which models the backend computes as Hugging Face does: Llama- and Qwen-family ones, also with experts. Knows no
Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from headrace_modelkit.families.mixtures import ExpertShape, expert_shape
from headrace_modelkit.loading import context_limit, load_model
from headrace_modelkit.weights import state_tensors
from headrace_schema.sections.generating import ModelSection
from headrace_trainer.errors import invalid
from torch import Tensor
from transformers import PreTrainedConfig

from headrace_megatron.layout import Layout

QKV_BIAS = {"llama": False, "mixtral": False, "qwen2": True, "qwen3": False, "qwen3_moe": False}
"""Families by `model_type`, and whether their queries, keys and values have biases."""
ROTARY_TYPES = ("default", "linear", "llama3")
"""Those whose frequencies are fixed and whose cosines are not scaled."""


@dataclass(frozen=True)
class Architecture:
    """A model's sizes by Hugging Face's words, and the shape of every canonical weight."""

    hidden: int
    layers: int
    heads: int
    groups: int
    head: int
    inner: int
    vocabulary: int
    epsilon: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    context: int
    frequencies: Tensor
    shapes: dict[str, tuple[int, ...]]
    experts: ExpertShape | None = None
    expert_inner: int = 0
    experts_normed: bool = True
    """Whether the weights of a token's experts add up to 1."""
    experts_rounded: bool = True
    """Whether they are rounded to the model's type before they are used."""
    sparse: tuple[int, ...] = ()
    """Layers that have experts in place of an MLP."""

    def check(self, layout: Layout, key: str) -> None:
        """Raises Refusal INVALID where a size of the model does not divide by its ranks."""
        by_tensor = {
            "attention heads": self.heads,
            "key and value heads": self.groups,
            "words of the vocabulary": self.vocabulary,
        }
        if len(self.sparse) < self.layers:
            by_tensor["inner sizes of an MLP"] = self.inner
        if self.experts is not None:
            by_tensor["inner sizes of an expert"] = self.expert_inner
        elif layout.experts > 1 and key == "model.path":
            name = "trainer.backend_options.expert_parallel"
            raise invalid(f"{name}: the model ({key}) has no experts to divide; leave it out", key=name)
        for what, size in by_tensor.items():
            _check_divides(what, size, "tensor_parallel", layout.tensor, key)
        if self.experts is not None:
            _check_divides("experts", self.experts.experts, "expert_parallel", layout.experts, key)
        _check_divides("layers", self.layers, "pipeline_parallel", layout.pipeline, key)
        of_stage = self.layers // layout.pipeline
        _check_divides("layers of a stage", of_stage, "virtual_stages", layout.virtual, key)


def read_architecture(section: ModelSection, key: str = "model.path") -> Architecture:
    """What Megatron has to know of a model. Raises Refusal INVALID for one that it would compute otherwise, and
    ModelNotReadable.
    """
    with torch.device("meta"):
        model: Any = load_model(section, weights=False)
    config = model.config
    if reason := _obstacle(config, context_limit(section, config)):
        families = ", ".join(sorted(QKV_BIAS))
        raise invalid(
            f"{key}: trainer.backend: megatron does not compute {section.path!r}: {reason}; name a model of the "
            f"families {families}, or set trainer.backend: fsdp",
            key=key,
        )
    rotary = type(model.base_model.rotary_emb)(config=config)
    return Architecture(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        head=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        epsilon=config.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        qkv_bias=QKV_BIAS[config.model_type],
        qk_norm=config.model_type in ("qwen3", "qwen3_moe"),
        context=context_limit(section, config),
        frequencies=rotary.inv_freq.detach().float().clone(),
        shapes=(shapes := {name: tuple(tensor.shape) for name, tensor in state_tensors(model)}),
        experts=expert_shape(config),
        expert_inner=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        experts_normed=bool(getattr(config, "norm_topk_prob", True)),
        experts_rounded=config.model_type != "mixtral",
        sparse=tuple(
            layer
            for layer in range(config.num_hidden_layers)
            if f"model.layers.{layer}.mlp.gate.weight" in shapes
        ),
    )


def _obstacle(config: PreTrainedConfig, context: int) -> str:
    """Why a model is not one that Megatron's layers compute; empty when it is."""
    untyped: Any = config
    if untyped.model_type not in QKV_BIAS:
        return f"it is a {untyped.model_type} model"
    if untyped.hidden_act != "silu":
        return f"its activation is {untyped.hidden_act}, not silu"
    if getattr(untyped, "attention_bias", False) or getattr(untyped, "mlp_bias", False):
        return "its projections have biases"
    rotary = (getattr(untyped, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in ROTARY_TYPES:
        return f"its rotary embedding is of type {rotary}, not {', '.join(ROTARY_TYPES)}"
    kinds = getattr(untyped, "layer_types", None) or ()
    window = getattr(untyped, "sliding_window", None) or context
    if "sliding_attention" in kinds and window < context:
        return f"it attends to the last {window} tokens only (model.max_context: {window} or less mends that)"
    return ""


def _check_divides(what: str, size: int, option: str, ranks: int, key: str) -> None:
    if size % ranks:
        name = f"trainer.backend_options.{option}"
        fits = [count for count in range(1, ranks) if size % count == 0]
        raise invalid(
            f"{name}: {size} {what} ({key}) cannot be divided into {ranks}; the nearest lower value that "
            f"divides them is {fits[-1]}",
            key=name,
        )
