"""Attention of the trainer's models, and whether they compute a prefix tree exactly: decided when one is loaded.

It follows the paths of a tree, or of segments, where told so, and is causal where not. A model takes part through
transformers' table of attention functions. Knows no packing.

Shapes: R rows, H heads, L nodes of a row, D head dimension, S paths, P nodes of the longest path.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from headrace_modelkit.loading import context_limit
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.logs import get_logger
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headrace_trainer.backends.fsdp.attending.context import ContextGroup
from headrace_trainer.backends.shared.attention import WIDENED_TOKENS, attend_segments
from headrace_trainer.errors import invalid
from headrace_trainer.learning.packing import Paths
from headrace_trainer.learning.segments import Segments

NAME = "headrace_trees"


def attend_to_trees(model: PreTrainedModel) -> bool:
    """Lets the layers of `model`, which run sdpa over the whole context, take `paths` and `segments`; False where they
    cannot.

    A micro-batch that brings no mask is then computed causally, without one being made.
    """
    if not model._supports_attention_backend:
        return False
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)
    model.config.get_text_config()._attn_implementation = NAME  # a vision tower keeps its own
    return True


def _no_mask(*_: Any, **__: Any) -> None:
    """Rows are padded behind their ends, where a causal model does not look."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its kernels are what they are
def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    paths: Paths | None = None,
    segments: Segments | None = None,
    context: ContextGroup | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    own = [query, key, value]
    if segments is not None and context is not None:
        whole = [context.to_heads(tensor) for tensor in own]
        return context.to_nodes(_of_segments(whole, segments, options.get("scaling"))), None
    if segments is not None:
        return _of_segments(own, segments, options.get("scaling")), None
    if paths is not None:  # in fp32, so that the gradients of a node on several paths add up in it
        own = [_along(paths.nodes_SP, tensor.float()) for tensor in own]
    short = query.device.type == "cpu" and own[0].shape[2] <= WIDENED_TOKENS
    dtype = torch.float32 if short else query.dtype
    found = ALL_ATTENTION_FUNCTIONS["sdpa"](module, *(tensor.to(dtype) for tensor in own), mask, **options)[0]
    if paths is not None:
        found = found.flatten(0, 1)[paths.places_RL]
    return found.to(query.dtype), None


def _of_segments(own: list[Tensor], segments: Segments, scale: float | None) -> Tensor:
    """(1, L, H, D). On a CPU in fp32: its flash kernel takes three to seven times as long in bf16."""
    dtype = torch.float32 if own[0].device.type == "cpu" else own[0].dtype
    query, key, value = (tensor.squeeze(0).transpose(0, 1).to(dtype) for tensor in own)
    return attend_segments(query, key, value, segments, scale).unsqueeze(0).to(own[0].dtype)


def _along(nodes_SP: Tensor, tensor_RHLD: Tensor) -> Tensor:
    """(S, H, P, D): what each path's nodes have."""
    nodes = tensor_RHLD.transpose(1, 2).flatten(0, 1)
    return (
        nodes.flatten(1)
        .index_select(0, nodes_SP.flatten())
        .view(*nodes_SP.shape, *nodes.shape[1:])
        .transpose(1, 2)
    )


_log = get_logger(__name__)


def shares_prefixes(config: TrainerConfig, architectures: Iterable[PreTrainedConfig]) -> bool:
    """What `trainer.shared_prefix` comes to for policy and critic. Raises Refusal INVALID when one cannot and must."""
    wanted = config.trainer.shared_prefix
    found = (obstacle_to_trees(config, architecture) for architecture in architectures)
    obstacle = next((each for each in found if each), "")
    if wanted and obstacle:
        raise invalid(
            f"trainer.shared_prefix: true, but {obstacle}; leave it out, or set it to false, and every sample "
            "gets a row of its own"
        )
    if wanted is None and obstacle:
        _log.info("every sample gets a row of its own", extra={"reason": obstacle})
    return wanted is not False and not obstacle


def attends_along_paths(config: TrainerConfig, bodies: Iterable[PreTrainedModel]) -> bool:
    """Sets up the attention of these models where it can be; whether all of them take paths and segments. Once for
    each model.
    """
    able = [not obstacle_to_trees(config, body.config) and attend_to_trees(body) for body in bodies]
    return all(able)


def obstacle_to_trees(config: TrainerConfig, architecture: PreTrainedConfig) -> str:
    """Why the model would not follow a tree's attention mask; empty when it does."""
    implementation = getattr(architecture.get_text_config(), "_attn_implementation", "")
    if implementation != "sdpa":
        # Only sdpa takes a mask of four dimensions as it is.
        return f"the model's attention is {implementation or 'unknown'}, which takes no mask of its own (sdpa does)"
    window = _window(architecture)
    if window and window < context_limit(config.model, architecture):
        return (
            f"the model attends to the last {window} tokens only (set model.max_context to {window} or less)"
        )
    return ""


def _window(architecture: PreTrainedConfig) -> int:
    text = architecture.get_text_config()
    kinds = getattr(text, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else True
    return int(getattr(text, "sliding_window", None) or 0) if slides else 0
