"""Where canonical (Hugging Face) weights lie in megatron-core's parameters: views, so that both ways are copies.

Shapes: G groups of queries on a rank, Q queries of a group, H head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from headrace_modelkit.tensor_files import Box, volume
from torch import Tensor

from headrace_megatron.architecture import Architecture
from headrace_megatron.layout import Layout

Pick = Callable[[Tensor], Tensor]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OWN_EMBEDDING, OWN_HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
"""In the first chunk of the first stage, and in the last one of the last."""


@dataclass(frozen=True)
class Part:
    """What a rank has of a canonical weight: a view of its `local` parameter, and one of the whole, of equal shape.

    `copy` says that another rank has the same, and that one counts.
    """

    local: str
    of_local: Pick
    of_whole: Pick
    copy: bool = False

    def boxes(self, shape: tuple[int, ...]) -> list[tuple[Box, Pick]]:
        """The boxes of the whole that `of_whole` picks, and where each lies in such a view."""
        whole = torch.empty(shape, device="meta")
        view = self.of_whole(whole)
        if volume(box := _box(view, whole)) == view.numel():
            return [(box, _same)]
        for dim in range(view.dim()):
            boxes = [_box(view.select(dim, at), whole) for at in range(view.shape[dim])]
            if sum(map(volume, boxes)) == view.numel():
                return [(box, partial(_select, dim, at)) for at, box in enumerate(boxes)]
        raise ValueError(f"{self.local} is made of no boxes")


def _box(view: Tensor, whole: Tensor) -> Box:
    """The smallest box of `whole` that has the first and the last element of a view of it."""
    first = view.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return tuple(
        (first // stride % size, last // stride % size + 1)
        for size, stride in zip(whole.shape, whole.stride(), strict=True)
    )


def _select(dim: int, at: int, view: Tensor) -> Tensor:
    return view.select(dim, at)


def parts_of(
    architecture: Architecture, layout: Layout, tensor_rank: int, stage: int, expert_rank: int = 0
) -> dict[str, Part]:
    """By canonical name, what the rank of a stage has. All stages together name each weight of the model.

    Local names begin with the number of the stage's chunk of layers.
    """
    cut = _Cut(layout.tensor, tensor_rank, layout.experts, expert_rank)
    found: dict[str, Part] = {}
    if stage == 0:
        found[EMBEDDING] = cut.rows(f"0.{OWN_EMBEDDING}")
    for chunk in range(layout.virtual):
        first = layout.first_layer(stage, chunk, architecture.layers)
        for index in range(architecture.layers // (layout.pipeline * layout.virtual)):
            sparse = first + index in architecture.sparse
            layer = _layer(architecture, cut, f"{chunk}.decoder.layers.{index}.", sparse=sparse)
            found |= {f"model.layers.{first + index}.{name}": part for name, part in layer.items()}
    if stage == layout.pipeline - 1:
        last = layout.virtual - 1
        found["model.norm.weight"] = cut.whole(f"{last}.decoder.final_layernorm.weight")
        if not architecture.tied:
            found[HEAD] = cut.rows(f"{last}.{OWN_HEAD}")
        elif stage:  # A stage without the embedding has the head's copy of it.
            head = cut.rows(f"{last}.{OWN_HEAD}")
            found[EMBEDDING] = Part(head.local, head.of_local, head.of_whole, copy=True)
    return found


def _layer(architecture: Architecture, cut: _Cut, local: str, *, sparse: bool) -> dict[str, Part]:
    attention = f"{local}self_attention."
    found = {
        "input_layernorm.weight": cut.whole(f"{local}input_layernorm.weight"),
        "post_attention_layernorm.weight": cut.whole(f"{local}pre_mlp_layernorm.weight"),
        "self_attn.o_proj.weight": cut.columns(f"{attention}linear_proj.weight"),
    }
    if sparse:
        found["mlp.gate.weight"] = cut.whole(f"{local}mlp.router.weight")
        found["mlp.experts.gate_up_proj"] = cut.expert_rows(f"{local}mlp.experts.gate_up_proj", 2)
        found["mlp.experts.down_proj"] = cut.expert_columns(f"{local}mlp.experts.down_proj")
    else:
        found["mlp.gate_proj.weight"] = cut.rows(f"{local}mlp.linear_fc1.weight", 0, 2)
        found["mlp.up_proj.weight"] = cut.rows(f"{local}mlp.linear_fc1.weight", 1, 2)
        found["mlp.down_proj.weight"] = cut.columns(f"{local}mlp.linear_fc2.weight")
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
    """Parts of one tensor-parallel rank, and of experts of one expert-parallel rank among those."""

    ranks: int
    rank: int
    expert_ranks: int = 1
    expert_rank: int = 0

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

    def expert_rows(self, local: str, blocks: int) -> Part:
        """This rank's experts of (experts, rows, columns), each block of their rows divided."""

        def apart(own: Tensor) -> Tensor:
            return own.view(len(own), blocks, -1, own.shape[-1])

        def of_whole(whole: Tensor) -> Tensor:
            return apart(whole.chunk(self.expert_ranks)[self.expert_rank]).chunk(self.ranks, 2)[self.rank]

        return Part(local, apart, of_whole)

    def expert_columns(self, local: str) -> Part:
        """This rank's experts of (experts, rows, columns), divided by columns."""

        def of_whole(whole: Tensor) -> Tensor:
            return whole.chunk(self.expert_ranks)[self.expert_rank].chunk(self.ranks, 2)[self.rank]

        return Part(local, _same, of_whole)

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
