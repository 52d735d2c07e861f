"""LeRobot's side of a comparison: `python lerobot_side.py FOLDER`, in the environment of `ci/lerobot.sh`.

FOLDER/asked.json names the family, fields of its configuration, features, statistics and tasks; seen.safetensors has
states, pictures and noise. Writes FOLDER/checkpoint, as the hub has one, and FOLDER/said.safetensors: the actions that
LeRobot's own processors and policy choose. With FOLDER/exported it chooses them by that checkpoint too.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors
from safetensors.torch import load_file, save_file


def features(asked):
    kinds = {"state": FeatureType.STATE, "action": FeatureType.ACTION, "visual": FeatureType.VISUAL}
    return {name: PolicyFeature(kinds[kind], tuple(shape)) for name, (kind, shape) in asked.items()}


def made(asked):
    """The policy with random weights, all of them of some size: published ones have no zeros to hide behind."""
    norms = {name: NormalizationMode[mode] for name, mode in asked["normalization"].items()}
    config = make_policy_config(
        asked["family"],
        input_features=features(asked["inputs"]),
        output_features=features(asked["outputs"]),
        normalization_mapping=norms,
        device="cpu",
        push_to_hub=False,
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in asked["fields"].items()
        },
    )
    torch.manual_seed(0)
    policy = get_policy_class(asked["family"])(config).eval()
    with torch.no_grad():
        for name, value in policy.state_dict().items():
            if value.is_floating_point() and not name.endswith(("inv_freq", "pos_grid")):
                drawn = torch.randn_like(value) * asked["width"]
                value.add_(drawn.abs() if name.endswith("running_var") else drawn)
    return policy, config


def finish_base(folder):
    """The processor of a SmolVLM beside its tokenizer and configuration."""
    from transformers import (
        PreTrainedTokenizerFast,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )

    names = {
        "fake_image": "<fake>",
        "image": "<image>",
        "global_image": "<global>",
        "end_of_utterance": "<end>",
    }
    own = {f"{name}_token": text for name, text in names.items()}
    file = str(folder / "tokenizer.json")
    words = PreTrainedTokenizerFast(tokenizer_file=file, pad_token="<pad>", extra_special_tokens=own)
    SmolVLMProcessor(SmolVLMImageProcessor(), words, SmolVLMVideoProcessor()).save_pretrained(folder)


def shrink_pi(family, sizes, base):
    """Its sizes are written into the code, and so is the name of its tokenizer."""
    from transformers import PreTrainedTokenizerFast

    module = import_module(f"lerobot.policies.{family}.modeling_{family}")
    tower, expert, words = (
        module.PaliGemmaForConditionalGenerationWithPiGemma,
        module.PiGemmaForCausalLM,
        sizes["vocab_size"],
    )

    def small_tower(config):
        text, eye = config.text_config, config.vision_config
        config._vocab_size = config.image_token_index = text.vocab_size = words
        eye.projection_dim = config.projection_dim = text.hidden_size
        for name, value in sizes["vision"].items():
            setattr(eye, name, value)
        return tower(config=config)

    def small_expert(config):
        config.vocab_size = words
        return expert(config=config)

    module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM = small_tower, small_expert
    module.get_gemma_config = lambda variant: SimpleNamespace(**sizes[variant])
    step = import_module("lerobot.processor.tokenizer_processor")
    step.AutoTokenizer = SimpleNamespace(
        from_pretrained=lambda *_, **__: PreTrainedTokenizerFast(
            tokenizer_file=str(Path(base) / "tokenizer.json"), pad_token="<pad>"
        )
    )


def begin_groot(asked, folder):
    """GR00T is fine-tuned from a checkpoint of NVIDIA's, which is a directory here; its language model's is `base`."""
    module = import_module("lerobot.policies.groot.groot_n1_7")
    import_module("lerobot.policies.groot.processor_groot").GROOT_N1_7_BACKBONE_MODEL = str(folder / "base")
    raw = folder / "raw"
    if not raw.exists():
        config = module.GR00TN17Config(**asked["sizes"], model_name=str(folder / "base"))
        torch.manual_seed(1)
        model = module.GR00TN17(config, load_backbone_weights=False)
        with torch.no_grad():
            for value in model.parameters():
                value.add_(torch.randn_like(value) * asked["width"])
        model.save_pretrained(raw, max_shard_size="100KB")
        for name, content in asked["beside"].items():
            (raw / name).write_text(json.dumps(content))
    return raw


def raw_groot(asked, folder):
    """A policy and its processors, of NVIDIA's checkpoint as it is."""
    config = configured(asked, base_model_path=str(folder))
    return get_policy_class("groot")(config).eval(), make_pre_post_processors(
        config, pretrained_path=str(folder)
    )


def begin_wall(asked, base):
    """WALL-OSS is fine-tuned from X-Square's directory, which `base` is; all of it computes in fp32 here."""
    from transformers import AutoTokenizer

    module = import_module("lerobot.policies.wall_x.modeling_wall_x")
    drawn = {"randn": lambda *given, **how: torch.randn(*given, **how)}
    module.torch = SimpleNamespace(**{**vars(torch), "bfloat16": torch.float32, **drawn})
    if not (base / "model.safetensors").exists():
        config = module.Qwen2_5_VLConfig.from_pretrained(base)
        torch.manual_seed(1)
        words = AutoTokenizer.from_pretrained(base)
        model = module.Qwen2_5_VLMoEForAction(config, processor=SimpleNamespace(tokenizer=words))
        model.resize_token_embeddings(len(words))
        with torch.no_grad():
            for value in model.parameters():
                value.add_(torch.randn_like(value) * asked["width"])
        weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
        save_file(weights, base / "model.safetensors")


def configured(asked, **fields):
    """A configuration of what LeRobot has no checkpoint of its own of."""
    return make_policy_config(
        asked["family"],
        input_features=features(asked["inputs"]),
        output_features=features(asked["outputs"]),
        device="cpu",
        push_to_hub=False,
        **{**asked["fields"], **fields},
    )


def chosen(policy, processors, asked, seen):
    """(B, H, A) of a batch, by everything that LeRobot does between an observation and a robot."""
    before, after = processors
    batch = {"observation.state": seen["state"], "task": asked["tasks"]}
    for name in asked["inputs"]:
        if name in seen:
            batch[name] = seen[name].permute(0, 3, 1, 2).float() / 255
    ready = {key: value for key, value in before(batch).items() if value is not None}
    policy.reset()
    noise = {} if asked["family"] in ("act", "wall_x") else {"noise": seen["noise"]}
    if asked["family"] == "diffusion":  # its queues make a batch of what was seen
        from lerobot.policies.utils import populate_queues

        names = list(policy.config.image_features)
        ready["observation.images"] = torch.stack([ready[name] for name in names], dim=-4)
        policy._queues = populate_queues(
            policy._queues, {k: v for k, v in ready.items() if k in policy._queues}
        )
    drawn = torch.randn
    if asked["family"] in ("groot", "wall_x"):  # they take no noise, and draw it once
        torch.randn = lambda *_, **__: seen["noise"].clone()
    try:
        with torch.no_grad():
            return after(policy.predict_action_chunk(ready, **noise))
    finally:
        torch.randn = drawn


def main(folder):
    asked = json.loads((folder / "asked.json").read_text())
    seen = load_file(folder / "seen.safetensors")
    statistics = {
        key: {name: torch.tensor(values) for name, values in each.items()}
        for key, each in asked["statistics"].items()
    }
    if asked["family"].startswith("pi"):
        shrink_pi(asked["family"], asked["sizes"], folder / "base")
    exported = folder / "exported"
    raw = begin_groot(asked, folder) if asked["family"] == "groot" else None
    if asked["family"] == "wall_x":
        begin_wall(asked, folder / "base")
    if raw and asked["beside"]:
        policy, processors = raw_groot(asked, exported if exported.is_dir() else raw)
    elif asked.get("as_published"):
        config = configured(
            asked, pretrained_name_or_path=str(exported if exported.is_dir() else folder / "base")
        )
        policy = get_policy_class(asked["family"])(config).eval()
        processors = make_pre_post_processors(config, dataset_stats=statistics)
    elif exported.is_dir():
        policy = get_policy_class(asked["family"]).from_pretrained(exported).eval()
        processors = make_pre_post_processors(policy.config, pretrained_path=str(exported))
    else:
        if base := asked["fields"].get("vlm_model_name"):
            finish_base(Path(base))
        policy, config = made(asked)
        processors = make_pre_post_processors(config, dataset_stats=statistics)
        for each in (policy, *processors):
            each.save_pretrained(folder / "checkpoint")
    save_file({"actions": chosen(policy, processors, asked, seen).contiguous()}, folder / "said.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
