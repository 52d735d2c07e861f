"""Layers of a checkpoint that predict several tokens (MTP), by their names there: read as a head, kept in an export.

transformers' classes leave them out. Knows no other head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from headrace_schema.sections.generating import ModelSection
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.families.drafts import DRAFT, Mtp
from headrace_modelkit.loading import load_architecture, reading
from headrace_modelkit.model_files import ModelFiles, open_files, predicting_layers
from headrace_modelkit.tensor_files import Renamed, SourceFiles, Tensors
from headrace_modelkit.weights import saved, state_tensors

KEY = "trainer.draft"
MTP_FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""Those whose checkpoints have one layer behind the others, which reads as DeepSeek V3's does."""
Beside = dict[str, tuple[Tensor, Callable[[], Tensor]]]
_OF_HEAD = {
    **{f"{name}.weight": f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj")},
    "shared_head.norm.weight": "norm.weight",
}
"""Names of such a layer's tensors and of a head's; the others are those of a decoder layer."""
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Of the model's embedding and head."""
_BLOCK_ROWS = 4096
_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")
_MTP = re.compile(r"(^|\.)mtp")


def predicting(policy: ModelSection) -> PreTrainedConfig:
    """The configuration of a model with a layer that predicts one token more. Raises ModelNotReadable."""
    text = load_architecture(policy).get_text_config()
    kind, count = text.model_type, len(predicting_layers(text))
    if kind not in MTP_FAMILIES:
        known = ", ".join(MTP_FAMILIES)
        reason = f"MTP layers of {kind} are not read, those of {known} are"
    elif count != 1:
        reason = f"config.json of {policy.path!r} names {count} of them (num_nextn_predict_layers), and one is known"
    else:
        return text
    raise ModelNotReadable(f"{KEY}.form: {reason}; use form: eagle3")


def open_predicting(policy: ModelSection, model: PreTrainedModel) -> Tensors:
    """The weights of the head of `model`, by its names. Raises ModelNotReadable, naming a tensor."""
    with reading(policy):
        if (files := open_files(policy, model, cached=False)) is not None:
            return _opened(policy, model, files)
    raise ModelNotReadable(f"{KEY}.form: {policy.path!r} is no directory of safetensors; use form: eagle3")


def _opened(policy: ModelSection, model: PreTrainedModel, files: SourceFiles) -> Tensors:
    layer = _layer_in(model.config)
    named = {DRAFT + own: name for name in files.names() if (own := _own_name(name, layer))}
    found = ModelFiles(Renamed(files, named), model)
    if missing := sorted(name for name in found.missing | found.drawn if name.startswith(DRAFT)):
        name = missing[0].removeprefix(DRAFT).removeprefix("layer.")
        raise ModelNotReadable(
            f"{KEY}.form: the files of {policy.path!r} have no {layer}{name}, of the layer that predicts one token "
            "more; use form: eagle3, or a checkpoint with that layer"
        )
    _check_copies(policy, model, files, layer)
    return Renamed(
        found, {name.removeprefix(DRAFT): name for name in found.names() if name.startswith(DRAFT)}
    )


def _check_copies(policy: ModelSection, model: PreTrainedModel, files: SourceFiles, layer: str) -> None:
    whole = ModelFiles(files, model)
    for copy, name in zip(_COPIES, shared_names(model), strict=True):
        if f"{layer}{copy}" not in set(files.names()):
            continue
        shape = whole.shape(name)
        for first in range(0, shape[0], _BLOCK_ROWS):
            box = ((first, min(first + _BLOCK_ROWS, shape[0])), (0, shape[1]))
            one, other = files.read(f"{layer}{copy}", box), whole.read(name, box)
            if not torch.equal(one.to(other.dtype), other):
                raise ModelNotReadable(
                    f"{KEY}.form: {layer}{copy} of {policy.path!r} is no copy of {name}, and layers that say words by "
                    "the model's own are known; use form: eagle3"
                )


def _layer_in(config: PreTrainedConfig) -> str:
    """What the names of the predicting layer's tensors begin with."""
    return f"model.layers.{predicting_layers(config.get_text_config())[0]}."


def _own_name(name: str, layer: str) -> str:
    """A head's name of a tensor of the files; empty for one that is none of its weights."""
    rest = name.removeprefix(layer)
    if rest in (name, *_COPIES):
        return ""
    return _OF_HEAD.get(rest, f"layer.{rest}")


def shared_names(model: PreTrainedModel) -> tuple[str, str]:
    """What the model calls its embedding and its head, which is the embedding where they are tied."""
    untyped: Any = model
    found = {id(tensor): name for name, tensor in state_tensors(model)}
    embedding = found[id(untyped.get_input_embeddings().weight)]
    return embedding, found.get(id(untyped.get_output_embeddings().weight), embedding)


def layers_beside(policy: ModelSection, model: PreTrainedModel, learned: Mapping[str, Tensor]) -> Beside:
    """Tensors of the checkpoint's layers that predict several tokens, which the class of `model` leaves out: by their
    names there, what they are like (on meta) and how to get each.

    They are as they were, or where such a layer is the head of `model` as it has learned: `learned` has its weights
    and those of `shared_names` by the names of `model`, before any is asked for. Raises ModelNotReadable.
    """
    with reading(policy):
        files = open_files(policy, model, cached=False)
        if files is None:
            return {}
        found = _Beside(files, model, learned)
        return {name: (found.like(name), partial(found.value, name)) for name in sorted(found.names)}


class _Beside:
    def __init__(self, files: SourceFiles, model: PreTrainedModel, learned: Mapping[str, Tensor]) -> None:
        self._files, self._model, self._learned = files, model, learned
        self._learns = isinstance(getattr(model, "draft", None), Mtp)
        self._saved: dict[str, Tensor] = {}
        layers = predicting_layers(model.config.get_text_config())
        self.names = [name for name in files.names() if _predicts(name, layers)]

    def like(self, name: str) -> Tensor:
        shape = self._files.shape(name)
        dtype = self._files.read(name, tuple((0, 0) for _ in shape)).dtype
        return torch.empty(shape, dtype=dtype, device="meta")

    def value(self, name: str) -> Tensor:
        if not self._learns:
            return self._files.read(name)
        layer = _layer_in(self._model.config)
        if (rest := name.removeprefix(layer)) in _COPIES:
            return self._learned[shared_names(self._model)[_COPIES.index(rest)]]
        if not self._saved:
            own = {each: value for each, value in self._learned.items() if each.startswith(DRAFT)}
            self._saved = saved(self._model, own)
        return self._saved[DRAFT + _own_name(name, layer)]


def _predicts(name: str, layers: range) -> bool:
    found = _LAYER.match(name)
    return (found is not None and int(found[1]) in layers) or _MTP.search(name) is not None
