"""Heads that draft, as models get them: new ones, and those of files, which are EAGLE-3's own directories as vLLM and
SpecForge read and write them, or the model's (`mtp_files`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.learning import DraftSection
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.families.drafts import DRAFT, IDS, DraftHead, Eagle3, Mtp
from headrace_modelkit.families.mtp_files import KEY, open_predicting, predicting
from headrace_modelkit.loading import DTYPES, body_of, load_architecture, location, reading, sync_directory
from headrace_modelkit.model_files import files_of, parameters_on_meta
from headrace_modelkit.tensor_files import Renamed, TensorFiles, Tensors, TensorsInMemory

CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_OTHER_FORMS = ("fc_norm", "norm_before_fc", "norm_output", "parallel_drafting", "target_hidden_size")
"""Keys of heads that compute something else."""


def add_draft(model: PreTrainedModel, section: DraftSection | None, policy: ModelSection) -> DraftHead | None:
    """Puts a head beside the layers of `model`, whose tensors are then among the model's, as DRAFT and their names;
    values undefined. None for no section. Raises ModelNotReadable.
    """
    if section is None:
        return None
    body: Any = body_of(model)
    if not hasattr(body, "layers"):
        reason = (
            f"{KEY}: {model.config.model_type} has no list of layers that a head could read; leave it out"
        )
        raise ModelNotReadable(reason)
    head: DraftHead
    with parameters_on_meta() if next(model.parameters()).device.type == "meta" else nullcontext():
        mtp = section.form == "mtp"
        head = Mtp(body, predicting(policy)) if mtp else Eagle3(draft_config(section, policy))
    for parameter in head.parameters():
        parameter.data = parameter.data.to(model.dtype)
    model.draft = head.eval()
    return head


def draft_config(section: DraftSection, policy: ModelSection) -> LlamaConfig:
    """Of the head in `section.path`, or one with the shape of the policy's layers. Raises ModelNotReadable."""
    architecture = load_architecture(policy)
    text: Any = architecture.get_text_config()
    if section.path is None:
        found: Any = _like(text)
    else:
        at = draft_section(section, policy)
        try:
            found = LlamaConfig.from_pretrained(at.path, **location(at))
        except (OSError, ValueError) as error:
            raise ModelNotReadable(f"{KEY}.path: {section.path!r} cannot be read: {error}") from error
    if problem := _unfit(found, text):
        raise ModelNotReadable(f"{KEY}{'.path' if section.path else ''}: {problem}")
    if getattr(found, "draft_vocab_size", None) is None:
        found.draft_vocab_size = found.vocab_size
    ids = (getattr(found, "eagle_config", None) or {}).get(IDS) or read_layers(text.num_hidden_layers)
    found.eagle_config = {IDS: [*ids], "use_aux_hidden_state": True}
    if getattr(found, "head_dim", None) is None:
        found.head_dim = found.hidden_size // found.num_attention_heads
    found._attn_implementation = "sdpa"
    ready: LlamaConfig = found
    return ready


def read_layers(count: int) -> tuple[int, int, int]:
    """Which hidden states a head reads of a model with so many layers: vLLM's choice, of few layers the last ones."""
    return (2, count // 2, count - 3) if count > 6 else (count - 2, count - 1, count)


def _like(text: Any) -> LlamaConfig:
    heads = text.num_attention_heads
    rope = getattr(text, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    return LlamaConfig(
        architectures=[CLASSES[0]],
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        max_position_embeddings=getattr(text, "max_position_embeddings", 2048),
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": theta or 10000.0},
        tie_word_embeddings=False,
    )


def _unfit(config: Any, text: PreTrainedConfig) -> str:
    """What of a head does not go with the model; empty where all does."""
    untyped: Any = text
    kinds = getattr(config, "architectures", None) or ["none"]
    if untyped.num_hidden_layers < 2:
        return "a head reads three hidden states, and the model has one layer; leave it out"
    if kinds[0] not in CLASSES:
        return f"its config.json names {kinds[0]}, and EAGLE-3 heads are {CLASSES[0]}; give one of these"
    if config.num_hidden_layers != 1:
        return f"the head has {config.num_hidden_layers} layers, and those with one are known"
    if other := [key for key in _OTHER_FORMS if getattr(config, key, None)]:
        return f"the head has {other[0]}, whose form is not known; give one without"
    for key in ("hidden_size", "vocab_size"):
        if getattr(config, key) != getattr(untyped, key):
            return (
                f"the head has {key} {getattr(config, key)} and the model {getattr(untyped, key)}; give one that was "
                "made for this model"
            )
    ids = (getattr(config, "eagle_config", None) or {}).get(IDS)
    if ids is not None and (len(ids) != 3 or not 0 <= min(ids) <= max(ids) <= untyped.num_hidden_layers):
        return f"the head reads the layers {ids} of a model with {untyped.num_hidden_layers}"
    return ""


def draft_section(section: DraftSection, policy: ModelSection) -> ModelSection:
    """Where a head's files are, as a model is named."""
    given = {"path": section.path, "revision": section.revision}
    return policy.model_copy(update={**given, "gguf_file": None, "trust_remote_code": None})


def open_draft(section: DraftSection, policy: ModelSection, model: PreTrainedModel, seed: int) -> Tensors:
    """The weights of the head of `model` by its own names: of its files, of the model's, or drawn.

    Raises ModelNotReadable, naming a tensor.
    """
    untyped: Any = model
    head: DraftHead = untyped.draft
    if isinstance(head, Mtp):
        return open_predicting(policy, model)
    if section.path is None:
        return TensorsInMemory(drawn(head, seed))
    found = _of_directory(section, policy)
    own = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    given = {name: found.shape(name) for name in found.names()}
    if "embed_tokens.weight" in given:
        raise ModelNotReadable(
            f"{KEY}.path: {section.path!r} has an embedding of its own, and heads that read the model's are known; "
            "remove embed_tokens from its files where it is a copy"
        )
    if differs := sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name)):
        name = differs[0]
        raise ModelNotReadable(
            f"{KEY}.path: {section.path!r}: {name} has the shape {given.get(name, 'none')} there and "
            f"{own.get(name, 'none')} in a head of its config.json"
        )
    return found


def _of_directory(section: DraftSection, policy: ModelSection) -> Tensors:
    """EAGLE-3's layer has one of two names."""
    at = draft_section(section, policy)
    try:
        with reading(at):
            files = TensorFiles(files_of(at, cached=False))
    except ModelNotReadable as error:
        raise ModelNotReadable(str(error).replace("model.path", f"{KEY}.path", 1)) from error
    names = {name.replace("layers.0.", "midlayer.", 1): name for name in files.names() if name != "t2d"}
    return Renamed(files, names)


def drawn(head: DraftHead, seed: int) -> dict[str, Tensor]:
    """Weights of a new head, as transformers draws a Llama's."""
    generator = torch.Generator("cpu").manual_seed(seed)
    deviation = float(getattr(head.config, "initializer_range", 0.02))
    found: dict[str, Tensor] = {}
    for name, own in head.state_dict().items():
        if own.dim() > 1:
            found[name] = torch.empty(own.shape, device="cpu").normal_(0, deviation, generator=generator)
        else:
            found[name] = torch.zeros(own.shape) if name.endswith(".bias") else torch.ones(own.shape)
    return found


def save_draft(
    directory: Path, section: DraftSection, policy: ModelSection, tensors: Mapping[str, Tensor]
) -> None:
    """Writes a head, by the names of its weights, into a new directory that vLLM and SpecForge read."""
    dtype = DTYPES[policy.dtype]
    config: Any = draft_config(section, policy)
    whole = {
        name.removeprefix(DRAFT): (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    if (d2t_W := whole.get("d2t")) is not None:
        known_V = torch.zeros(config.vocab_size, dtype=torch.bool)
        known_V[torch.arange(len(d2t_W)) + d2t_W] = True
        whole["t2d"] = known_V
    directory.mkdir()
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    config.architectures, config.dtype = [CLASSES[0]], dtype
    text = json.loads(config.to_json_string(use_diff=False))
    (directory / "config.json").write_text(json.dumps(text, indent=2, sort_keys=True) + "\n")
    sync_directory(directory)
