"""Layers of a checkpoint that predict several tokens (MTP), by their names there: read as a head, kept in an export.

transformers' classes leave them out. Knows no other head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
_BEHIND = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""Those whose checkpoints have the layer behind the others, under the next number."""
_ASIDE = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Those whose checkpoints have it under `mtp.`: a layer with full attention beside layers with states."""
MTP_FAMILIES = (*_BEHIND, *_ASIDE)
"""Those whose checkpoints have one such layer, of the form that DeepSeek V3 gave it."""
Beside = dict[str, tuple[Tensor, Callable[[], Tensor]]]


@dataclass(frozen=True)
class _Names:
    """What a checkpoint calls the tensors of a predicting layer."""

    before: str
    """What all their names begin with."""
    layer: str
    """What behind it those of the decoder layer begin with."""
    of_head: Mapping[str, str]
    """The others of its weights, and what a head calls them."""

    def own(self, name: str) -> str:
        """A head's name of a tensor of the files; empty for one that is none of its weights."""
        rest = name.removeprefix(self.before)
        if rest in (name, *_COPIES):
            return ""
        if rest in self.of_head:
            return self.of_head[rest]
        return f"layer.{rest.removeprefix(self.layer)}" if rest.startswith(self.layer) else ""

    def in_files(self, own: str) -> str:
        """The files' name of a head's tensor."""
        found = next((rest for rest, name in self.of_head.items() if name == own), None)
        return self.before + (found or self.layer + own.removeprefix("layer."))


_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Of the model's embedding and head."""
_BLOCK_ROWS = 4096


_DEEPSEEK = {
    **{f"{name}.weight": f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj")},
    "shared_head.norm.weight": "norm.weight",
}
_QWEN = {
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "fc.weight": "eh_proj.weight",
    "norm.weight": "norm.weight",
}
_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")
_MTP = re.compile(r"(^|\.)mtp")


def predicting(policy: ModelSection) -> PreTrainedConfig:
    """The configuration of a model with a layer that predicts one token more. Raises ModelNotReadable."""
    text = load_architecture(policy).get_text_config()
    kind = text.model_type
    key = "mtp_num_hidden_layers" if kind.startswith("qwen3_5") else "num_nextn_predict_layers"
    count = getattr(text, key, 1 if kind in _ASIDE else 0)
    if kind not in MTP_FAMILIES:
        known = ", ".join(MTP_FAMILIES)
        reason = f"MTP layers of {kind} are not read, those of {known} are"
    elif count != 1:
        reason = f"config.json of {policy.path!r} names {count} of them ({key}), and one is known"
    else:
        return text
    raise ModelNotReadable(f"{KEY}.form: {reason}; use form: eagle3")


def _names(config: PreTrainedConfig) -> _Names:
    text: Any = config.get_text_config()
    if text.model_type in _ASIDE:
        return _Names("mtp.", "layers.0.", _QWEN)
    return _Names(f"model.layers.{text.num_hidden_layers}.", "", _DEEPSEEK)


def open_predicting(policy: ModelSection, model: PreTrainedModel) -> Tensors:
    """The weights of the head of `model`, by its names. Raises ModelNotReadable, naming a tensor."""
    with reading(policy):
        if (files := open_files(policy, model, cached=False)) is not None:
            return _opened(policy, model, files)
    raise ModelNotReadable(f"{KEY}.form: {policy.path!r} is no directory of safetensors; use form: eagle3")


def _opened(policy: ModelSection, model: PreTrainedModel, files: SourceFiles) -> Tensors:
    names = _names(model.config)
    named = {DRAFT + own: name for name in files.names() if (own := names.own(name))}
    found = ModelFiles(Renamed(files, named), model)
    if missing := sorted(name for name in found.missing | found.drawn if name.startswith(DRAFT)):
        raise ModelNotReadable(
            f"{KEY}.form: the files of {policy.path!r} have no {names.in_files(missing[0].removeprefix(DRAFT))}, of "
            "the layer that predicts one token more; use form: eagle3, or a checkpoint with that layer"
        )
    _check_copies(policy, model, files, names.before)
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
        self._own = _names(model.config)
        layers = predicting_layers(model.config.get_text_config())
        self.names = [name for name in files.names() if _predicts(name, layers)]

    def like(self, name: str) -> Tensor:
        shape = self._files.shape(name)
        dtype = self._files.read(name, tuple((0, 0) for _ in shape)).dtype
        return torch.empty(shape, dtype=dtype, device="meta")

    def value(self, name: str) -> Tensor:
        if self._learns and (rest := name.removeprefix(self._own.before)) in _COPIES:
            return self._learned[shared_names(self._model)[_COPIES.index(rest)]]
        if not self._learns or not (own := self._own.own(name)):
            return self._files.read(name)
        if not self._saved:
            learned = {each: value for each, value in self._learned.items() if each.startswith(DRAFT)}
            self._saved = saved(self._model, learned)
        return self._saved[DRAFT + own]


def _predicts(name: str, layers: range) -> bool:
    found = _LAYER.match(name)
    return (found is not None and int(found[1]) in layers) or _MTP.search(name) is not None
