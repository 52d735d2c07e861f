"""Layers of experts (mixtures of experts) in Hugging Face models: their routers and products.

Knows no ranks: an exchange between them is an attribute.

Shapes: N tokens, K experts of a token, E experts of a layer, S = N * K rows, D hidden, I inner, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from headrace_modelkit.families.mixtures import Rule, expert_blocks, expert_shape, router_of, rule_of
from headrace_modelkit.families.routing import Routing
from headrace_modelkit.invariant import is_invariant
from headrace_modelkit.products import grouped_row_products, row_products

OWN_ROUTERS = ("mixtral", "qwen3_moe")
"""By `model_type`: those whose routers this module computes, in a batch's bits where `invariant` wants that."""
NAME, PLAIN = "headrace_experts", "headrace_plain_experts"
PROJECTIONS = ("gate_up_proj", "down_proj")
"""Tensors of an experts module in transformers, of all experts of a layer, in the order in which it has them; of those
that have adapters.
"""
ADAPTER = "_adapter"
"""Behind the name of such a tensor: the module beside it that computes with an adapter (`lora.LoraExperts`)."""


def route(
    logits_NE: Tensor, chosen: int, routing: Routing, layer: int, *, normed: bool
) -> tuple[Tensor, Tensor]:
    """(fp32 weights, experts), (N, K), of tokens with these logits: softmax, the likeliest K, maybe normed to 1."""
    probs_NE, index_NK = _choose(logits_NE, chosen)
    return _weigh(*_told(routing, layer, probs_NE, index_NK), normed=normed)


def _choose(logits_NE: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    probs_NE = logits_NE.softmax(-1, dtype=torch.float32)
    return probs_NE, probs_NE.topk(chosen, -1).indices


def _told(routing: Routing, layer: int, probs_NE: Tensor, own_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and experts as a `Routing` would have them."""
    index_NK = routing.chosen(layer, own_NK)
    return routing.observed(layer, probs_NE, index_NK), index_NK


def _weigh(probs_NE: Tensor, index_NK: Tensor, *, normed: bool) -> tuple[Tensor, Tensor]:
    weights_NK = probs_NE.gather(-1, index_NK)
    if normed:
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    return weights_NK, index_NK


class Router(nn.Module):
    """Stands in a model for its own router, with its weight, and asks a `Routing`."""

    def __init__(self, own: Any, config: Any, routing: Routing, layer: int) -> None:
        super().__init__()
        self.weight = own.weight
        self._chosen, self._layer, self._routing = own.top_k, layer, routing
        mixtral = config.model_type == "mixtral"
        self._normed = mixtral or own.norm_topk_prob
        self._rounds = not mixtral

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(logits, weights, experts) of (…, D), as transformers' routers give them."""
        multiply = row_products if is_invariant(self) else F.linear
        logits_NE = multiply(hidden.reshape(-1, hidden.shape[-1]), self.weight)
        probs_NE, index_NK = _choose(logits_NE, self._chosen)
        if self._routing.acts:
            probs_NE, index_NK = self._told(probs_NE, index_NK)
        weights_NK, index_NK = _weigh(probs_NE, index_NK, normed=self._normed)
        return logits_NE, weights_NK.to(logits_NE.dtype) if self._rounds else weights_NK, index_NK

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a layer's number would make a graph of its own
    def _told(self, probs_NE: Tensor, own_NK: Tensor) -> tuple[Tensor, Tensor]:
        return _told(self._routing, self._layer, probs_NE, own_NK)


def take_routers(model: PreTrainedModel) -> Routing | None:
    """Lets a model's routers ask the Routing that is returned, and its experts be computed by `compute_experts`; None
    for a model without experts, which stays as it is. Once for each model.
    """
    shape, config = expert_shape(model.config), model.config.get_text_config()
    if shape is None:
        return None
    routing = Routing()
    for layer, block in enumerate(expert_blocks(model)):
        if config.model_type in OWN_ROUTERS:
            block.gate = Router(block.gate, config, routing, layer)
        elif shape.routed and (rule := rule_of(router_of(block), model.config)) is not None:
            _follow(router_of(block), rule, routing, layer)
    compute_here(model.config, config)
    return routing


def compute_here(*configs: Any) -> None:
    """Lets the experts of models with these configurations be computed by `compute_experts`."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, compute_experts)
    for each in configs:
        each._experts_implementation = NAME


def _follow(router: Any, rule: Rule, routing: Routing, layer: int) -> None:
    """Lets a family's own router ask a Routing: it chooses and weighs as its class does unless told otherwise."""
    own = router.forward

    def forward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = own(*given)
        if routing.acts:
            found = told(*found)
        return found

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a layer's number would make a graph of its own
    def told(logits_NE: Tensor, weights_NK: Tensor, own_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        index_NK = routing.chosen(layer, own_NK)
        if routing.forced_MNK is not None:
            weights_NK = rule.weigh(logits_NE, index_NK).to(weights_NK.dtype)
        scores_NE = rule.scores(logits_NE)
        probs_NE = scores_NE / scores_NE.sum(-1, keepdim=True)  # as published: of DeepSeek V3, eq. 18
        balanced_NE = routing.observed(layer, probs_NE, index_NK)
        if balanced_NE is not probs_NE:  # what is added is 0; its gradient is the loss's
            weights_NK = weights_NK + (balanced_NE.gather(-1, index_NK) * 0.0).to(weights_NK.dtype)
        return logits_NE, weights_NK, index_NK

    router.forward = forward


@contextmanager
def plain_experts(models: Iterable[PreTrainedModel]) -> Iterator[None]:
    """In the body experts are computed by their own class, to be compared with it; divided ones by the parts of all
    ranks, which must have the same tokens.
    """
    ALL_EXPERTS_FUNCTIONS.register(PLAIN, _by_class)
    configs: list[Any] = [each for model in models for each in (model.config, model.config.get_text_config())]
    changed = [each for each in configs if getattr(each, "_experts_implementation", None) == NAME]
    for config in changed:
        config._experts_implementation = PLAIN
    try:
        yield
    finally:
        for config in changed:
            config._experts_implementation = NAME


def _by_class(experts: Any, hidden_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
    own = type(experts).forward.__wrapped__
    exchange: Exchange | None = getattr(experts, "exchange", None)
    if any(hasattr(experts, f"{name}{ADAPTER}") for name in PROJECTIONS):  # of which the class knows nothing
        return compute_experts(experts, hidden_ND, index_NK, weights_NK)
    if exchange is None:
        found_ND: Tensor = own(experts, hidden_ND, index_NK, weights_NK)
        return found_ND
    first = exchange.place * experts.num_experts
    here_NK = (index_NK >= first) & (index_NK < first + experts.num_experts)
    local_NK, none_NK = torch.where(here_NK, index_NK - first, 0), torch.zeros_like(weights_NK)
    return exchange.added(own(experts, hidden_ND, local_NK, torch.where(here_NK, weights_NK, none_NK)))


class Exchange(Protocol):
    """Brings rows to the ranks that have their experts, and what becomes of them back."""

    def __call__(self, rows_SD: Tensor, weights_S: Tensor, counts_E: Tensor, compute: Compute) -> Tensor:
        """(S, D) of rows in the order of their experts, `counts_E` of each; `compute` takes those of this rank's."""

    @property
    def place(self) -> int:
        """Which share of the experts this rank has."""

    def added(self, own: Tensor) -> Tensor:
        """The sum over the ranks that divide the experts."""


Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(S, D) of rows in the order of their experts (S, D), their weights (S), and of each expert how many there are."""


def compute_experts(experts: Any, hidden_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """(N, D): what the tokens' experts give, weighted and added up. An experts module's forward in transformers, whose
    flags say what it has besides a gate and two products.

    Every expert's weights get a gradient, 0 where no token came, so that ranks reduce the same tensors. A row's weight
    is multiplied in between its two products, where it is narrow.
    """
    flat_S = index_NK.flatten()
    order_S = flat_S.argsort(stable=True)
    place_NK = inverse(order_S).view(index_NK.shape)
    rows_SD = picked(hidden_ND, order_S // index_NK.shape[-1], place_NK)
    weights_S = picked(weights_NK.flatten(), order_S, place_NK.flatten())
    exchange: Exchange | None = getattr(experts, "exchange", None)
    total = int(getattr(experts, "total_experts", 0) or experts.num_experts)
    counts_E = flat_S.new_zeros(total).scatter_add_(0, flat_S, torch.ones_like(flat_S))
    biased = getattr(experts, "has_bias", False)
    expert_S = flat_S[order_S] if biased and exchange is None else None

    def compute(rows_SD: Tensor, weights_S: Tensor, counts_E: Tensor) -> Tensor:
        ends_E = counts_E.cumsum(0).to(torch.int32)
        weights_S1 = weights_S[:, None].to(rows_SD.dtype)
        if getattr(experts, "has_gate", True):
            inner_SI = _gated(experts, _product(experts, "gate_up_proj", rows_SD, ends_E, expert_S))
        else:
            inner_SI = experts.act_fn(_product(experts, "up_proj", rows_SD, ends_E, expert_S))
        if biased:  # which is weighted too
            return _product(experts, "down_proj", inner_SI, ends_E, expert_S) * weights_S1
        return _product(experts, "down_proj", inner_SI * weights_S1, ends_E, expert_S)

    if exchange is None:
        found_SD = compute(rows_SD, weights_S, counts_E)
    else:
        found_SD = exchange(rows_SD, weights_S, counts_E, compute)
    return picked(found_SD, place_NK, order_S // index_NK.shape[-1]).to(hidden_ND.dtype)


def _gated(experts: Any, both_SI: Tensor) -> Tensor:
    if hasattr(experts, "_apply_gate"):  # a class of transformers
        found_SI: Tensor = experts._apply_gate(both_SI)
        return found_SI
    gate_SI, up_SI = both_SI.chunk(2, -1)
    gated_SI: Tensor = experts.act_fn(gate_SI) * up_SI
    return gated_SI


def inverse(order_S: Tensor) -> Tensor:
    """The place of each element in an order of all."""
    return torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))


def picked(rows: Tensor, index: Tensor, back: Tensor) -> Tensor:
    """`rows[index]`, added up along a second dimension of `index`; `back` is what picks the gradient in the same way.

    torch's own gradient of an index adds row by row into zeros, which is several times the memory traffic.
    """
    if not torch.is_grad_enabled():
        return _pick(rows, index)
    function: Any = _Picked
    found: Tensor = function.apply(rows, index, back)
    return found


class _Picked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return _pick(rows, index)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return _pick(upstream, back), None, None


def _pick(rows: Tensor, index: Tensor) -> Tensor:
    return rows[index] if index.dim() == 1 else rows[index].sum(1)


def _product(experts: Any, name: str, rows_SI: Tensor, ends_E: Tensor, expert_S: Tensor | None) -> Tensor:
    """Rows times the weights of one name: as they are, or with their adapter. `expert_S`: the rows' experts, where each
    row has one.
    """
    weight_EOI: Tensor = getattr(experts, name)
    if getattr(experts, "is_transposed", False):
        weight_EOI = weight_EOI.transpose(1, 2)
    if getattr(experts, "has_bias", False):
        bias_EO: Tensor = getattr(experts, f"{name}_bias")
        # Its gradient adds whole rows, in a third of the time that an index's takes.
        bias_SO = F.embedding(_of_places(ends_E, len(rows_SI)) if expert_S is None else expert_S, bias_EO)
        if (
            expert_S is None
        ):  # Rows behind the last expert's are nobody's, and have no part in a bias's gradient.
            behind_S = torch.arange(len(rows_SI), device=ends_E.device) >= ends_E[-1]
            bias_SO = bias_SO.masked_fill(behind_S[:, None], 0.0)
        return grouped_product(rows_SI, weight_EOI, ends_E, fixed=is_invariant(experts)) + bias_SO
    adapter = getattr(experts, f"{name}{ADAPTER}", None)
    if adapter is None:
        return grouped_product(rows_SI, weight_EOI, ends_E, fixed=is_invariant(experts))
    found_SO: Tensor = adapter(rows_SI, weight_EOI, ends_E)
    return found_SO


def _of_places(ends_E: Tensor, rows: int) -> Tensor:
    """(S,) the expert of each of so many rows; the last one's behind all."""
    places_S = torch.arange(rows, device=ends_E.device, dtype=ends_E.dtype)
    return torch.searchsorted(ends_E, places_S, right=True).clamp(max=len(ends_E) - 1)


def grouped_product(rows_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor, *, fixed: bool = False) -> Tensor:
    """(S, O) of rows in the order of their experts; `ends_E` is the place behind each expert's last row.

    `fixed`: no row's bits hang on the others (`invariant`).
    """
    if fixed:
        return grouped_row_products(rows_SI, weight_EOI, ends_E)
    weight_EIO = weight_EOI.transpose(-2, -1)
    if rows_SI.dtype is torch.bfloat16:
        found_SO: Tensor = F.grouped_mm(rows_SI, weight_EIO, offs=ends_E)
        return found_SO
    # torch's own takes other types on a CPU alone, and there not with fake tensors.
    operators: Any = torch.ops
    found_SO = operators.transformers.grouped_mm_fallback(rows_SI, weight_EIO, ends_E)
    return found_SO
