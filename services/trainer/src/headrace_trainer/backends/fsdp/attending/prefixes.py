"""Attention of the trainer's models, and which of them may compute a prefix tree by their configuration.

It follows the paths of a tree, or of segments, where told so, and is causal where not. A model takes part through
transformers' table of attention functions. Knows no packing.

Shapes: R rows, H heads, L nodes of a row, D head dimension, S paths, P nodes of the longest path.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from headrace_modelkit.attending import looks_ahead, looks_elsewhere, window_of
from headrace_modelkit.invariant import NAME as INVARIANT
from headrace_modelkit.loading import context_limit
from headrace_schema.openings import TrainerConfig
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headrace_trainer.backends.fsdp.attending.context import ContextGroup
from headrace_trainer.backends.shared.attention import WIDENED_TOKENS, attend_segments
from headrace_trainer.learning.packing import Paths
from headrace_trainer.learning.segments import Segments

KEPT = "_kept_attention"
"""Of a layer's attention: a `Kept`."""
NAME = "headrace_trees_"
"""What the name of a model's own attention gets before it."""


def attend_to_trees(models: Collection[PreTrainedModel]) -> bool:
    """Lets the layers of these models, which run sdpa over the whole context or what `invariant` has in its place, take
    `paths` and `segments`; False where one of them cannot.

    A micro-batch that brings no mask is then computed causally, without one being made.
    """
    if not all(model._supports_attention_backend for model in models):
        return False
    for model in models:
        text: Any = model.config.get_text_config()
        own = text._attn_implementation
        name = NAME + own.removeprefix(NAME)
        AttentionInterface.register(name, partial(_attend, own=own.removeprefix(NAME)))
        AttentionMaskInterface.register(name, _no_mask)
        text._attn_implementation = name  # a vision tower keeps its own
    return True


@dataclass(frozen=True)
class Attending:
    """The attention that models have of their own."""

    own: list[tuple[Any, str]]

    @classmethod
    def of(cls, models: Iterable[PreTrainedModel]) -> Attending:
        """As it is now."""
        texts: list[Any] = [model.config.get_text_config() for model in models]
        return cls([(text, text._attn_implementation) for text in texts])

    def put_back(self) -> None:
        """Has them attend as they did."""
        for text, own in self.own:
            text._attn_implementation = own


def _no_mask(*_: Any, **__: Any) -> None:
    """Rows are padded behind their ends, where a causal model does not look."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its kernels are what they are
def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    paths: Paths | None = None,
    segments: Segments | None = None,
    context: ContextGroup | None = None,
    own: str = "sdpa",
    **options: Any,
) -> tuple[Tensor, None]:
    given = [query, key, value]
    if segments is not None:
        layer: Any = module
        told = segments, options.get("scaling"), window_of(layer.config, layer.layer_idx)
        kept: Kept | None = getattr(module, KEPT, None)
        if context is None:
            return _of_segments(given, *told, kept), None
        found = _of_segments([context.to_heads(tensor) for tensor in given], *told, kept)
        return context.to_nodes(found), None
    if paths is not None:  # in fp32, so that the gradients of a node on several paths add up in it
        given = [_along(paths.nodes_SP, tensor.float()) for tensor in given]
    short = query.device.type == "cpu" and given[0].shape[2] <= WIDENED_TOKENS
    dtype = torch.float32 if short else query.dtype
    found = ALL_ATTENTION_FUNCTIONS[own](
        module, *(tensor.to(dtype) for tensor in given), attention_mask, **options
    )[0]
    if paths is not None:
        found = found.flatten(0, 1)[paths.places_RL]
    return found.to(query.dtype), None


class Kept:
    """What the flash kernel gave one layer in a forward, for when the backward pass computes the layer again."""

    def __init__(self) -> None:
        self._found: Many[Tensor] | None = None

    def __call__(self, compute: Callable[[], Many[Tensor]]) -> Many[Tensor]:
        again = torch._C._current_graph_task_id() != -1
        found, self._found = self._found if again else None, None
        if found is not None:
            return found
        found = compute()
        if not again:
            self._found = [each.detach() for each in found]
        return found

    def drop(self) -> None:
        """Where no backward pass follows."""
        self._found = None


def _of_segments(
    own: list[Tensor], segments: Segments, scale: float | None, window: int | None, kept: Kept | None
) -> Tensor:
    """(1, L, H, D). On a CPU in fp32: its flash kernel takes three to seven times as long in bf16."""
    dtype = torch.float32 if own[0].device.type == "cpu" else own[0].dtype
    query, key, value = (tensor.squeeze(0).transpose(0, 1).to(dtype) for tensor in own)
    return attend_segments(query, key, value, segments, scale, window, kept).unsqueeze(0).to(own[0].dtype)


def _along(nodes_SP: Tensor, tensor_RHLD: Tensor) -> Tensor:
    """(S, H, P, D): what each path's nodes have."""
    nodes = tensor_RHLD.transpose(1, 2).flatten(0, 1)
    return (
        nodes.flatten(1)
        .index_select(0, nodes_SP.flatten())
        .view(*nodes_SP.shape, *nodes.shape[1:])
        .transpose(1, 2)
    )


def obstacle_to_trees(config: TrainerConfig, architecture: PreTrainedConfig) -> str:
    """Why the model would not follow a tree's attention mask; empty when it does."""
    implementation = getattr(architecture.get_text_config(), "_attn_implementation", "")
    if implementation not in ("sdpa", INVARIANT):
        # Only sdpa takes a mask of four dimensions as it is.
        return f"the model's attention is {implementation or 'unknown'}, which takes no mask of its own (sdpa does)"
    if config.sees and looks_ahead(architecture):
        return "the tokens of an image look ahead, which no form of a tree can be told"
    return looks_elsewhere(architecture, context_limit(config.model, architecture))
