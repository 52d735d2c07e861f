"""The weights of a model directory by the loaded model's own names, one tensor or a part of one at a time.

What transformers does to names and tensors on the way from files to a model (renamed keys, experts that are merged into
one tensor, types) is done here by its own conversions, for each tensor when it is asked for. Nothing is read before.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from headrace_schema.sections.generating import ModelSection
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files
from typing_extensions import override

from headrace_modelkit.dequantising import METHODS, Dequantised
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import load_model, location, not_readable, quantisation, reading
from headrace_modelkit.tensor_files import (
    Box,
    SourceFiles,
    TensorFiles,
    Tensors,
    TensorsInMemory,
    open_file,
    slices,
    volume,
)
from headrace_modelkit.weights import read_weights, state_tensors

SAMPLES, SAMPLE_BYTES = 16, 4096
"""How much of a file's content is in its fingerprint."""


def empty_model(config: ModelSection, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model with its parameters on meta, in the types that its weights are loaded in; buffers are as they must be.

    As `load_model`. Raises ModelNotReadable.
    """
    with parameters_on_meta():
        model = load_model(config, weights=False, dtype=dtype)
    model.tie_weights()
    untyped: Any = model
    for pattern, kept in untyped._get_dtype_plan(model.dtype).items():
        for name, parameter in model.named_parameters():
            if pattern in name:
                parameter.data = parameter.data.to(kept)
    return model


_NUMBER = re.compile(r"\d+")
_KINDS = {"F64", "F32", "F16", "BF16"}
"""Numbers that weights are read of."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """What modules that are made in the body get as parameters lies on meta; buffers are as they must be."""
    register: Any = register_module_parameter_registration_hook
    hook = register(_onto_meta)
    try:
        yield
    finally:
        hook.remove()


def _onto_meta(
    _: torch.nn.Module, __: str, parameter: torch.nn.Parameter | None
) -> torch.nn.Parameter | None:
    if parameter is None or parameter.device.type == "meta":
        return parameter
    return torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)


def open_model(config: ModelSection, model: PreTrainedModel, *, cached: bool = False) -> Tensors:
    """The weights of `model`, which `empty_model` made of `config`. Raises ModelNotReadable, naming a file that is
    missing or damaged. `cached`: nothing is downloaded.

    Quantised weights (`dequantising`) are computed as they are read. Files of other kinds (GGUF, adapters) are loaded
    whole, in the model's types.
    """
    found = _opened(config, model, cached=cached)
    # What the architecture lets a checkpoint leave out is drawn or computed by transformers.
    return _whole_model(config) if found is None or found.drawn else found


def read_quantised(config: ModelSection, model: PreTrainedModel) -> None:
    """Fills a model, which `load_model` made of `config` without weights, from quantised files.

    transformers would keep them quantised where the host has a GPU. Raises ModelNotReadable.
    """
    with reading(config):
        read_weights(model, open_model(config, model))


def check_model(config: ModelSection) -> None:
    """Opens a model's files as `open_model` does, and loads nothing. Raises ModelNotReadable."""
    _opened(config, empty_model(config), cached=False)


def open_files(config: ModelSection, model: PreTrainedModel, *, cached: bool) -> SourceFiles | None:
    """A model's files, whose weights are computed as they are read where they are quantised; None for other kinds.

    Raises ModelNotReadable by `reading`.
    """
    if _only_whole(config, model):
        return None
    scheme = quantisation(model.config)
    if scheme and (method := str(scheme.get("quant_method"))) not in METHODS:
        known = " and ".join(METHODS)
        raise not_readable(
            config,
            f"its weights are quantised by {method}, and those of {known} alone are read; use the ones before",
        )
    files = TensorFiles(files_of(config, cached=cached))
    return Dequantised(files, scheme, model.dtype) if scheme else files


def _opened(config: ModelSection, model: PreTrainedModel, *, cached: bool) -> ModelFiles | None:
    with reading(config):
        if (files := open_files(config, model, cached=cached)) is None:
            return None
        found = ModelFiles(files, model)
    if quantisation(model.config) and found.drawn:  # drawn for a model that is kept quantised
        found.missing |= found.drawn
    if found.missing:
        first, count = min(found.missing), len(found.missing)
        raise not_readable(config, f"{count} weights are missing, first {first}")
    if found.extra:
        first, count = min(found.extra), len(found.extra)
        raise not_readable(
            config,
            f"its files have {count} weights more than config.json has layers or experts for, first {first}",
        )
    return found


def _whole_model(config: ModelSection) -> Tensors:
    return TensorsInMemory(dict(state_tensors(load_model(config))))


def _only_whole(config: ModelSection, model: PreTrainedModel) -> bool:
    untyped: Any = model.config
    return (
        config.gguf_file is not None
        or getattr(untyped, "transformers_weights", None) is not None
        or bool(type(untyped).extra_files)
        or (Path(config.path) / "adapter_config.json").exists()
    )


def files_of(config: ModelSection, *, cached: bool) -> list[Path]:
    """The safetensors files of a directory or of a model on the Hub. Raises ModelNotReadable and OSError."""
    options: dict[str, Any] = {**location(config), "_raise_exceptions_for_missing_entries": False}
    options["local_files_only"] = cached
    path = str(Path(os.path.expanduser(config.path))) if config.path.startswith("~") else config.path
    if (one := cached_file(path, SAFE_WEIGHTS_NAME, **options)) is not None:
        return [Path(one)]
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **options)
    if index is None:
        # Never the pickled *.bin files that older directories hold.
        raise not_readable(config, f"it holds no {SAFE_WEIGHTS_NAME} and no {SAFE_WEIGHTS_INDEX_NAME}")
    try:
        named = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise not_readable(config, f"{SAFE_WEIGHTS_INDEX_NAME} cannot be read ({error})") from error
    if Path(path).is_dir():
        found = [Path(index).parent / name for name in named]
        for file in found:
            if not file.is_file():
                raise not_readable(config, f"{file.name}, which {SAFE_WEIGHTS_INDEX_NAME} names, is missing")
        return found
    options.pop("_raise_exceptions_for_missing_entries")
    find_shards: Any = get_checkpoint_shard_files
    shards, _ = find_shards(path, index, **options)
    return [Path(shard) for shard in shards]


@dataclass(frozen=True)
class _Sources:
    """What one or several weights of the model are made of: tensors of the files, with the pattern that each matched.

    Without a converter it is one tensor under another name.
    """

    first: str
    tensors: list[tuple[str, str | None]]
    converter: Any = None


class ModelFiles(Tensors):
    """The tensors of a model's files under the names, in the shapes and types that `model` has, whose own may be meta.

    Raises ModelNotReadable by `reading`: OSError or ValueError for a file that is missing or damaged.
    """

    def __init__(self, files: SourceFiles, model: PreTrainedModel) -> None:
        self._model = model
        self._files = files
        # As it is now: the model may be taken to other types and devices before its weights are read.
        self._layout = {name: (tuple(own.shape), own.dtype) for name, own in state_tensors(model)}
        self._sources: dict[str, _Sources] = {}
        self._converted: tuple[str, dict[str, Tensor]] | None = None
        """What the last conversion made: others of its weights, or other parts of them, may be asked for next."""
        state = model.state_dict()
        for sources in _plan(self._files.names(), model, state):
            for source, _ in sources.tensors:
                _check_numbers(source, files.kind(source), state.get(sources.first))
            for name, tensor in self._made(sources, meta=True).items():
                self._sources[name] = sources
                if name in state and tensor.shape != state[name].shape:
                    raise ValueError(
                        f"{name} has the shape {list(tensor.shape)} in the files and {list(state[name].shape)} in "
                        "the architecture"
                    )
        untyped: Any = model
        for alias, name in (getattr(untyped, "all_tied_weights_keys", None) or {}).items():
            if name not in self._sources and alias in self._sources:
                self._sources[name] = self._sources[alias]
        missing = {name for name in self._layout if name not in self._sources}
        self.drawn = _may_be_missing(model, missing)
        """Weights without a tensor that the architecture lets be missing."""
        self.missing = missing - self.drawn
        """Weights without a tensor that must have one."""
        used = {source for own in self._sources.values() for source, _ in own.tensors}
        alike = {_NUMBER.sub("N", name) for name in used}
        beside = {name for name in set(self._files.names()) - used if _NUMBER.sub("N", name) in alike}
        self.extra = beside - _may_be_left(model, beside)
        """Tensors of layers or experts that the model has not; others that it has no use for are left alone."""

    @override
    def names(self) -> Iterable[str]:
        return self._layout.keys()

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self._layout[name][0]

    @override
    def read(self, name: str, box: Box | None = None) -> Tensor:
        sources, dtype = self._sources[name], self._layout[name][1]
        if box is not None and not volume(box):
            return torch.empty([end - first for first, end in box], dtype=dtype)
        if sources.converter is None:
            [(source, _)] = sources.tensors
            return self._files.read(source, box).to(dtype)
        if box is not None and _merges_along_first(sources.converter):
            # Experts one after another: those that the box has are merged alone.
            chosen = _of_modules(sources, box[0])
            found = self._made(chosen)[name][slices(((0, box[0][1] - box[0][0]), *box[1:]))]
            return found.to(dtype).contiguous()
        if self._converted is None or self._converted[0] != sources.first:
            self._converted = None
            self._converted = sources.first, self._made(sources)
        made = self._converted[1][name]
        return (made if box is None else made[slices(box)]).to(dtype).contiguous()

    def _made(self, sources: _Sources, *, meta: bool = False) -> dict[str, Tensor]:
        """The weights that come of these tensors."""
        read: Callable[[str], Tensor] = self._empty if meta else self._files.read
        if sources.converter is None:
            return {sources.first: read(sources.tensors[0][0])}
        converter = deepcopy(sources.converter)
        for source, pattern in sources.tensors:
            converter.add_tensor(sources.first, source, pattern, partial(read, source))
        made = converter.convert(sources.first, model=self._model, config=self._model.config)
        return {name: found[0] if isinstance(found, list) else found for name, found in made.items()}

    def _empty(self, source: str) -> Tensor:
        return torch.empty(self._files.shape(source), device="meta")


def _plan(names: Iterable[str], model: PreTrainedModel, state: dict[str, Tensor]) -> list[_Sources]:
    """What each tensor of the files is for, as transformers' loader finds it; what is for nothing is left out."""
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix = model.base_model_prefix
    found: dict[str, _Sources] = {}
    for name in sorted(names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(name, [], [], prefix, state)
        if renamed in state:
            converter = by_pattern[pattern] if pattern is not None else None
            sources = found.setdefault(renamed, _Sources(renamed, [], converter))
            if converter is None:
                sources.tensors[:] = [(name, None)]
            else:
                sources.tensors.append((name, pattern))
    return list(found.values())


def _check_numbers(name: str, kind: str, weight: Tensor | None) -> None:
    """Raises ValueError for a tensor whose numbers say nothing without a scale."""
    if weight is not None and weight.is_floating_point() and kind not in _KINDS:
        raise ValueError(
            f"{name} is quantised ({kind}), and config.json has no quantization_config that says how"
        )


def _may_be_missing(model: PreTrainedModel, missing: set[str]) -> set[str]:
    """Those that transformers does not report."""
    untyped: Any = model

    class Info:
        missing_keys, unexpected_keys = set(missing), set[str]()

    info = Info()
    untyped._adjust_missing_and_unexpected_keys(info)
    return missing - info.missing_keys


def _may_be_left(model: PreTrainedModel, extra: set[str]) -> set[str]:
    """Those that the class says it has no use for, as layers that predict several tokens."""
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])
    patterns += [rf"model\.layers\.{layer}\." for layer in predicting_layers(model.config.get_text_config())]
    return {name for name in extra if any(re.search(pattern, name) for pattern in patterns)}


def predicting_layers(text: Any) -> range:
    """Numbers of the layers behind those of the model that predict several tokens, as DeepSeek and GLM name them."""
    count = int(getattr(text, "num_nextn_predict_layers", None) or 0)
    return range(text.num_hidden_layers, text.num_hidden_layers + count)


def _merges_along_first(converter: Any) -> bool:
    """Whether the tensors of a module list, in the order of the list, are what the first dimension counts."""
    first, *others = converter.operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and len(converter.target_patterns) == 1
        and all(getattr(each, "dim", 0) != 0 for each in others)
    )


def _of_modules(sources: _Sources, places: tuple[int, int]) -> _Sources:
    """The sources of a part of the module list alone."""
    by_pattern: dict[str | None, list[str]] = {}
    for name, pattern in sources.tensors:
        by_pattern.setdefault(pattern, []).append(name)
    chosen = [(name, pattern) for pattern, names in by_pattern.items() for name in names[slice(*places)]]
    return _Sources(sources.first, chosen, sources.converter)


def fingerprint(config: ModelSection) -> str:
    """What tells a model's files from others without reading them: names, sizes, headers and samples; empty where they
    are not here. Two hosts may have other files at one path.
    """
    try:
        with reading(config):
            files = files_of(config, cached=True)
            digest = xxhash.xxh3_128()
            for file in files:
                with open_file(file):
                    pass
                _sample(file, digest)
            return str(digest.hexdigest())
    except (ModelNotReadable, OSError, ValueError):
        return ""


def _sample(file: Path, digest: xxhash.xxh3_128) -> None:
    with file.open("rb") as opened:
        size = file.stat().st_size
        header = int.from_bytes(opened.read(8), "little")
        digest.update(f"{file.name} {size}".encode())
        digest.update(opened.read(header))
        for number in range(SAMPLES):
            opened.seek(8 + header + max(0, size - 8 - header - SAMPLE_BYTES) * number // (SAMPLES - 1))
            digest.update(opened.read(SAMPLE_BYTES))
