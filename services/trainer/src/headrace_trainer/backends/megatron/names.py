"""Where canonical (Hugging Face) weights lie in megatron-core's parameters: views, so that both ways are copies.

Shapes: G groups of queries on a rank, Q queries of a group, H head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from headrace_modelkit.tensor_files import Box
from torch import Tensor

from headrace_trainer.backends.megatron.architecture import Architecture
from headrace_trainer.backends.megatron.layout import Layout

Pick = Callable[[Tensor], Tensor]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OWN_EMBEDDING, OWN_HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Part:
    """What a rank has of a canonical weight: a view of its `local` parameter, and one of the whole, of equal shape.

    `copy` says that another rank has the same, and that one counts.
    """

    local: str
    of_local: Pick
    of_whole: Pick
    copy: bool = False

    def box(self, shape: tuple[int, ...]) -> Box:
        """Which box of the whole `of_whole` picks: from its first element to its last."""
        whole = torch.empty(shape, device="meta")
        view = self.of_whole(whole)
        first = view.storage_offset()
        last = first + sum(
            (size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)
        )
        return tuple(
            (first // stride % size, last // stride % size + 1)
            for size, stride in zip(shape, whole.stride(), strict=True)
        )


def parts_of(architecture: Architecture, layout: Layout, tensor_rank: int, stage: int) -> dict[str, Part]:
    """By canonical name, what the rank of a stage has. All stages together name each weight of the model."""
    cut = _Cut(layout.tensor, tensor_rank)
    found: dict[str, Part] = {}
    if stage == 0:
        found[EMBEDDING] = cut.rows(OWN_EMBEDDING)
    each = architecture.layers // layout.pipeline
    for index in range(each):
        prefix = f"model.layers.{stage * each + index}."
        layer = _layer(architecture, cut, f"decoder.layers.{index}.")
        found |= {prefix + name: part for name, part in layer.items()}
    if stage == layout.pipeline - 1:
        found["model.norm.weight"] = cut.whole("decoder.final_layernorm.weight")
        if not architecture.tied:
            found[HEAD] = cut.rows(OWN_HEAD)
        elif stage:  # A stage without the embedding has the head's copy of it.
            head = cut.rows(OWN_HEAD)
            found[EMBEDDING] = Part(head.local, head.of_local, head.of_whole, copy=True)
    return found


def _layer(architecture: Architecture, cut: _Cut, local: str) -> dict[str, Part]:
    attention = f"{local}self_attention."
    found = {
        "input_layernorm.weight": cut.whole(f"{local}input_layernorm.weight"),
        "post_attention_layernorm.weight": cut.whole(f"{local}pre_mlp_layernorm.weight"),
        "self_attn.o_proj.weight": cut.columns(f"{attention}linear_proj.weight"),
        "mlp.gate_proj.weight": cut.rows(f"{local}mlp.linear_fc1.weight", 0, 2),
        "mlp.up_proj.weight": cut.rows(f"{local}mlp.linear_fc1.weight", 1, 2),
        "mlp.down_proj.weight": cut.columns(f"{local}mlp.linear_fc2.weight"),
    }
    queries = architecture.heads // architecture.groups
    places = {"q": slice(0, queries), "k": slice(queries, queries + 1), "v": slice(queries + 1, queries + 2)}
    for kind in ("weight", "bias") if architecture.qkv_bias else ("weight",):
        for name, place in places.items():
            part = cut.heads(f"{attention}linear_qkv.{kind}", queries, architecture.head, place)
            found[f"self_attn.{name}_proj.{kind}"] = part
    if architecture.qk_norm:
        for name in ("q", "k"):
            found[f"self_attn.{name}_norm.weight"] = cut.whole(f"{attention}{name}_layernorm.weight")
    return found


@dataclass(frozen=True)
class _Cut:
    """Parts of one tensor-parallel rank."""

    ranks: int
    rank: int

    def whole(self, local: str) -> Part:
        """Every rank has all of it."""
        return Part(local, _same, _same, copy=self.rank > 0)

    def rows(self, local: str, block: int = 0, blocks: int = 1) -> Part:
        """Divided by rows; the local parameter has several such blocks one below the other."""
        return Part(
            local,
            lambda own: own.chunk(blocks)[block],
            lambda whole: whole.chunk(self.ranks)[self.rank],
        )

    def columns(self, local: str) -> Part:
        """Divided by columns."""
        return Part(local, _same, lambda whole: whole.chunk(self.ranks, 1)[self.rank])

    def heads(self, local: str, queries: int, head: int, place: slice) -> Part:
        """Divided by groups of heads; the local parameter has the queries, key and value of one after another."""
        return Part(
            local,
            lambda own: own.view(-1, queries + 2, head, *own.shape[1:])[:, place],
            lambda whole: whole.view(-1, place.stop - place.start, head, *whole.shape[1:]).chunk(self.ranks)[
                self.rank
            ],
        )


def _same(tensor: Tensor) -> Tensor:
    return tensor
