"""Log-probs and entropy of tokens, in fp32 whatever the model's type, bounded in memory over the vocabulary.

Logits are fp32 always. On a GPU the products of a bf16 model take its values as they are and add up in fp32, which is
the same numbers at the speed of bf16; on a CPU they are widened first.

Shapes: B sequences, T tokens, N = rows, D hidden, V vocabulary. Knows no sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from headrace_modelkit.invariant import is_invariant
from headrace_modelkit.products import PackedWeight, fixed_products

CHUNK_ELEMENTS = 16 * 1024 * 1024
"""fp32 elements of one chunk of logits on a CPU: 64 MiB."""
GPU_CHUNK_ELEMENTS = 64 * 1024 * 1024
"""And on a GPU: 256 MiB, which are 440 rows of 152,000 words. With fewer rows an H100 would wait for the head's weights
(it computes 300 bf16 operations in the time in which it reads a byte); four such chunks exist at a time."""


_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Keys of configurations: what classes do with logits. A class that does something else is found as it is loaded: the
trainer and the engine compare with its own logits."""

Temperature = float | Tensor
"""One for all rows, or (N,): one for each."""


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


def chunk_elements(device: torch.device) -> int:
    """fp32 elements of one chunk of logits."""
    return CHUNK_ELEMENTS if device.type == "cpu" else GPU_CHUNK_ELEMENTS


def narrow_products(*factors: Tensor) -> bool:
    """Whether a product of these takes bf16 values as they are: on every device but a CPU."""
    return all(each.dtype == torch.bfloat16 and each.device.type != "cpu" for each in factors)


def wide_product(one_NK: Tensor, other_KM: Tensor, into_NM: Tensor | None = None) -> Tensor:
    """fp32 (N, M) product of bf16 matrices, added up in fp32; added to `into_NM` in place if that is given."""
    if one_NK.device.type == "cpu":  # has no such product: the same numbers
        found_NM = one_NK.float() @ other_KM.float()
        return found_NM if into_NM is None else into_NM.add_(found_NM)
    if into_NM is None:
        return torch.mm(one_NK, other_KM, out_dtype=torch.float32)
    return torch.addmm(into_NM, one_NK, other_KM, out_dtype=torch.float32, out=into_NM)


def scale(logits: Tensor, temperature: Temperature) -> Tensor:
    """fp32 logits divided by the temperature, those of each row by its own; greedy (0) is reported at temperature 1.

    Of temperatures by row, which are above 0, logits are (N, V).
    """
    if isinstance(temperature, Tensor):
        return logits.float() / temperature[:, None]
    return logits.float() if temperature in (0.0, 1.0) else logits.float() / temperature


@dataclass(frozen=True)
class Head:
    """A model's output head: hidden states to fp32 logits, so that no logit is rounded to bf16.

    `weight_VD` is the model's own (bf16 or fp32) or an fp32 copy of it; `multiplier` and `softcap` are
    what some architectures do after the matrix product. `packed`, if there, multiplies in its place, with no gradient.
    `invariant`: of a model whose rows do not hang on each other (`invariant.make_invariant`).
    """

    weight_VD: Tensor
    bias_V: Tensor | None
    multiplier: float
    softcap: float | None
    packed: PackedWeight | None = None
    invariant: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        """The head of a Hugging Face causal language model, sharing its weights."""
        untyped: Any = model
        linear = untyped.get_output_embeddings()
        config = model.config.get_text_config()
        multiplier = math.prod(float(getattr(config, key, None) or 1.0) for key in _MULTIPLIERS)
        scaling = float(
            getattr(config, "logits_scaling", None) or 1.0
        )  # Granite divides, HyperCLOVA X multiplies
        multiplier *= scaling if config.model_type.startswith("hyperclovax") else 1.0 / scaling
        caps = (getattr(config, key, None) for key in _CAPS)
        bias = getattr(linear, "bias", None)
        softcap, invariant = next((cap for cap in caps if cap), None), is_invariant(linear)
        return cls(linear.weight, bias, multiplier, softcap, invariant=invariant)

    def widened(self) -> Head:
        """The same head with its weights copied to fp32 once, for callers that score many times; itself where products
        take bf16.
        """
        if narrow_products(self.weight_VD) and not self.invariant:
            return self
        bias_V = None if self.bias_V is None else self.bias_V.detach().float()
        return replace(self, weight_VD=self.weight_VD.detach().float(), bias_V=bias_V, packed=None)

    def packed_into(self, packed: PackedWeight) -> Head:
        """The same head, for callers that score many times without a gradient; `packed` is its memory."""
        if self.weight_VD.device.type != "cpu":
            return self.widened()
        packed.adopt(self.weight_VD, self.bias_V, wide=True)
        return replace(self, packed=packed)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """fp32 (N, V). Products of bf16 hidden states stay in bf16 units and are summed in fp32."""
        return self.shaped(self.products(hidden_ND))

    def products(self, hidden_ND: Tensor) -> Tensor:
        """fp32 (N, V): the matrix product alone."""
        if self.packed is not None:
            return self.packed(hidden_ND)
        if self.invariant:
            bias_V = None if self.bias_V is None else self.bias_V.float()
            return fixed_products(hidden_ND.float(), self.weight_VD.float(), bias_V)
        if narrow_products(hidden_ND, self.weight_VD):
            found_NV = wide_product(hidden_ND, self.weight_VD.T)
            return found_NV if self.bias_V is None else found_NV + self.bias_V.float()
        with _exact_products(hidden_ND):
            return F.linear(
                hidden_ND.float(),
                self.weight_VD.float(),
                None if self.bias_V is None else self.bias_V.float(),
            )

    def shaped(self, logits_NV: Tensor) -> Tensor:
        """Logits of what `products` gave."""
        if self.multiplier != 1.0:
            logits_NV = logits_NV * self.multiplier
        if self.softcap is not None:
            logits_NV = self.softcap * torch.tanh(logits_NV / self.softcap)
        return logits_NV

    def through_shape(self, gradient_NV: Tensor, shaped_NV: Tensor, temperature: Temperature) -> Tensor:
        """Turns the gradient at scaled logits, in place, into that at the matrix product; logits as `shaped`."""
        if isinstance(temperature, Tensor):
            gradient_NV /= temperature[:, None]
        elif temperature not in (0.0, 1.0):
            gradient_NV /= temperature
        if self.softcap is not None:
            gradient_NV *= 1.0 - (shaped_NV / self.softcap).square()
        return gradient_NV.mul_(self.multiplier) if self.multiplier != 1.0 else gradient_NV


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
    size = max(1, chunk_elements(logits_BTV.device) // vocabulary)
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
