"""A critic: values of token positions from hidden states, the policy's own or those of a model of the critic's.

Shapes: N positions, D hidden. Knows no returns and no sharding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from headrace_schema.sections.generating import ModelSection
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import context_limit, load_architecture, load_model
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_modelkit.weights import state_tensors


class ValueHead(nn.Module):
    """A linear function of a hidden state. It begins at 0 everywhere, so that values begin without a bias of chance."""

    def __init__(self, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(1)) if bias else None

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """(N,) values in fp32, whatever the model's type."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(hidden_ND.float(), self.weight.float()[None], bias)[:, 0]


class Critic(nn.Module):
    """A value head, with a body of its own or none: then it reads the policy's hidden states."""

    def __init__(self, hidden_size: int, body: PreTrainedModel | None = None, *, bias: bool = True) -> None:
        super().__init__()
        self.body = body
        self.head = ValueHead(hidden_size, bias=bias)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of what a checkpoint of the critic holds: every parameter and persistent buffer."""
        if self.body is not None:
            yield from ((f"body.{name}", tensor) for name, tensor in state_tensors(self.body))
        yield from ((f"head.{name}", parameter) for name, parameter in self.head.named_parameters())


def load_critic(config: ModelSection) -> Critic:
    """A critic with a body of its own, as the model directory `config.path` has it without its output head.

    Its values are undefined: ranks read their shards of them. Raises ModelNotReadable.
    """
    model = load_model(config, weights=False)
    untyped: Any = model
    body: PreTrainedModel = untyped.base_model
    return Critic(hidden_size(model.config), body)


def critic_section(policy: ModelSection, path: str | None) -> ModelSection:
    """Where a critic of its own is read from, in the policy's type and context; None: where the policy is."""
    if path is None:
        return policy
    return policy.model_copy(update={"path": path, "revision": None, "gguf_file": None})


def hidden_size(architecture: PreTrainedConfig) -> int:
    """D of a model's last hidden states."""
    return int(architecture.get_text_config().hidden_size)


def check_critic(policy: ModelSection, critic: ModelSection, key: str) -> None:
    """Raises ModelNotReadable, naming `key`, when the critic cannot read what the policy writes."""
    try:
        own, given = load_architecture(critic), load_architecture(policy)
        tokens = [load_tokenizer(section).tokenizer.get_vocab() for section in (critic, policy)]
    except ModelNotReadable as error:
        raise ModelNotReadable(f"{key}: {error}") from error
    size, needed = int(own.get_text_config().vocab_size), max(tokens[1].values()) + 1
    if tokens[0] != tokens[1] or size < needed:
        raise ModelNotReadable(
            f"{key}: {critic.path!r} has another vocabulary ({len(tokens[0])} tokens, {size} embeddings) than the "
            f"policy {policy.path!r} ({len(tokens[1])} tokens); name a model with the policy's tokenizer"
        )
    limits = context_limit(critic, own), context_limit(policy, given)
    if limits[0] < limits[1]:
        raise ModelNotReadable(
            f"{key}: {critic.path!r} reads {limits[0]} tokens, the policy {limits[1]}; name a model with as long a "
            f"context, or set model.max_context to {limits[0]}"
        )
