"""Log-probs and entropy of tokens, in fp32 whatever the model's type, bounded in memory over the vocabulary.

Shapes: B sequences, T tokens, N = rows, D hidden, V vocabulary. Knows no sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

# fp32 elements of one chunk of logits: 64 MiB.
CHUNK_ELEMENTS = 16 * 1024 * 1024
# Of probability 0, and finite: a logit of -inf would make 0 * inf of an entropy's gradient.
LOG_PROB_FLOOR = -1e4


def token_log_probs(logits_BTV: Tensor, tokens_BT: Tensor, temperature: float) -> Tensor:
    """fp32 (B, T) log-probs of tokens under softmax(logits / temperature); temperature 0 counts as 1.

    Differentiable; of several chunks each is recomputed in the backward pass, so that one fp32 copy is kept at most.
    """

    def rows(logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
        scaled_NV = scale(logits_NV, temperature)
        return scaled_NV.gather(-1, tokens_N[:, None])[:, 0] - scaled_NV.logsumexp(-1)

    return _over_rows(rows, logits_BTV, tokens_BT)


def token_entropy(logits_BTV: Tensor, temperature: float) -> Tensor:
    """fp32 (B, T) entropy in nats of softmax(logits / temperature); temperature 0 counts as 1."""
    return _over_rows(lambda logits_NV, _: _entropy(scale(logits_NV, temperature)), logits_BTV, None)


def scale(logits: Tensor, temperature: float) -> Tensor:
    """fp32 logits divided by the temperature; greedy (0) is reported at temperature 1."""
    return logits.float() if temperature in (0.0, 1.0) else logits.float() / temperature


@dataclass(frozen=True)
class Head:
    """A model's output head: hidden states to fp32 logits, so that no logit is rounded to bf16.

    `weight_VD` is the model's own (bf16 or fp32) or an fp32 copy of it; `multiplier` and `softcap` are
    what some architectures do after the matrix product.
    """

    weight_VD: Tensor
    bias_V: Tensor | None
    multiplier: float
    softcap: float | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        """The head of a Hugging Face causal language model, sharing its weights."""
        untyped: Any = model
        linear = untyped.get_output_embeddings()
        config = model.config.get_text_config()
        multiplier = float(getattr(config, "logit_scale", None) or 1.0)
        multiplier /= float(getattr(config, "logits_scaling", None) or 1.0)
        return cls(
            linear.weight,
            getattr(linear, "bias", None),
            multiplier,
            getattr(config, "final_logit_softcapping", None),
        )

    def widened(self, into: Head | None = None) -> Head:
        """The same head with its weights copied to fp32 once; for callers that score many times.

        `into`, an earlier result for the same model, gives its memory away: fresh pages cost more than the copy.
        """
        bias_V = None if self.bias_V is None else self.bias_V.detach().float()
        weight_VD = self.weight_VD.detach()
        if into is not None and into.weight_VD.shape == weight_VD.shape:
            wide_VD = into.weight_VD.copy_(weight_VD)
        else:
            wide_VD = weight_VD.float()
        return Head(wide_VD, bias_V, self.multiplier, self.softcap)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """fp32 (N, V). Products of bf16 hidden states stay in bf16 units and are summed in fp32."""
        return self._shaped(self._products(hidden_ND))

    def gradient(
        self,
        products_NV: Tensor,
        tokens_N: Tensor,
        upstream_N: Tensor | None,
        entropy_upstream_N: Tensor | None,
        temperature: float,
    ) -> Tensor:
        """fp32 (N, V) gradient at the matrix product: of the tokens' log-probs and entropies, times the upstreams.

        With p the probabilities and H the entropy, dH/dlogits = -p (log p + H). None: there is no such upstream.
        """
        shaped_NV = self._shaped(products_NV)
        scaled_NV = scale(shaped_NV, temperature)
        if upstream_N is None:
            upstream_N = products_NV.new_zeros(len(products_NV), dtype=torch.float32)
        if entropy_upstream_N is None:
            found_NV = scaled_NV.softmax(-1).mul_(-upstream_N[:, None])
        else:
            log_probs_NV = scaled_NV.log_softmax(-1).clamp_(min=LOG_PROB_FLOOR)
            probs_NV = log_probs_NV.exp()
            entropy_N = -torch.linalg.vecdot(probs_NV, log_probs_NV)
            found_NV = log_probs_NV.add_(entropy_N[:, None]).mul_(entropy_upstream_N[:, None])
            found_NV.add_(upstream_N[:, None]).mul_(probs_NV).neg_()
        found_NV.scatter_add_(-1, tokens_N[:, None], upstream_N[:, None])
        if temperature not in (0.0, 1.0):
            found_NV /= temperature
        if self.softcap is not None:
            found_NV *= 1.0 - (shaped_NV / self.softcap).square()
        return found_NV.mul_(self.multiplier)

    def _products(self, hidden_ND: Tensor) -> Tensor:
        with _exact_products(hidden_ND):
            return F.linear(
                hidden_ND.float(),
                self.weight_VD.float(),
                None if self.bias_V is None else self.bias_V.float(),
            )

    def _shaped(self, logits_NV: Tensor) -> Tensor:
        if self.multiplier != 1.0:
            logits_NV = logits_NV * self.multiplier
        if self.softcap is not None:
            logits_NV = self.softcap * torch.tanh(logits_NV / self.softcap)
        return logits_NV


def hidden_log_probs(
    head: Head, hidden_ND: Tensor, tokens_N: Tensor, temperature: float, *, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """fp32 (N,) log-probs, and entropies when asked, straight from hidden states.

    The logits exist one chunk at a time, in both passes. Log-probs and entropies are differentiable in hidden states
    and head; entropies that no loss uses cost the backward pass nothing. The gradient of a head's parameter is fp32
    whatever the parameter's type (it is a sum over chunks, and micro-batches are added to it), so its `grad_dtype`
    is set here.
    """
    for parameter in (head.weight_VD, head.bias_V):
        if parameter is not None:
            gather_in_fp32(parameter)
    function: Any = _HiddenLogProbs
    found_N, entropy_N = function.apply(
        hidden_ND, head.weight_VD, head.bias_V, tokens_N, head, temperature, entropy
    )
    return found_N, (entropy_N if entropy else None)


def gather_in_fp32(parameter: Tensor) -> None:
    """Lets a parameter's gradient be fp32, unless it has one of its own type already."""
    if parameter.requires_grad and parameter.is_leaf and parameter.grad is None:
        parameter.grad_dtype = torch.float32


class _HiddenLogProbs(torch.autograd.Function):
    """See `hidden_log_probs`. One function over all chunks, because autograd adds up in the parameter's type."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        tokens_N: Tensor,
        head: Head,
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = head.widened()
        found_N = hidden_ND.new_empty(hidden_ND.shape[0], dtype=torch.float32)
        entropy_N = torch.zeros_like(found_N)
        kept_NV = None
        for part in _parts(hidden_ND, weight_VD):
            products_NV = wide._products(hidden_ND[part])
            scaled_NV = scale(wide._shaped(products_NV), temperature)
            found_N[part] = scaled_NV.gather(-1, tokens_N[part, None])[:, 0] - scaled_NV.logsumexp(-1)
            if entropy:
                entropy_N[part] = _entropy(scaled_NV)
            # A lone chunk may stay; of several each is computed again in the backward pass.
            kept_NV = (
                products_NV if len(products_NV) == len(hidden_ND) and any(ctx.needs_input_grad) else None
            )
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, tokens_N, kept_NV)
        ctx.head, ctx.temperature = replace(head, weight_VD=weight_VD.new_empty(0), bias_V=None), temperature
        ctx.set_materialize_grads(False)  # None for an output that no loss uses
        if not entropy:
            ctx.mark_non_differentiable(entropy_N)
        return found_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, upstream_N: Tensor | None, entropy_upstream_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, tokens_N, kept_NV = ctx.saved_tensors
        wide = replace(ctx.head, weight_VD=weight_VD, bias_V=bias_V).widened()
        of_hidden_ND = torch.empty_like(hidden_ND)
        of_weight_VD = torch.zeros_like(wide.weight_VD) if ctx.needs_input_grad[1] else None
        of_bias_V = wide.weight_VD.new_zeros(len(weight_VD)) if ctx.needs_input_grad[2] else None
        for part in _parts(hidden_ND, weight_VD):
            products_NV = wide._products(hidden_ND[part]) if kept_NV is None else kept_NV
            upstreams = (_part(upstream_N, part), _part(entropy_upstream_N, part))
            found_NV = wide.gradient(products_NV, tokens_N[part], *upstreams, ctx.temperature)
            of_hidden_ND[part] = found_NV @ wide.weight_VD
            if of_weight_VD is not None:
                of_weight_VD.addmm_(found_NV.T, hidden_ND[part].float())
            if of_bias_V is not None:
                of_bias_V += found_NV.sum(0)
        return of_hidden_ND, of_weight_VD, of_bias_V, None, None, None, None


def _part(values_N: Tensor | None, part: slice) -> Tensor | None:
    return None if values_N is None else values_N[part]


def _parts(hidden_ND: Tensor, weight_VD: Tensor) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS // weight_VD.shape[0])
    for start in range(0, hidden_ND.shape[0], size):
        yield slice(start, start + size)


def _entropy(scaled_NV: Tensor) -> Tensor:
    log_probs_NV = scaled_NV.log_softmax(-1)
    return -(log_probs_NV.exp() * log_probs_NV).nan_to_num(nan=0.0).sum(-1)


def _over_rows(
    rows: Callable[[Tensor, Tensor], Tensor], logits_BTV: Tensor, tokens_BT: Tensor | None
) -> Tensor:
    vocabulary = logits_BTV.shape[-1]
    logits_NV = logits_BTV.reshape(-1, vocabulary)
    tokens_N = (
        torch.zeros(logits_NV.shape[0], dtype=torch.long) if tokens_BT is None else tokens_BT.reshape(-1)
    )
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    parts = [
        _chunk(rows, part, tokens, logits_NV.shape[0])
        for part, tokens in _pairs(logits_NV, tokens_N.to(logits_NV.device), size)
    ]
    found = torch.cat(parts) if parts else logits_NV.new_zeros(0, dtype=torch.float32)
    return found.reshape(logits_BTV.shape[:-1])


def _pairs(values: Tensor, tokens_N: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, values.shape[0], size):
        yield values[start : start + size], tokens_N[start : start + size]


def _chunk(rows: Callable[[Tensor, Tensor], Tensor], values: Tensor, tokens_N: Tensor, total: int) -> Tensor:
    # Chunks are computed again in the backward pass, so that only one of them is kept. A lone one may stay.
    alone = values.shape[0] == total
    if alone or not (torch.is_grad_enabled() and values.requires_grad):
        return rows(values, tokens_N)
    found: Tensor = checkpoint(rows, values, tokens_N, use_reentrant=False, preserve_rng_state=False)
    return found


@contextmanager
def _exact_products(hidden_ND: Tensor) -> Iterator[None]:
    # bf16 values lose nothing when an fp32 product rounds its inputs to bf16, and AMX makes it faster.
    if hidden_ND.dtype != torch.bfloat16 or hidden_ND.device.type != "cpu":
        yield
        return
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # absent from its stubs
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
