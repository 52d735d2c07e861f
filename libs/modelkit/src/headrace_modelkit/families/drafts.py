"""Heads that draft tokens for an engine: EAGLE-3 (Li et al. 2025, arXiv 2503.01840), in the form that vLLM and
SpecForge read and write.

At position t the head reads three hidden states of the model behind token t, and the embedding of token t + 1; it says
what token t + 2 may be. Behind that it goes on from its own hidden state. Knows no engine and no loss.

Shapes: S sequences, T positions, N rows; D hidden, F = 3 D; H heads, G key heads, E head dimension; V words of the
model, W of the head.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.learning import DraftSection
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from typing_extensions import override

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import (
    DTYPES,
    body_of,
    load_architecture,
    location,
    reading,
    sync_directory,
)
from headrace_modelkit.logprobs import Head, chunk_elements
from headrace_modelkit.model_files import files_of, parameters_on_meta
from headrace_modelkit.tensor_files import Box, TensorFiles, Tensors, TensorsInMemory

DRAFT = "draft."
"""What names of a head's weights begin with, among those of the model that it is of."""
KEY = "trainer.draft"
CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
IDS = "eagle_aux_hidden_state_layer_ids"
_OTHER_FORMS = ("fc_norm", "norm_before_fc", "norm_output", "parallel_drafting", "target_hidden_size")
"""Keys of heads that compute something else."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(N, T, H E) of queries (N, H, T, E), keys and values (N, G, T, E)."""


class DraftAttention(nn.Module):
    """Attention that reads an embedding and a hidden state side by side."""

    is_causal = True

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        untyped: Any = config
        self.config, self.head_dim = config, int(untyped.head_dim)
        heads, key_heads = config.num_attention_heads, int(untyped.num_key_value_heads)
        self.num_key_value_groups, self.scaling = heads // key_heads, self.head_dim**-0.5
        width, bias = 2 * config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, key_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, key_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=bias)

    def forward(self, given: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """(N, T, D) of (N, T, 2 D)."""
        query, key, value = (
            layer(given).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        found: Tensor = self.o_proj(attend(query, key, value))
        return found


class DraftLayer(nn.Module):
    """The head's one layer, which the model's files call `midlayer`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        made: Any = LlamaMLP
        self.mlp = made(config)
        norms = (LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norms
        self.norm_before_residual = bool(getattr(config, "norm_before_residual", False))

    def forward(
        self, embeds: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """(N, T, D) of an embedding and a hidden state (N, T, D) each."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        given = torch.cat([self.input_layernorm(embeds), normed], -1)
        hidden = residual + self.self_attn(given, rotary, attend)
        found: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return found


class Eagle3(nn.Module):
    """A head; its parameters have the names of its files."""

    d2t: Tensor | None
    """(W,) what is added to a word's number among the head's to get the model's; None where the head knows all."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        untyped: Any = config
        self.config, self.layers = config, tuple(untyped.eagle_config[IDS])
        """Of its hidden states: 0 is the embedding, n what layer n gives, counted from 1."""
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        words = int(untyped.draft_vocab_size)
        self.lm_head = nn.Linear(config.hidden_size, words, bias=False)
        fewer = words < config.vocab_size
        self.register_buffer("d2t", torch.zeros(words, dtype=torch.long, device="cpu") if fewer else None)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """(N, T, D) what `scores` and the next step read, of token embeddings, and of `fc`'s or an earlier step's."""
        found: Tensor = self.midlayer(embeds, hidden, self.rotary(hidden, positions), attend)
        return found

    def scores(self, hidden_ND: Tensor) -> Tensor:
        """fp32 (N, W) logits of the head's words."""
        return Head(self.lm_head.weight, None, 1.0, None).logits(self.norm(hidden_ND))

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """fp32 (N, V) logits of the model's words; -inf for one that the head does not know."""
        scores_NW = self.scores(hidden_ND)
        if self.d2t is None:
            return scores_NW
        whole_NV = scores_NW.new_full((len(scores_NW), self.config.vocab_size), -math.inf)
        return whole_NV.index_copy_(1, self.words(), scores_NW)

    def words(self) -> Tensor:
        """(W,) the numbers that the model gives the head's words."""
        words_W = torch.arange(self.lm_head.weight.shape[0], device=self.lm_head.weight.device)
        return words_W if self.d2t is None else words_W + self.d2t

    def unrolled(self, features_STF: Tensor, embeds_STD: Tensor, steps: int) -> Iterator[Tensor]:
        """(S, T, D) of each step: at position t, step k has drafted k tokens behind token t + 1 from its own hidden
        states (training-time test), and the next token is t + 2 + k. `embeds_STD`: of token t + 1 at t.

        As an engine drafts: what is behind t is read from the model up to t, and from the head itself beyond.
        """
        hidden_STD = self.fc(features_STF)
        positions_T = torch.arange(hidden_STD.shape[1], device=hidden_STD.device)[None]
        keys, values = list[Tensor](), list[Tensor]()

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys.append(key)
            values.append(value)
            return attend_along(query, keys, values).transpose(1, 2).flatten(2)

        for step in range(steps):
            hidden_STD = self(embeds_STD, hidden_STD, positions_T + step, attend)
            yield hidden_STD
            embeds_STD = F.pad(embeds_STD[:, 1:], (0, 0, 0, 1))


def attend_along(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """(S, H, T, E): position t attends to the first keys up to t, and of later ones to its own."""
    if len(keys) == 1:
        return F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True, enable_gqa=True)
    groups = query.shape[1] // keys[0].shape[1]
    first_key, first_value = (each[0].repeat_interleave(groups, 1) for each in (keys, values))
    # (S, H, T, steps, E)
    own_key, own_value = (torch.stack(each[1:], -2).repeat_interleave(groups, 1) for each in (keys, values))
    count, heads, length, _ = query.shape
    block = max(1, chunk_elements(query.device) // (count * heads * length))
    parts = [slice(first, min(first + block, length)) for first in range(0, length, block)]

    def attended(part: slice) -> Tensor:
        own, places = query[:, :, part], torch.arange(length, device=query.device)
        scores = own @ first_key.transpose(-1, -2)
        scores = scores.masked_fill(places > places[part, None], -math.inf)
        beside = (own[..., None, :] * own_key[:, :, part]).sum(-1)
        both = torch.cat([scores, beside], -1).float() * query.shape[-1] ** -0.5
        weights = both.softmax(-1).to(query.dtype)
        of_own: Tensor = (weights[..., length:, None] * own_value[:, :, part]).sum(-2)
        return torch.matmul(weights[..., :length], first_value) + of_own

    if len(parts) == 1:
        return attended(parts[0])
    found: list[Any] = [checkpoint(attended, part, use_reentrant=False) for part in parts]
    return torch.cat(found, 2)


class Features:
    """In its body, takes from a forward of `body` the hidden states that a head reads."""

    def __init__(self, body: nn.Module, layers: tuple[int, ...]) -> None:
        untyped: Any = body
        self._modules, self._layers = untyped.layers, layers
        self._found: dict[int, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for at in self._layers:
            self._hooks.append(self._hook(at))
        return self

    def _hook(self, at: int) -> Any:
        def given(_: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            self._found[at] = args[0] if args else named["hidden_states"]

        def made(_: nn.Module, __: Any, output: Any) -> None:
            self._found[at] = output if isinstance(output, Tensor) else output[0]

        if at == 0:
            return self._modules[0].register_forward_pre_hook(given, with_kwargs=True)
        return self._modules[at - 1].register_forward_hook(made)

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def taken(self) -> Tensor:
        """(…, F)."""
        return torch.cat([self._found[at] for at in self._layers], -1)


def add_draft(model: PreTrainedModel, section: DraftSection | None, policy: ModelSection) -> Eagle3 | None:
    """Puts a head beside the layers of `model`, whose tensors are then among the model's, as DRAFT and their names;
    values undefined. None for no section. Raises ModelNotReadable.
    """
    if section is None:
        return None
    if not hasattr(body_of(model), "layers"):
        reason = (
            f"{KEY}: {model.config.model_type} has no list of layers that a head could read; leave it out"
        )
        raise ModelNotReadable(reason)
    first = next(model.parameters())
    with parameters_on_meta() if first.device.type == "meta" else nullcontext():
        head = Eagle3(draft_config(section, policy)).eval()
    for parameter in head.parameters():
        parameter.data = parameter.data.to(model.dtype)
    model.draft = head
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


def _paths(section: DraftSection, policy: ModelSection) -> list[Path]:
    at = draft_section(section, policy)
    try:
        with reading(at):
            return files_of(at, cached=False)
    except ModelNotReadable as error:
        raise ModelNotReadable(str(error).replace("model.path", f"{KEY}.path", 1)) from error


def open_draft(section: DraftSection, policy: ModelSection, head: Eagle3, seed: int) -> Tensors:
    """A head's weights by their names in `head`: of its files, or drawn. Raises ModelNotReadable, naming a tensor."""
    if section.path is None:
        return TensorsInMemory(drawn(head, seed))
    found = _Renamed(_paths(section, policy))
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


class _Renamed(Tensors):
    """The files of a head, whose layer has one of two names."""

    def __init__(self, files: list[Path]) -> None:
        self._files = TensorFiles(files)
        self._names = {
            name.replace("layers.0.", "midlayer.", 1): name for name in self._files.names() if name != "t2d"
        }

    @override
    def names(self) -> list[str]:
        return list(self._names)

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.shape(self._names[name])

    @override
    def read(self, name: str, box: Box | None = None) -> Tensor:
        return self._files.read(self._names[name], box)


def drawn(head: Eagle3, seed: int) -> dict[str, Tensor]:
    """Weights of a new head, as transformers draws a Llama's."""
    generator = torch.Generator("cpu").manual_seed(seed)
    deviation = float(head.config.initializer_range)
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
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
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
