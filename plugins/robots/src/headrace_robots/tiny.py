"""Tiny vision-language-action policies with random weights, for runs that see pixels on a CPU.

`python -m headrace_robots.tiny OUT_DIR --kind openvla_oft --actions 4`: a directory as `model.path`
reads it, with a tokenizer of single characters. Their parts are those of the published models, but few and small.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.presets.tiny import character_tokenizer

from headrace_robots.policies.directory import CONFIG, policy_config, save_policy
from headrace_robots.policies.openvla.model import SPACE
from headrace_robots.policies.pi.words import StateWords
from headrace_robots.policies.scaling import ActionBounds

STATEFUL = ("pi0", "pi05", "smolvla", "groot", "wall", "diffusion")
"""Kinds that read a state; the others do where they are given one."""
KINDS = ("openvla", "openvla_oft", *STATEFUL, "act")
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n" + SPACE
BINS, PADDING, PATCH, IMAGE = 256, 64, 14, 56
WORDS = len(CHARACTERS) + 3
IMAGE_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
MORE_TOKENS = ("<|propri|>", "<|action|>", "<|im_start|>", "<|im_end|>")
"""Ids from WORDS on; the second of wall alone."""
QWEN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endfor %}"
)
_FLOW = {"steps": 3, "noise": "learned", "drawn": "all", "width": (0.2, 0.4)}


def tiny_fields(
    kind: str, actions: int, *, cameras: Sequence[str] = ("image",), state: int = 0, chunk_length: int = 1
) -> dict[str, Any]:
    """A policy's configuration: `actions` numbers of -1 to 1, `state` numbers that it reads (0: none)."""
    fields: dict[str, Any] = {"kind": kind, "cameras": list(cameras), "chunk_length": chunk_length}
    fields["bounds"] = _unit(actions)
    if kind in ("pi0", "pi05"):
        words = StateWords.of(character_tokenizer(CHARACTERS)).model_dump() if kind == "pi05" else None
        return {**fields, "state": _unit(state), "words": words, **_pi(actions, state, chunk_length)}
    if kind == "smolvla":
        return {**fields, "state": _unit(state), **_smolvla(actions, state, chunk_length)}
    if kind == "groot":
        return {**fields, "state": _unit(state), **_groot(actions, state, chunk_length)}
    if kind == "wall":
        return {**fields, "state": _unit(state), **_wall(actions, state, chunk_length)}
    if kind == "diffusion":
        return {**fields, "state": _unit(state), **_diffusion(chunk_length)}
    if kind == "act":
        return {**fields, "state": _unit(state), "horizon": chunk_length, **_act()}
    return {**fields, "proprio": _unit(state) if state else None, **_openvla()}


def write_tiny_robot(directory: Path, fields: dict[str, Any], *, seed: int = 0) -> None:
    """Writes the policy with random weights. Raises ModelNotReadable for fields that fit no policy."""
    policy = policy_config(fields).build(seed)
    with TemporaryDirectory() as beside:
        tiny_tokenizer(policy.config.kind).save_pretrained(beside)
        save_policy(policy, directory, tokenizer=beside if policy.config.reads else None)


def tiny_tokenizer(kind: str) -> Any:
    """A tokenizer of single characters; of groot and wall with the ids of images behind them, of groot with a template
    of Qwen's kind."""
    tokenizer: Any = character_tokenizer(CHARACTERS)
    if kind in ("groot", "wall"):
        tokenizer.add_tokens([*IMAGE_TOKENS, *(MORE_TOKENS if kind == "wall" else ())], special_tokens=True)
    if kind == "groot":
        tokenizer.chat_template = QWEN_TEMPLATE
    return tokenizer


def _unit(size: int) -> dict[str, Any] | None:
    return ActionBounds.unit(size).model_dump() if size else None


def _openvla() -> dict[str, Any]:
    eye = {"width": 32, "depth": 2, "heads": 2, "mlp_width": 64, "image_size": IMAGE, "patch_size": PATCH}
    text = {
        "vocab_size": WORDS + BINS + PADDING,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
    }
    return {"featurizers": [eye, eye], "text": text, "bins": BINS, "action_vocabulary": WORDS + BINS}


def _pi(actions: int, state: int, chunk_length: int) -> dict[str, Any]:
    text = {
        "model_type": "gemma",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": WORDS + 1,
    }
    eye = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": IMAGE,
        "patch_size": PATCH,
        "vision_use_head": False,
    }
    sight = {"model_type": "paligemma", "text_config": text, "vision_config": eye, "projection_dim": 64}
    model = {
        "vlm_config": {**sight, "image_token_id": WORDS},
        "dit_config": {**text, "hidden_size": 32, "intermediate_size": 64},
        "chunk_size": chunk_length,
        "max_state_dim": state,
        "max_action_dim": actions,
    }
    return {"model": model, "flow": _FLOW}


def _smolvla(actions: int, state: int, horizon: int) -> dict[str, Any]:
    text = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": WORDS,
        "pad_token_id": 0,
    }
    eye = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": IMAGE,
        "patch_size": PATCH,
    }
    sizes = {"horizon": horizon, "action_width": actions, "state_width": state}
    return {"vlm": {"text_config": text, "vision_config": eye, "scale_factor": 2}, **sizes, "flow": _FLOW}


def _groot(actions: int, state: int, horizon: int) -> dict[str, Any]:
    text = {
        "model_type": "qwen3_vl_text",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": WORDS + len(IMAGE_TOKENS),
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2]},
    }
    eye = {
        "model_type": "qwen3_vl_vision",
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "num_position_embeddings": 16,
        "out_hidden_size": 48,
        "patch_size": PATCH,
        "deepstack_visual_indexes": [0],
    }
    return {
        "vlm": {"text_config": text, "vision_config": eye, "image_token_id": WORDS},
        "pictures": {"height": IMAGE, "width": IMAGE, "least": PATCH**2},
        "horizon": horizon,
        "places": horizon,
        "action_width": actions,
        "state_width": state,
        "hidden": 32,
        "layers": 4,
        "heads": 2,
        "head_size": 16,
        "mixers": 1,
        "mixer_heads": 2,
        "flow": _FLOW,
    }


def _wall(actions: int, state: int, horizon: int) -> dict[str, Any]:
    text = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "vocab_size": WORDS + len(IMAGE_TOKENS) + len(MORE_TOKENS),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]},
    }
    eye = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 48,
        "patch_size": PATCH,
        "window_size": 4 * PATCH,
        "fullatt_block_indexes": [1],
    }
    return {
        "vlm": {"text_config": text, "vision_config": eye, "image_token_id": WORDS},
        "pictures": {"side": 2 * IMAGE},
        "state_token": WORDS + len(IMAGE_TOKENS),
        "expert_width": 32,
        "horizon": horizon,
        "action_width": actions,
        "state_width": state,
        "flow": _FLOW,
    }


def _act() -> dict[str, Any]:
    sizes = {"dim_model": 32, "n_heads": 2, "dim_feedforward": 64, "n_encoder_layers": 1, "latent_dim": 4}
    return {**sizes, "height": 64, "width": 64, "n_vae_encoder_layers": 1}


def _diffusion(chunk_length: int) -> dict[str, Any]:
    sizes = {"down_dims": (16, 32), "n_groups": 4, "kernel_size": 3, "diffusion_step_embed_dim": 16}
    seen = {"height": 64, "width": 64, "spatial_softmax_num_keypoints": 8}
    return {
        **sizes,
        **seen,
        "horizon": chunk_length + chunk_length % 2,
        "denoising": {"steps": 4, "least_width": 0.2},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="headrace_robots.tiny", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="OUT_DIR")
    parser.add_argument("--kind", choices=KINDS, default="openvla_oft")
    parser.add_argument("--actions", type=int, required=True, help="numbers of an action")
    parser.add_argument(
        "--state",
        type=int,
        default=0,
        help="numbers of the state; pi0, pi05, smolvla, groot, wall, diffusion need one",
    )
    parser.add_argument("--cameras", nargs="+", default=["image"], help="names of the cameras")
    parser.add_argument("--chunk-length", type=int, default=1, help="actions drawn at once (all but openvla)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    asked = parser.parse_args(arguments)
    if asked.actions < 1 or asked.chunk_length < 1 or asked.state < 0:
        parser.error("--actions and --chunk-length are 1 or more, --state is 0 or more")
    if asked.kind in STATEFUL and not asked.state:
        parser.error(f"{asked.kind} reads a state: give --state, how many numbers it has")
    chosen = {"cameras": asked.cameras, "state": asked.state, "chunk_length": asked.chunk_length}
    if (asked.directory / CONFIG).exists():
        parser.error(f"{asked.directory} holds a policy already: remove it, or name another directory")
    try:
        write_tiny_robot(asked.directory, tiny_fields(asked.kind, asked.actions, **chosen), seed=asked.seed)
    except ModelNotReadable as error:
        parser.error(str(error))
    print(asked.directory)


if __name__ == "__main__":
    main()
