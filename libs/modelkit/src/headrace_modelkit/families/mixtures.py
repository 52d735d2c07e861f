"""Mixtures of experts of any family: how many experts their layers have, and how their routers weigh those they choose.

Both are found by trial from transformers' own classes, so that no family has to be listed. Knows no forward of a run.

Shapes: N tokens, K experts of a token, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.initialization import no_init_weights

_SAME = 1e-4
"""How far apart weights may be, relatively, that a rule explains."""
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configurations call the number of experts."""


@dataclass(frozen=True)
class ExpertShape:
    """What a model's layers of experts have in common."""

    layers: int
    experts: int
    chosen: int
    routed: bool = True
    """Whether the weights of any experts that a token is sent to are known: for replay and the load-balance loss."""
    adapts: bool = True
    """Whether experts can have adapters."""


@dataclass(frozen=True)
class Rule:
    """How a router weighs the experts that it has chosen: their scores, maybe normed to 1, times `scale`."""

    score: str
    normed: bool
    scale: float

    def scores(self, logits_NE: Tensor) -> Tensor:
        """fp32 scores of all experts."""
        return _SCORES[self.score](logits_NE.float())

    def weigh(self, logits_NE: Tensor, index_NK: Tensor) -> Tensor:
        """(N, K) fp32 weights of these experts."""
        weights_NK = self.scores(logits_NE).gather(-1, index_NK)
        if self.normed:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        return weights_NK * self.scale


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits_NE: logits_NE.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits_NE: torch.nn.functional.softplus(logits_NE).sqrt(),
}
_shapes: dict[str, ExpertShape | None] = {}
_rules: dict[tuple[type, str], Rule | None] = {}


def expert_shape(config: PreTrainedConfig) -> ExpertShape | None:
    """Of a model with layers of experts whose products can be computed here; None for others."""
    text: Any = config.get_text_config()
    if not any((getattr(text, key, None) or 0) for key in _COUNTS):
        return None
    key = f"{type(config).__name__} {config.to_json_string(use_diff=False)}"
    if key not in _shapes:
        _shapes[key] = _shape(config)
    return _shapes[key]


def no_shape(config: PreTrainedConfig) -> str:
    """Why a model has no ExpertShape, behind its name."""
    text: Any = config.get_text_config()
    if any((getattr(text, key, None) or 0) for key in _COUNTS):
        return f"is a {config.model_type} model, whose experts only its own class can compute"
    return f"is a {config.model_type} model, which has no experts"


def _shape(config: PreTrainedConfig) -> ExpertShape | None:
    models: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText]
    own = next((each for each in models if type(config) in each._model_mapping), None)
    if own is None:
        return None
    with unset_fake_temporarily(), torch.device("meta"), no_init_weights():
        blocks = list(expert_blocks(own.from_config(config)))
    if not blocks:
        return None
    first: Any = blocks[0].experts
    rule = rule_of(router_of(blocks[0]), config)
    chosen = chosen_of(router_of(blocks[0]), config)
    routed = rule is not None and all(type(router_of(each)) is type(router_of(blocks[0])) for each in blocks)
    adapts = first.has_gate and not first.is_transposed and not first.has_bias
    return ExpertShape(len(blocks), int(first.num_experts), chosen, routed, adapts)


def chosen_of(router: Any, config: PreTrainedConfig) -> int:
    """Experts of a token."""
    text: Any = config.get_text_config()
    return int(getattr(router, "top_k", 0) or getattr(text, "top_k_experts", 0) or text.num_experts_per_tok)


def own_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Those of a model without those of the head that drafts for it."""
    beside: Any = getattr(model, "draft", None)
    left_out = set() if beside is None else set(beside.modules())
    return (each for each in model.modules() if each not in left_out)


def expert_blocks(model: nn.Module) -> Iterator[Any]:
    """The blocks of a model that have a router and `experts` behind transformers' interface, in the order of layers."""
    for module in own_modules(model):
        experts = getattr(module, "experts", None)
        if not isinstance(experts, nn.Module) or router_of(module) is None:
            continue
        if hasattr(experts, "has_gate") and not getattr(experts, "has_post_expert_norm", False):
            yield module


def router_of(block: Any) -> Any:
    """The router beside a block's experts."""
    return next(
        (found for name in ("gate", "router") if isinstance(found := getattr(block, name, None), nn.Module)),
        None,
    )


def rule_of(router: Any, config: PreTrainedConfig) -> Rule | None:
    """How a router of this class weighs, as one with weights of chance does; None where no known rule does the same."""
    key = (type(router), config.to_json_string(use_diff=False))
    if key not in _rules:
        with unset_fake_temporarily(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                _rules[key] = _tried(type(router)(config.get_text_config()).float(), config)
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
                _rules[key] = None  # made or asked in a way of its own
    return _rules[key]


@torch.no_grad()
def _tried(router: Any, config: PreTrainedConfig) -> Rule | None:
    for tensor in [*router.parameters(), *router.buffers()]:
        if tensor.is_floating_point():
            tensor.normal_()
    text: Any = config.get_text_config()
    hidden = torch.randn(1, 16, text.hidden_size, device="cpu") * text.hidden_size**-0.5
    beside = len(signature(router.forward).parameters) - 1
    biases = [torch.randn(int(router.num_experts), device="cpu")] * beside
    try:
        logits_NE, weights_NK, index_NK = router(hidden[0], *biases)
    except (ValueError, IndexError):  # wants rows of sequences
        logits_NE, weights_NK, index_NK = router(hidden, *biases)
    if index_NK.is_floating_point() or weights_NK.shape != index_NK.shape:
        return None
    for score in _SCORES:
        for normed in (True, False):
            ratio_NK = weights_NK.float() / Rule(score, normed, 1.0).weigh(logits_NE, index_NK)
            if float((ratio_NK / ratio_NK.mean() - 1).abs().max()) < _SAME:
                return Rule(score, normed, float(ratio_NK.mean()))
    return None
