"""Layers of experts (mixtures of experts) in Hugging Face models: which experts a token goes to, and their products.

`Routing` tells the routers of a model what to do besides choosing: to record their choice, to follow a recorded one, to
count, and to add the gradient of the load-balance loss. Knows no ranks: an exchange between them is an attribute.

Shapes: N tokens, K experts of a token, E experts of a layer, M layers of experts, S = N * K rows, D hidden, I inner, O
outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from headrace_modelkit.invariant import is_invariant
from headrace_modelkit.products import grouped_row_products, row_products

FAMILIES = ("mixtral", "qwen3_moe")
"""By `model_type`: those whose routers this module computes."""
NAME = "headrace_experts"
PROJECTIONS = ("gate_up_proj", "down_proj")
"""Tensors of an experts module in transformers, of all experts of a layer, in the order in which it has them."""
ADAPTER = "_adapter"
"""Behind the name of such a tensor: the module beside it that computes with an adapter (`lora.LoraExperts`)."""
OWN = 65535
"""In place of a recorded expert: the router chooses itself. No model has so many experts."""


@dataclass(frozen=True)
class ExpertShape:
    """What a model's layers of experts have in common."""

    layers: int
    experts: int
    chosen: int


def expert_shape(config: PreTrainedConfig) -> ExpertShape | None:
    """Of a model that has layers of experts which this module computes; None for others."""
    untyped: Any = config.get_text_config()
    if untyped.model_type not in FAMILIES:
        return None
    if untyped.model_type == "mixtral":
        return ExpertShape(untyped.num_hidden_layers, untyped.num_local_experts, untyped.num_experts_per_tok)
    layers = [index for index in range(untyped.num_hidden_layers) if _is_sparse(untyped, index)]
    return ExpertShape(len(layers), untyped.num_experts, untyped.num_experts_per_tok) if layers else None


def _is_sparse(config: Any, layer: int) -> bool:
    return layer not in (config.mlp_only_layers or ()) and (layer + 1) % config.decoder_sparse_step == 0


_ASKED = ("forced_MNK", "recorded", "counts", "balance_ME")


@dataclass
class Routing:
    """What the routers of one model do in a forward, and what they find. Set before the forward; kept for a backward
    that computes layers again.

    `forced_MNK` are experts to send the tokens to (`OWN` where the router chooses). `visits_N` is how often each token
    counts: 0 for padding, and for a beginning that several sequences share the number of them. `balance_ME` is the
    gradient of the load-balance loss at each probability of a visit, see `balance_gradient`.
    """

    forced_MNK: Tensor | None = None
    visits_N: Tensor | None = None
    balance_ME: Tensor | None = None
    recorded: list[Tensor] | None = None
    """(N, K) of each layer in turn, where a list is given."""
    counts: Counts | None = None
    """What is counted, where it is given."""
    changed: Tensor | float = 0.0
    """How many of the forced choices the routers would have made otherwise, since it was set to 0."""
    forced: Tensor | float = 0.0
    """How many choices were forced, since it was set to 0."""

    acts: bool = field(default=False, init=False)
    """Whether routers do anything besides choosing: all that a compiled layer looks at."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _ASKED:
            super().__setattr__("acts", any(getattr(self, each, None) is not None for each in _ASKED))

    def noted(self) -> tuple[Any, ...]:
        """What was found until now, for `forget`."""
        recorded = None if self.recorded is None else len(self.recorded)
        counts = None if self.counts is None else self.counts.copy()
        return recorded, counts, self.changed, self.forced

    def forget(self, noted: tuple[Any, ...]) -> None:
        """Drops what was found since: a forward that is made again finds it again."""
        recorded, counts, self.changed, self.forced = noted
        if self.recorded is not None:
            del self.recorded[recorded:]
        if self.counts is not None:
            vars(self.counts).update(vars(counts))

    def chosen(self, layer: int, own_NK: Tensor) -> Tensor:
        """(N, K) experts that the tokens go to."""
        if self.forced_MNK is not None:
            forced_NK = self.forced_MNK[layer].to(own_NK.dtype)
            given_NK = forced_NK != OWN
            same_NK = (forced_NK[:, :, None] == own_NK[:, None, :]).any(-1)
            if self.visits_N is not None:
                given_NK = given_NK & (self.visits_N > 0)[:, None]
            self.changed = self.changed + (given_NK & ~same_NK).sum()
            self.forced = self.forced + given_NK.sum()
            own_NK = torch.where(forced_NK != OWN, forced_NK, own_NK)
        if self.recorded is not None:
            self.recorded.append(own_NK.detach())
        return own_NK

    def observed(self, layer: int, probs_NE: Tensor, chosen_NK: Tensor) -> Tensor:
        """The probabilities, counted where wanted, with the load-balance loss's gradient added in the backward pass."""
        if self.counts is not None and self.visits_N is not None:
            self.counts.add(layer, probs_NE.detach(), chosen_NK, self.visits_N)
        if self.balance_ME is None or self.visits_N is None or not probs_NE.requires_grad:
            return probs_NE
        function: Any = _Balanced
        found: Tensor = function.apply(probs_NE, self.visits_N, self.balance_ME[layer])
        return found


@dataclass
class Counts:
    """Of the tokens of a minibatch, each as often as it is visited: how many choices fell on each expert, and the sums
    of the routers' probabilities. float64, so that micro-batches and ranks add up in any order.
    """

    chosen_ME: Tensor
    probs_ME: Tensor
    tokens: Tensor | float = 0.0
    """Visits, counted at the first layer."""

    @classmethod
    def of(cls, shape: ExpertShape) -> Counts:
        """Empty ones."""
        nothing = torch.zeros(shape.layers, shape.experts, dtype=torch.float64)
        return cls(nothing, nothing.clone())

    def copy(self) -> Counts:
        """What nothing is added to."""
        return Counts(self.chosen_ME.clone(), self.probs_ME.clone(), self.tokens)

    def add(self, layer: int, probs_NE: Tensor, chosen_NK: Tensor, visits_N: Tensor) -> None:
        """Adds the tokens of one forward of a layer, where they are: the host does not wait for them."""
        if layer == 0:
            self.chosen_ME, self.probs_ME = (
                each.to(probs_NE.device) for each in (self.chosen_ME, self.probs_ME)
            )
        visits_N = visits_N.to(probs_NE.device, torch.float64)
        hot_NE = torch.zeros_like(probs_NE, dtype=torch.float64).scatter_(1, chosen_NK, 1.0)
        self.chosen_ME[layer] += visits_N @ hot_NE
        self.probs_ME[layer] += visits_N @ probs_NE.double()
        if layer == 0:
            self.tokens = self.tokens + visits_N.sum()

    def packed(self) -> Tensor:
        """(2 * M * E + 1,), to be added up over ranks."""
        tail = torch.as_tensor(self.tokens, dtype=torch.float64).reshape(1)
        return torch.cat([each.flatten().cpu() for each in (self.chosen_ME, self.probs_ME, tail)])

    def unpack(self, packed: Tensor) -> None:
        """Takes what `packed` gave, added up."""
        chosen, probs = packed[:-1].chunk(2)
        self.chosen_ME = chosen.view_as(self.chosen_ME).clone()
        self.probs_ME = probs.view_as(self.probs_ME).clone()
        self.tokens = float(packed[-1])

    def loss(self, chosen: int) -> float:
        """The load-balance loss before its coefficient, the mean over the layers: 1 where all experts are equal."""
        if not self.tokens:
            return 0.0
        share_ME = self.chosen_ME / (self.tokens * chosen)
        mean_ME = self.probs_ME / self.tokens
        return float((share_ME * mean_ME).sum(-1).mean() * self.chosen_ME.shape[1])

    def busiest(self) -> float:
        """Choices of a layer's busiest expert against an equal share, the mean over the layers."""
        total = self.chosen_ME.sum(-1, keepdim=True)
        if not bool(total.all()):
            return 0.0
        return float((self.chosen_ME / total).amax(-1).mean() * self.chosen_ME.shape[1])

    def balance_gradient(self, coefficient: float, chosen: int, scale: float) -> Tensor:
        """(M, E) fp32 gradient of `scale` * coefficient * the loss of each layer at one visit's probabilities.

        The loss of a layer is E * sum over experts of (share of the choices) * (mean probability), both over all tokens
        of the minibatch (Switch Transformer, arXiv 2101.03961, eq. 4; its statistics global as in arXiv 2501.11873 and
        Megatron's `global_aux_loss`). Layers add up, as in Megatron. The share has no gradient, so this is a constant
        once it is known: the gradient of the minibatch is a sum over its micro-batches, whatever their packing.
        """
        if not self.tokens:
            return torch.zeros_like(self.chosen_ME, dtype=torch.float32)
        share_ME = self.chosen_ME / (self.tokens * chosen)
        return (share_ME * (coefficient * self.chosen_ME.shape[1] * scale / self.tokens)).float()


class _Balanced(torch.autograd.Function):
    """Probabilities as they are; their gradient gets visits_N x balance_E more."""

    @staticmethod
    def forward(ctx: Any, probs_NE: Tensor, visits_N: Tensor, balance_E: Tensor) -> Tensor:
        ctx.save_for_backward(visits_N, balance_E)
        return probs_NE.view_as(probs_NE)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream_NE: Tensor) -> tuple[Tensor | None, ...]:
        visits_N, balance_E = ctx.saved_tensors
        more_NE = visits_N.to(upstream_NE)[:, None] * balance_E.to(upstream_NE)
        return upstream_NE + more_NE, None, None


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
    if expert_shape(model.config) is None:
        return None
    routing = Routing()
    for layer, block in enumerate(expert_blocks(model)):
        block.gate = Router(block.gate, model.config.get_text_config(), routing, layer)
    ALL_EXPERTS_FUNCTIONS.register(NAME, compute_experts)
    untyped: Any = model
    untyped.config._experts_implementation = NAME
    return routing


def expert_blocks(model: nn.Module) -> Iterator[Any]:
    """The blocks of a model that have a `gate` and `experts`, in the order of its layers."""
    for module in model.modules():
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.Module) and hasattr(experts, "gate_up_proj") and hasattr(module, "gate"):
            yield module


class Exchange(Protocol):
    """Brings rows to the ranks that have their experts, and what becomes of them back."""

    def __call__(self, rows_SD: Tensor, weights_S: Tensor, counts_E: Tensor, compute: Compute) -> Tensor:
        """(S, D) of rows in the order of their experts, `counts_E` of each; `compute` takes those of this rank's."""


Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(S, D) of rows in the order of their experts (S, D), their weights (S), and of each expert how many there are."""


def compute_experts(experts: Any, hidden_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """(N, D): what the tokens' experts give, weighted and added up. An experts module's forward in transformers.

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

    def compute(rows_SD: Tensor, weights_S: Tensor, counts_E: Tensor) -> Tensor:
        ends_E = counts_E.cumsum(0).to(torch.int32)
        gate_SI, up_SI = _product(experts, "gate_up_proj", rows_SD, ends_E).chunk(2, -1)
        gated_SI = experts.act_fn(gate_SI) * up_SI * weights_S[:, None].to(rows_SD.dtype)
        return _product(experts, "down_proj", gated_SI, ends_E)

    if exchange is None:
        found_SD = compute(rows_SD, weights_S, counts_E)
    else:
        found_SD = exchange(rows_SD, weights_S, counts_E, compute)
    return picked(found_SD, place_NK, order_S // index_NK.shape[-1]).to(hidden_ND.dtype)


def inverse(order_S: Tensor) -> Tensor:
    """The place of each element in an order of all."""
    return torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))


def picked(rows: Tensor, index: Tensor, back: Tensor) -> Tensor:
    """`rows[index]`, added up along a second dimension of `index`; `back` is what picks the gradient in the same way.

    torch's own gradient of an index adds row by row into zeros, which is several times the memory traffic.
    """
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


def _product(experts: Any, name: str, rows_SI: Tensor, ends_E: Tensor) -> Tensor:
    """Rows times the weights of one name: as they are, or with their adapter."""
    weight_EOI: Tensor = getattr(experts, name)
    adapter = getattr(experts, f"{name}{ADAPTER}", None)
    if adapter is None:
        return grouped_product(rows_SI, weight_EOI, ends_E, fixed=is_invariant(experts))
    found_SO: Tensor = adapter(rows_SI, weight_EOI, ends_E)
    return found_SO


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
