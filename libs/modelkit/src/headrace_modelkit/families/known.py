"""What is known of each family that a tiny model of is tried: the data of its tests, and of docs/models.md.

A family that is not here is decided by the trials at load. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """A family, by what the trials find of it."""

    models: str
    """What people call it."""
    shares: bool = True
    """Whether the trainer shares a group's prompt and packs rows; otherwise every answer gets a row of its own."""
    why_apart: str = ""
    """Why it does not."""
    generates: str = ""
    """Why the built-in engine refuses it; empty: it generates."""
    continues: bool = True
    """Whether the built-in engine computes a next turn behind what it kept of the ones before."""
    parser: str = ""
    """The form of `tool_calls` that reads its calls."""
    no_parser: str = "–"
    """Why there is none, where that is known."""
    vllm: bool = True
    """Whether vLLM has its class in the release that is pinned."""
    sglang: bool = True
    """Whether SGLang has."""
    mtp: str = ""
    """`read`: a layer of its checkpoints that predicts one token more can learn and draft; else why not, where
    checkpoints have some.
    """
    undivided: str = ""
    """Why ranks cannot divide its rows, where it shares and has no experts."""
    note: str = ""


_STATES = "layers with a state of their own"
_SINKS = "eager attention with sinks"
_INDEXER = "an indexer chooses tokens"
_SPECIAL = "its marks are special tokens"
_OTHER_MTP = "another form"
_UNKEPT = "states outside of transformers' cache"

KNOWN: dict[str, Known] = {
    "qwen3_5_text": Known("Qwen3.5 and later", False, _STATES, parser="qwen3_coder", mtp="read"),
    "qwen3_5_moe_text": Known("Qwen3.5 with experts", False, _STATES, parser="qwen3_coder", mtp="read"),
    "qwen3_next": Known("Qwen3-Next", False, _STATES, parser="hermes", mtp="read"),
    "qwen3": Known("Qwen3", parser="hermes"),
    "qwen3_moe": Known("Qwen3 with experts", parser="hermes"),
    "qwen2": Known("Qwen2, 2.5", parser="hermes"),
    "qwen2_moe": Known("Qwen1.5-MoE, Qwen2-MoE", parser="hermes"),
    "gpt_oss": Known(
        "gpt-oss",
        False,
        _SINKS,
        no_parser="its channels are special tokens (harmony)",
        note="checkpoints of MXFP4 are read",
    ),
    "gemma2": Known("Gemma 2", False, "eager attention with capped scores"),
    "gemma3_text": Known("Gemma 3"),
    "gemma3n_text": Known("Gemma 3n", note="the last layers share keys"),
    "gemma4_text": Known("Gemma 4 E2B, E4B", no_parser=_SPECIAL, note="the last layers share keys"),
    "gemma4_text+experts": Known(
        "Gemma 4 26B-A4B",
        no_parser=_SPECIAL,
        note="its routers scale each expert, so that routes are not replayed",
    ),
    "deepseek_v3": Known(
        "DeepSeek V3, R1; Kimi K2",
        parser="deepseek",
        mtp="read",
        note="checkpoints of fp8 are read; `kimi_k2` needs `model.trust_remote_code`, its calls have special tokens",
    ),
    "deepseek_v32": Known("DeepSeek V3.2", False, _INDEXER, _INDEXER, parser="deepseek", mtp=_INDEXER),
    "glm_moe_dsa": Known("GLM-5", False, _INDEXER, _INDEXER, parser="glm", mtp=_INDEXER),
    "deepseek_v4": Known(
        "DeepSeek V4",
        False,
        "compressed attention",
        _INDEXER,
        parser="deepseek",
        mtp="its attention compresses",
        note="checkpoints of fp8 and FP4 are read; hash routers are not replayed",
    ),
    "glm4": Known("GLM-4", parser="glm"),
    "glm4_moe": Known("GLM-4.5 to 4.7", parser="glm", mtp="read"),
    "glm4_moe_lite": Known("GLM-4.7-Flash", parser="glm", mtp="read"),
    "nemotron_h": Known("Nemotron-H, Nemotron 3", False, _STATES, parser="qwen3_coder", mtp=_OTHER_MTP),
    "nemotron": Known("Nemotron-4, Minitron", False, "its layers pass no keywords on", sglang=False),
    "llama": Known("Llama 2 and 3, SmolLM2", parser="llama3"),
    "llama4_text": Known(
        "Llama 4",
        False,
        "chunks",
        parser="pythonic",
        note="its experts are computed by its class: neither divided nor replayed",
    ),
    "mistral": Known("Mistral", parser="mistral"),
    "ministral": Known("Ministral 8B", parser="mistral", vllm=False, sglang=False),
    "ministral3": Known("Ministral 3, Mistral 3", parser="mistral"),
    "mixtral": Known("Mixtral", parser="mistral"),
    "smollm3": Known("SmolLM3", parser="hermes", sglang=False),
    "olmo2": Known("OLMo 2"),
    "olmo3": Known("OLMo 3", parser="pythonic", sglang=False),
    "olmo_hybrid": Known("OLMo Hybrid", False, _STATES, sglang=False, mtp=_OTHER_MTP),
    "granite": Known("Granite 3", no_parser=_SPECIAL),
    "granitemoe": Known("Granite MoE", no_parser=_SPECIAL),
    "granitemoehybrid": Known("Granite 4", False, _STATES, no_parser=_SPECIAL),
    "phi3": Known("Phi-3, Phi-4"),
    "seed_oss": Known("Seed-OSS", sglang=False),
    "minimax_m2": Known("MiniMax M2", parser="minimax"),
    "minimax": Known("MiniMax-Text-01", False, _STATES, _UNKEPT, vllm=False, sglang=False),
    "ernie4_5_moe": Known("Ernie 4.5", mtp=_OTHER_MTP),
    "afmoe": Known("AFMoE (Trinity)"),
    "mimo_v2_flash": Known("MiMo-V2-Flash", False, _SINKS, mtp="three layers of another form"),
    "kimi_linear": Known("Kimi Linear", False, _STATES, no_parser=_SPECIAL),
    "bamba": Known("Bamba", False, _STATES, vllm=False, sglang=False),
    "jamba": Known("Jamba", False, _STATES, continues=False, sglang=False),
    "falcon_h1": Known("Falcon-H1", False, _STATES),
    "recurrent_gemma": Known("RecurrentGemma", False, _STATES, _UNKEPT, vllm=False, sglang=False),
    "lfm2": Known("LFM2", False, "convolutions", parser="pythonic"),
    "lfm2_moe": Known("LFM2 with experts", False, "convolutions", parser="pythonic"),
    "lfm3": Known("LFM3", False, "convolutions", vllm=False, sglang=False),
    "exaone4": Known("EXAONE 4"),
    "hyperclovax": Known("HyperCLOVA X", sglang=False),
    "cohere": Known("Command R"),
    "stablelm": Known("StableLM", undivided="attention of its own"),
    "gpt2": Known("GPT-2", note="no LoRA: its layers are `Conv1D`, none is linear"),
    "opt": Known("OPT"),
    "doge": Known("Doge", False, "a mask of its own", vllm=False, sglang=False),
}
"""By the names of `presets.families.FAMILIES`."""
