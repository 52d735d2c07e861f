"""Loads and saves causal language models as Hugging Face directories; executes nothing they hold."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from headrace_schema.images import VISION_FAMILIES
from headrace_schema.progress import counter
from headrace_schema.sections.generating import ModelSection
from safetensors import SafetensorError
from torch.nn.modules.dropout import _DropoutNd
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.families.mamba import bound_steps
from headrace_modelkit.weights import mark_wrapped

# transformers' functions and auto classes are not annotated.
_Configs: Any = AutoConfig
_Models: Any = AutoModelForCausalLM
_VisionModels: Any = AutoModelForImageTextToText
_Logging: Any = transformers_logging

# A service's log is no place for progress bars.
_Logging.disable_progress_bar()

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

REMOTE_CODE = "HEADRACE_REMOTE_CODE"
"""A service's variable: commits whose code models may run."""
QUANTISATION = "quantization_config"
_CHANCES = ("drop", "jitter")
"""What names of probabilities have in them by which a forward draws in training mode."""


def load_model(
    config: ModelSection,
    *,
    weights: bool = True,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    layers: int | None = None,
) -> PreTrainedModel:
    """The model in eval mode with dropout off, on `device`, in `dtype` (default: the config's).

    `weights=False` allocates the parameters and leaves their values undefined (buffers such as rotary
    frequencies are right); it takes well under a second. `layers`: no more than so many, of a model without weights.
    Raises ModelNotReadable.
    """
    wanted = dtype or DTYPES[config.dtype]
    architecture = load_architecture(config)
    if layers is not None:
        _shorten(architecture, layers)
    quantised = weights and config.gguf_file is None and bool(quantisation(architecture))
    with reading(config):
        model: Any
        if weights and not quantised:
            model = _with_weights(config, architecture, wanted)
        else:
            with no_init_weights():
                kind, options = _models(architecture), trusted(config)
                known = type(architecture) in kind._model_mapping  # also of own code that was read before
                code = {key: options[key] for key in options if "code" in key and not known}
                model = kind.from_config(architecture, dtype=wanted, **({"trust_remote_code": False} | code))
            model.tie_weights()
    if type(model.config) is not type(architecture):
        mark_wrapped(model)
    for module in model.modules():
        if isinstance(module, _DropoutNd):  # in the code of some models, whatever the configuration says
            module.p = 0.0
    with reading(config):
        bound_steps(model)
    if quantised:
        from headrace_modelkit.model_files import read_quantised  # which is made of this module

        read_quantised(config, model)
    ready: PreTrainedModel = (model if device == "cpu" else model.to(device)).eval()
    return ready


def reads_images(architecture: PreTrainedConfig) -> bool:
    """Whether a model takes images in its prompts."""
    return architecture.model_type in VISION_FAMILIES


def _models(architecture: PreTrainedConfig) -> Any:
    return _VisionModels if reads_images(architecture) else _Models


def _shorten(architecture: PreTrainedConfig, layers: int) -> None:
    text: Any = architecture.get_text_config()
    whole = text.num_hidden_layers
    text.num_hidden_layers = min(layers, whole)
    for key, value in vars(text).items():  # a kind for each layer, under whatever name
        if isinstance(value, list) and len(value) == whole and not isinstance(value[0], float):
            setattr(text, key, value[:layers])
    if getattr(text, "num_kv_shared_layers", None):  # the last ones, with keys of layers before them
        text.num_kv_shared_layers = 0


def quantisation(architecture: PreTrainedConfig) -> dict[str, Any]:
    """How the weights of a model's files are quantised; empty where they are not. Here it is computed, published and
    written in `model.dtype`.
    """
    configs: list[Any] = [architecture, architecture.get_text_config()]
    found: Any = next((own for config in configs if (own := getattr(config, QUANTISATION, None))), {})
    return dict(found) if isinstance(found, dict) else dict(found.to_dict())


def drop_quantisation(architecture: PreTrainedConfig) -> None:
    """Lets a configuration say what the weights are after they were read."""
    for config in (architecture, architecture.get_text_config()):
        vars(config).pop(QUANTISATION, None)


def body_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a causal language model below its head."""
    untyped: Any = model
    body: PreTrainedModel = untyped.base_model
    if body is model:  # Llama 4 names a part that it has not
        body = next(child for child in model.children() if isinstance(child, PreTrainedModel))
    return body


def body_prefix(model: PreTrainedModel) -> str:
    """What the names of the body's tensors begin with in those of the model."""
    body = body_of(model)
    return next(f"{name}." for name, module in model.named_children() if module is body)


def load_architecture(config: ModelSection) -> PreTrainedConfig:
    """The model's configuration with dropout off. Raises ModelNotReadable."""
    with reading(config):
        architecture: PreTrainedConfig = _Configs.from_pretrained(config.path, **trusted(config))
    if architecture.model_type in ("qwen2_5_omni", "qwen3_omni_moe"):
        raise ModelNotReadable(
            f"model.path: {config.path!r} has a talker beside the part that is trained; take its thinker out, as "
            "docs/vision.md says (Qwen-Omni)"
        )
    _without_chance(vars(architecture))
    return architecture


def _without_chance(place: Any, named: bool = False) -> Any:
    """Sets the chances in a configuration's fields to 0, in place, those of nested ones too; what `place` becomes.

    `named`: it stands under such a name.
    """
    if isinstance(place, PreTrainedConfig):
        _without_chance(vars(place))
    elif isinstance(place, dict):
        place.update(
            {
                key: _without_chance(value, named or any(word in str(key) for word in _CHANCES))
                for key, value in place.items()
            }
        )
    elif isinstance(place, list):
        place[:] = [_without_chance(value, named) for value in place]
    elif named and isinstance(place, float):
        return 0.0
    return place


def context_limit(config: ModelSection, architecture: PreTrainedConfig) -> int:
    """Tokens that prompt and answer may have together. Raises ModelNotReadable when none is known."""
    own: int | None = getattr(architecture.get_text_config(), "max_position_embeddings", None)
    if own is None and config.max_context is None:
        raise ModelNotReadable(
            f"model.max_context: {config.path!r} states no context limit; set it in tokens"
        )
    return min(limit for limit in (own, config.max_context) if limit is not None)


def save_model(
    model: PreTrainedModel,
    tokenizer: Any,
    directory: Path | str,
    *,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Writes a Hugging Face safetensors directory aside and renames it into place.

    `tokenizer` is a TextCodec or a transformers tokenizer. `beside` writes more into the directory before it is
    renamed. An existing directory is replaced.
    """
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        drop_quantisation(model.config)
        model.save_pretrained(aside)
        getattr(tokenizer, "tokenizer", tokenizer).save_pretrained(aside)
        if beside is not None:
            beside(aside)
        sync_directory(aside)
        replace_directory(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def replace_directory(source: Path, target: Path) -> None:
    """Renames `source` to `target`; what stood there is removed after it has been moved away."""
    old = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.old")
    if target.exists():
        os.rename(target, old)
    os.rename(source, target)
    shutil.rmtree(old, ignore_errors=True)


def location(config: ModelSection) -> dict[str, Any]:
    """Arguments of `from_pretrained` that say where in `config.path` to look."""
    found = {"revision": config.trust_remote_code or config.revision, "gguf_file": config.gguf_file}
    return {key: value for key, value in found.items() if value is not None}


def trusted(config: ModelSection) -> dict[str, Any]:
    """`location`, and whether the model's own code is run: else transformers asks at the terminal whether to.

    Raises ModelNotReadable where the spec names a commit that this host does not allow.
    """
    commit = config.trust_remote_code
    if commit is None:
        return {**location(config), "trust_remote_code": False}
    key = f"model.trust_remote_code: {commit}"
    if Path(os.path.expanduser(config.path)).is_dir():
        raise ModelNotReadable(
            f"{key} is a commit, and {config.path!r} a directory, whose code has none; give the Hugging Face id, or "
            "install the code as a package"
        )
    if commit not in os.environ.get(REMOTE_CODE, "").replace(",", " ").split():
        raise ModelNotReadable(
            f"{key} is not allowed here: its code would run as this service does; who runs the service can list the "
            f"commit in {REMOTE_CODE}"
        )
    return {**location(config), "code_revision": commit, "trust_remote_code": True}


@contextmanager
def reading(config: ModelSection) -> Iterator[None]:
    """Turns what loaders raise on an unreadable path into one sentence that names the key and the fix."""
    _check_directory(config)
    try:
        yield
    except ModelNotReadable:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "trust_remote_code" in str(error):
            reason = (
                "it needs code of its own (auto_map), which is not run; where you have read it, name its commit in "
                "model.trust_remote_code"
            )
        raise not_readable(config, reason) from error


def _counted(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """transformers' bar over the tensors of a model, with each of them counted."""
    if not args or not hasattr(args[0], "__len__"):
        return make(*args, **kwargs)
    tensors, far = args[0], counter()

    def each() -> Iterator[Any]:
        for tensor in tensors:
            yield tensor
            far.add()

    far.begin(len(tensors), "tensors")
    return make(each(), *args[1:], **{"total": len(tensors), **kwargs})


def _with_weights(
    config: ModelSection, architecture: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    options = trusted(config)
    if config.gguf_file is not None:
        options["quantization_config"] = GgufConfig(dequantize=True)
    else:
        # Never the pickled *.bin files that older directories hold.
        options["use_safetensors"] = True
    before = transformers_logging.set_tqdm_hook(_counted)
    try:
        model, report = _models(architecture).from_pretrained(
            config.path, config=architecture, dtype=dtype, output_loading_info=True, **options
        )
    finally:
        transformers_logging.set_tqdm_hook(before)
    if missing := sorted(report["missing_keys"]):
        raise not_readable(config, f"{len(missing)} weights are missing, first {missing[0]}")
    if scales := sorted(name for name in report["unexpected_keys"] if name.endswith("_scale_inv")):
        raise not_readable(
            config,
            f"{scales[0]} is of a quantised weight, and config.json has no quantization_config that says how",
        )
    loaded: PreTrainedModel = model
    return loaded


def _check_directory(config: ModelSection) -> None:
    path = Path(os.path.expanduser(config.path))
    local = path.exists() or path.is_absolute() or config.path.startswith((".", "~"))
    if not local:
        return
    if not path.is_dir():
        raise not_readable(config, "there is no such directory")
    wanted = config.gguf_file or "config.json"
    if not (path / wanted).is_file():
        raise not_readable(config, f"it holds no {wanted}")
    if config.gguf_file is None:
        _check_json(config, path / wanted)


def _check_json(config: ModelSection, file: Path) -> None:
    try:
        json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise not_readable(config, f"{file.name} cannot be read ({error})") from error


def not_readable(config: ModelSection, reason: str) -> ModelNotReadable:
    """The error whose sentence names the key, the reason and the fix."""
    return ModelNotReadable(
        f"model.path: cannot read a model from {config.path!r}: {reason}; give a Hugging Face id or a "
        "directory with config.json, *.safetensors and a tokenizer (or set model.gguf_file)"
    )


def sync_directory(directory: Path) -> None:
    """Makes a flat directory's files readable by every user and writes them to the disk."""
    for path in [*directory.iterdir(), directory]:
        # safetensors writes for its own user alone; another service's user has to read it.
        path.chmod(0o755 if path.is_dir() else 0o644)
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
