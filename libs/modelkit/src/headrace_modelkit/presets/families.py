"""Tiny models with random weights of many families that transformers has: what loading, attention and heads are tried
on. Their vocabulary is that of the tiny model's tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from headrace_modelkit.loading import save_model
from headrace_modelkit.presets.tiny import CHARACTERS, character_tokenizer
from headrace_modelkit.weights import saved, state_tensors

_Configs: Any = CONFIG_MAPPING
_Models: Any = AutoModelForCausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": len(CHARACTERS) + 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "initializer_range": 0.3,
}
_PLAIN: dict[str, Any] = {}
_SCALED = {"logits_scaling": 4.0}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_GROUPED = _EXPERTS | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
_INDEX = {"index_topk": 32, "index_n_heads": 2, "index_head_dim": 8}
"""More than tests have tokens: among the scores of random weights are many equal ones, of which any is taken."""
_WINDOW = {"sliding_window": 8}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
_GEMMA = _WINDOW | {
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": SHAPE["vocab_size"],
    "global_head_dim": 8,
}
_SHARING = _GEMMA | {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral3", "phi3", "smollm3", "olmo2", "glm4", "seed_oss"), _PLAIN
    ),
    **dict.fromkeys(("qwen2", "qwen3", "gpt2", "opt", "stablelm", "nemotron", "doge"), _PLAIN),
    **dict.fromkeys(("granite", "hyperclovax"), _SCALED),
    "cohere": {"logit_scale": 0.3},
    **dict.fromkeys(("minimax_m2", "qwen2_moe", "qwen3_moe", "mixtral", "afmoe"), _EXPERTS),
    "granitemoe": _EXPERTS | _SCALED,
    "ernie4_5_moe": _EXPERTS | {"moe_num_experts": 4, "moe_k": 2},
    "glm4_moe": _GROUPED,
    **dict.fromkeys(("glm4_moe_lite", "deepseek_v3"), _GROUPED | _LATENT),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _GROUPED | _LATENT | _INDEX),
    "deepseek_v4": _EXPERTS
    | {"qk_rope_head_dim": 4, "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "hc_mult": 2}
    | {"index_n_heads": 2, "index_head_dim": 8},
    "gpt_oss": _EXPERTS | _WINDOW,
    **dict.fromkeys(("gemma2", "gemma3_text", "olmo3", "ministral"), _WINDOW),
    "gemma3n_text": _SHARING
    | {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2},
    "gemma4_text": _SHARING,
    "gemma4_text+experts": _GEMMA
    | _EXPERTS
    | {"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0},
    "exaone4": _WINDOW | {"sliding_window_pattern": 2},
    "mimo_v2_flash": _EXPERTS
    | _WINDOW
    | {"v_head_dim": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
    | {"swa_head_dim": 8, "swa_v_head_dim": 4},
    "llama4_text": _EXPERTS | {"attention_chunk_size": 8},
    **dict.fromkeys(("qwen3_5_text", "olmo_hybrid"), _DELTA),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), _DELTA | _EXPERTS),
    "kimi_linear": _EXPERTS
    | _LATENT
    | {"layer_types": _DELTA["layer_types"], "mlp_layer_types": ["dense", "sparse"]}
    | {"linear_head_dim": 8, "linear_num_heads": 2},
    "nemotron_h": _EXPERTS
    | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "moe", "mlp"]}
    | {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1}
    | {"moe_shared_expert_intermediate_size": 16},
    "granitemoehybrid": _EXPERTS
    | _MAMBA
    | {"logits_scaling": 4.0, "layer_types": _DELTA["layer_types"], "shared_intermediate_size": 16},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "jamba": _EXPERTS
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}
    | {"use_mamba_kernels": False},
    "falcon_h1": _MAMBA | {"mamba_d_head": 8, "mamba_d_ssm": 32, "lm_head_multiplier": 0.3},
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"],
        "attention_window_size": 8,
        "lru_width": 32,
    }
    | {"logits_soft_cap": 3.0},
    **dict.fromkeys(("lfm2", "lfm3"), _CONVOLUTION),
    "lfm2_moe": _CONVOLUTION | _EXPERTS | {"num_dense_layers": 1},
    "minimax": _EXPERTS | {"layer_types": ["full_attention", "linear_attention"]},
}
"""By `model_type`, and `+` what a variant has: fields of its configuration."""


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """The configuration; `overrides` are fields of it."""
    made: PreTrainedConfig = _Configs[family.partition("+")[0]](**{**SHAPE, **FAMILIES[family], **overrides})
    return made


def class_of(family: str) -> str:
    """What transformers calls its causal language model, and config.json names."""
    name: str = _Models._model_mapping[type(tiny_config(family))].__name__
    return name


def tiny_of(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The untrained model in fp32; `overrides` are fields of its configuration."""
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = _Models.from_config(config).eval()
    return model


def write_family(directory: Path, family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Writes the model, and the tiny one's tokenizer beside it."""
    model = tiny_of(family, seed=seed, **overrides)
    save_model(model, character_tokenizer(), directory)
    return model


def write_predicting(directory: Path, family: str, **overrides: Any) -> dict[str, torch.Tensor]:
    """As `write_family`, with a layer that predicts one token more: of DeepSeek's form behind the others, of Qwen's
    under `mtp.`. Returns the layer's tensors.
    """
    layers, aside = SHAPE["num_hidden_layers"], family.startswith("qwen3")
    more = {} if aside else {"num_nextn_predict_layers": 1}
    write_family(directory, family, **more, **overrides)
    deeper = tiny_of(family, seed=1, **({} if aside else {"num_hidden_layers": layers + 1}), **overrides)
    file = directory / "model.safetensors"
    whole, name = load_file(file), f"model.layers.{layers - 1 if aside else layers}."
    before = "mtp." if aside else name
    own = {
        key.replace(name, "mtp.layers.0." if aside else name, 1): value.detach()
        for key, value in saved(deeper, dict(state_tensors(deeper))).items()
        if key.startswith(name)
    }
    width = SHAPE["hidden_size"]
    drawn = torch.Generator().manual_seed(2)
    asides = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    norms = asides if aside else ("enorm", "hnorm", "shared_head.norm")
    own |= {f"{before}{key}.weight": torch.ones(width) for key in norms}
    fuses = f"{before}{'fc' if aside else 'eh_proj'}.weight"
    own[fuses] = 0.3 * torch.randn(width, 2 * width, generator=drawn)
    if not aside:
        embedding = whole["model.embed_tokens.weight"]
        own[f"{name}embed_tokens.weight"] = embedding.clone()
        own[f"{name}shared_head.head.weight"] = whole.get("lm_head.weight", embedding).clone()
    save_file(
        {**whole, **{key: value.contiguous() for key, value in own.items()}}, file, metadata={"format": "pt"}
    )
    return own
