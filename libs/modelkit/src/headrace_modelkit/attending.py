"""Which tokens a model's layers look at, by its configuration alone: whether all of it is attention over the context.

Only then may sequences share a prefix, or stand behind each other in a row. Knows no kernel and no packing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
BOUNDED = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}
"""Kinds of layers that are full attention where the context is no longer than what this key says."""
STATES = {"linear_attention", "conv", "mamba", "hybrid", "moe", "mlp", "attention"}
"""Kinds of layers that transformers' cache has convolutions and recurrent states for, and those that keep nothing."""
UNKEPT = {"minimax", "recurrent_gemma"}
"""By `model_type`: those whose states stand outside of transformers' cache."""


@dataclass(frozen=True)
class Reach:
    """What a token sees of those before it: the last `size` ones, itself included, or those of its own chunk."""

    size: int
    chunk: bool = False

    def first(self, positions: Tensor) -> Tensor:
        """The first that a token at each of these positions sees."""
        return positions // self.size * self.size if self.chunk else positions - self.size + 1


def reach_of(config: PreTrainedConfig, layer: int, limit: int) -> Reach | None:
    """Of a layer; None where it sees all of a context of `limit`."""
    text: Any = config.get_text_config()
    window, kinds = window_of(text, layer), getattr(text, "layer_types", None)
    if window is not None:
        return Reach(window) if window < limit else None
    chunk = int(getattr(text, BOUNDED[CHUNKED], None) or 0)
    chunked = 0 < chunk < limit and (kinds is None or kinds[layer] == CHUNKED)
    return Reach(chunk, chunk=True) if chunked else None


def looks_ahead(architecture: PreTrainedConfig) -> bool:
    """Whether the tokens of an image see those of it behind them, as Gemma's do."""
    text: Any = architecture.get_text_config()
    wanted = getattr(text, "use_bidirectional_attention", None)
    return architecture.model_type == "gemma3" or wanted == "vision"


def without_cache(architecture: PreTrainedConfig) -> str:
    """What a layer keeps of a context that a cache of keys, values and states does not hold; empty for nothing."""
    text: Any = architecture.get_text_config()
    if text.model_type in UNKEPT:
        return "the model has layers whose states are outside of transformers' cache"
    if getattr(text, "index_topk", None):
        return f"the model attends to {text.index_topk} tokens that an indexer chooses"
    kinds = set(getattr(text, "layer_types", None) or ())
    others = kinds - {FULL, *BOUNDED, *STATES}
    return f"the model has {', '.join(sorted(others))} layers" if others else ""


def looks_elsewhere(architecture: PreTrainedConfig, limit: int) -> str:
    """What a layer does besides attention to all earlier tokens of a context of `limit`; empty where there is none.

    Attention to the last tokens alone is none: who asks computes it (`window_of`).
    """
    text: Any = architecture.get_text_config()
    kinds: set[str] = set(getattr(text, "layer_types", None) or ())
    if others := kinds - {FULL, *BOUNDED}:
        return f"the model has {', '.join(sorted(others))} layers"
    if getattr(_class_of(text), "_is_stateful", False):
        return "the model has layers with a state of their own"
    if getattr(text, "index_topk", None):
        return f"the model attends to {text.index_topk} tokens that an indexer chooses"
    reach = getattr(text, BOUNDED[CHUNKED], None)
    if reach and reach < limit and (CHUNKED in kinds or not kinds):
        return (
            f"the model attends to chunks of {reach} tokens only (set model.max_context to {reach} or less)"
        )
    return ""


def window_of(config: PreTrainedConfig, layer: int) -> int | None:
    """How many last tokens, itself included, a token of this layer attends to; None for all."""
    text: Any = config.get_text_config()
    kinds, reach = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
    if not reach or (kinds and kinds[layer] != SLIDING):
        return None
    return int(reach)


def longest_window(architecture: PreTrainedConfig, limit: int) -> int:
    """The window of the layers that do not attend to a whole context of `limit`; 0 where all do."""
    text: Any = architecture.get_text_config()
    layers = range(len(getattr(text, "layer_types", None) or [None]))
    windows = [window_of(text, layer) for layer in layers]
    return max((window for window in windows if window is not None and window < limit), default=0)


def _class_of(architecture: PreTrainedConfig) -> Any:
    """The class that reads such a configuration; None where transformers has none."""
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return found.get(type(architecture), None)
