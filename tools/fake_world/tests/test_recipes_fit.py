"""The recipes of `examples/reproduce` fit the GPUs that they name, by the trainer's plan."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from headrace_schema.openings import TrainerConfig
from headrace_schema.spec import RunSpec
from headrace_schema.yaml_text import read_yaml
from headrace_trainer.errors import Refusal
from headrace_trainer.layouts import layout_on

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from headrace_fake_world.models import write_model
from headrace_fake_world.robots import write_robot

RECIPES = Path(__file__).resolve().parents[3] / "examples" / "reproduce"
CARD, HOST = 80 * 10**9, 2 * 10**12
MODELS = {
    "Qwen/Qwen3-30B-A3B-Base": "qwen3-30b-a3b",
    "Qwen/Qwen2.5-1.5B-Instruct": "qwen2.5-1.5b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": "qwen2.5-1.5b",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "qwen2.5-7b",
}
POLICIES = {"openvla-oft": "openvla-oft-7b", "openvla": "openvla-7b", "pi05": "pi05-3b", "pi0": "pi0-3b"}
LANGUAGE = sorted(file for file in RECIPES.glob("*.yaml") if "workflow: embodied" not in file.read_text())
ROBOTS = sorted(file for file in RECIPES.glob("*.yaml") if file not in LANGUAGE)


def config_of(file: Path, tmp_path: Path, **trainer) -> TrainerConfig:
    document = read_yaml(file.read_text(encoding="utf-8"))
    if document.get("workflow") == "embodied":
        name = next(name for part, name in POLICIES.items() if part in file.stem)
        document["model"]["path"] = str(write_robot(tmp_path, name))
    else:
        document["model"]["path"] = str(write_model(tmp_path, MODELS[document["model"]["path"]]))
    document["trainer"] |= trainer
    return TrainerConfig.of(RunSpec.model_validate(document))


@pytest.mark.parametrize("file", LANGUAGE + ROBOTS, ids=lambda file: file.stem)
def test_a_recipe_fits_its_gpus(file, tmp_path):
    found = layout_on(config_of(file, tmp_path), CARD, HOST, 8)
    assert sum(found["device"].values()) * 1.1 <= CARD, found["reason"]
    assert "offload" not in found["layout"], "a recipe at its own size needs no host memory for its state"


def test_what_fits_nowhere_is_refused_with_what_was_tried(tmp_path):
    file = RECIPES / "qwen-7b-grpo.yaml"
    config = config_of(file, tmp_path, ranks=8, micro_batch_tokens=28672)
    with pytest.raises(Refusal) as caught:
        layout_on(config, 8 * 2**30, HOST, 8)
    message = caught.value.message
    assert caught.value.reason == "INVALID" and "trainer.ranks: a rank needs at least" in message
    table = message[message.index("Tried, the cheapest first:") :].splitlines()[1:]
    assert table[0].split() == ["layout", "GPU", "GiB", "host", "GiB"]
    ends = [line.rsplit(maxsplit=2)[0].rpartition(": ")[2] for line in table[1:]]
    assert ends == ["true", "true", "true", "optimizer", "parameters"]
    sizes = [float(line.split()[-2]) for line in table[1:]]
    assert sizes == sorted(sizes, reverse=True), "each is tried because it needs less"
    assert "smaller trainer.micro_batch_tokens" in message
