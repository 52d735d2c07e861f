"""Weights as files that others read: a Hugging Face directory, and adapters as peft writes them, without peft.

Weights come one after another: no more than one of them is in memory. Shapes of adapters: O outputs, I inputs of a
layer, R rank, E experts.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.learning import LoraSection
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from headrace_modelkit.experts import ADAPTER, PROJECTIONS
from headrace_modelkit.loading import (
    drop_quantisation,
    load_model,
    replace_directory,
    save_model,
    sync_directory,
)
from headrace_modelkit.lora import A, B
from headrace_modelkit.model_files import empty_model
from headrace_modelkit.tensor_files import safetensors_header, tensor_bytes
from headrace_modelkit.weights import load_weights, saved, state_tensors

MAX_FILE_BYTES = 5 * 10**9
"""Of a file with weights, unless a single tensor is larger."""


def export_model(
    config: ModelSection,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: Any,
    directory: Path,
    *,
    beside: Callable[[Path], None] | None = None,
    limit: int = MAX_FILE_BYTES,
    model: PreTrainedModel | None = None,
    more: Mapping[str, tuple[Tensor, Callable[[], Tensor]]] = MappingProxyType({}),
) -> None:
    """Writes the model of `config` with these weights, in its types, aside and renames it into place; as `save_model`.
    `model`: an empty one in place of it. `more`: tensors of the files that the model has not, each with what it is like
    and how to get it, once all others have come.

    `tensors` come in the model's order. Files hold at most `limit` bytes; an index names them where there are several.
    Raises ValueError for tensors that are not the model's, and OSError.
    """
    whole: Any = model
    model = model or empty_model(config)
    plan = _Plan.of(model, limit, {name: like for name, (like, _) in more.items()})
    if plan is None and more:
        raise ValueError(f"{min(more)} has no place among files whose weights are made of several")
    if plan is None:  # Several weights become one on the way back to the names of the files.
        whole = load_model(config, weights=False) if whole is None else whole.to_empty(device="cpu")
        load_weights(whole, {name: value.clone() for name, value in tensors})
        save_model(whole, tokenizer, directory, beside=beside)
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        untyped: Any = model
        drop_quantisation(model.config)
        untyped.save_pretrained(aside, state_dict={})  # Its configurations.
        behind = ((name, read()) for name, (_, read) in more.items())
        _write(plan, chain(_cast(model, plan, tensors), behind), aside)
        getattr(tokenizer, "tokenizer", tokenizer).save_pretrained(aside)
        if beside is not None:
            beside(aside)
        sync_directory(aside)
        replace_directory(aside, directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@dataclass(frozen=True)
class _Plan:
    """Which tensors (on meta) go into which file, in the order in which they come."""

    files: dict[str, dict[str, Tensor]]
    weights: dict[str, Tensor]
    """By the model's own names."""

    @classmethod
    def of(cls, model: PreTrainedModel, limit: int, more: Mapping[str, Tensor]) -> _Plan | None:
        """None where a tensor of the files is made of several weights."""
        own = dict(state_tensors(model))
        meta = {name: torch.empty_like(value, device="meta") for name, value in own.items()}
        alone = {
            name: value for weight in meta for name, value in saved(model, {weight: meta[weight]}).items()
        }
        at_once = saved(model, meta)
        if {name: value.shape for name, value in alone.items()} != {
            name: value.shape for name, value in at_once.items()
        }:
            return None
        groups: list[dict[str, Tensor]] = [{}]
        size = 0
        for name, value in (*alone.items(), *more.items()):
            if groups[-1] and size + value.nbytes > limit:
                groups.append({})
                size = 0
            groups[-1][name] = value
            size += value.nbytes
        count, stem = len(groups), SAFE_WEIGHTS_NAME.removesuffix(".safetensors")
        names = [f"{stem}-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)]
        return cls(dict(zip(names if count > 1 else [SAFE_WEIGHTS_NAME], groups, strict=True)), meta)

    def index(self) -> str:
        """Content of the file that names the others."""
        sizes = [value for group in self.files.values() for value in group.values()]
        total = {
            "total_size": sum(value.nbytes for value in sizes),
            "total_parameters": sum(value.numel() for value in sizes),
        }
        names = {name: file for file, group in self.files.items() for name in group}
        return json.dumps({"metadata": total, "weight_map": names}, indent=2, sort_keys=True) + "\n"


def _write(plan: _Plan, coming: Iterator[tuple[str, Tensor]], aside: Path) -> None:
    for file, group in plan.files.items():
        with (aside / file).open("wb") as opened:
            _write_file(opened, group, coming)
    if (left := next(coming, None)) is not None:
        raise ValueError(f"{left[0]} is one tensor more than the model has")
    if len(plan.files) > 1:
        (aside / SAFE_WEIGHTS_INDEX_NAME).write_text(plan.index())


def _write_file(file: IO[bytes], group: dict[str, Tensor], coming: Iterator[tuple[str, Tensor]]) -> None:
    file.write(safetensors_header(group, {"format": "pt"}))
    for expected in group:
        name, value = next(coming, ("", None))
        if name != expected or value is None:
            raise ValueError(f"{expected} is expected, and {name or 'nothing'} comes")
        file.write(tensor_bytes(value))


def _cast(
    model: PreTrainedModel, plan: _Plan, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    for name, value in tensors:
        if name not in plan.weights or value.shape != plan.weights[name].shape:
            raise ValueError(f"{name} of shape {list(value.shape)} is no weight of the model")
        yield from saved(model, {name: value.to(plan.weights[name].dtype)}).items()


def save_adapter(directory: Path, lora: LoraSection, adapters: Mapping[str, Tensor], base: str) -> None:
    """Writes the adapters of a model, by the names that its layers give them, into a new directory.

    `base` is where the model below them was read from. Those of experts need peft 0.17 or later (`target_parameters`).
    """
    directory.mkdir()
    layers = {name.rpartition(".")[0] for name in adapters}
    tensors = {name.removesuffix(ADAPTER) for name in layers if name.endswith(ADAPTER)}
    save_file(
        {
            f"base_model.model.{_peft_layer(layer, tensors)}.{part}.weight": _as_peft_has(
                tensor, part
            ).contiguous()
            for (layer, part), tensor in ((_parted(name), tensor) for name, tensor in adapters.items())
        },
        directory / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        # Whole names: the last part of one may be that of the head or of a layer without adapter too.
        "target_modules": sorted(name for name in layers if not name.endswith(ADAPTER)),
        **({"target_parameters": sorted(tensors)} if tensors else {}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    sync_directory(directory)


def _parted(name: str) -> tuple[str, str]:
    layer, _, part = name.rpartition(".")
    assert part in (A, B)
    return layer, part


def _peft_layer(layer: str, tensors: Set[str]) -> str:
    """peft wraps a layer of experts once for each of its tensors with an adapter: the last one is outermost."""
    if not layer.endswith(ADAPTER):
        return layer
    owner, _, name = layer.removesuffix(ADAPTER).rpartition(".")
    outer = [each for each in PROJECTIONS[PROJECTIONS.index(name) + 1 :] if f"{owner}.{each}" in tensors]
    return owner + ".base_layer" * len(outer)


def _as_peft_has(tensor: Tensor, part: str) -> Tensor:
    """Of experts (E · R, I) and (O, R · E), whose columns go through the experts for each of the ranks."""
    if tensor.dim() == 2:
        return tensor
    return tensor.flatten(0, 1) if part == A else tensor.permute(1, 2, 0).flatten(1)
