"""Every recipe of `examples/reproduce` is admitted on its cluster, by hub id and by local path, and planned.

Fleets are imaginary: instances as they register themselves, with GPUs of 80 GB, eight a host. A hub's id is known by a
cache that holds config.json alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from harness.processes import ROOT
from headrace.client.specs import load_spec
from headrace_cli.planning import explain_file
from headrace_coordinator.api.submission.fleet_view import FleetView
from headrace_coordinator.api.submission.rules import problems_of
from headrace_coordinator.api.submission.submission import Submission
from headrace_coordinator.data import Dataset
from headrace_reward.scorers import SCORERS
from headrace_robots.trainer.algorithms import EPISODE_ALGORITHMS
from headrace_rollout.engines.vllm.options import VllmOptions
from headrace_schema import hub
from headrace_schema.openings import TrainerConfig
from headrace_schema.resources.fleet import InstanceView
from headrace_schema.sections.generating import engine_gpus
from headrace_schema.spec import RunSpec
from headrace_servicekit.lease.gpus import GPU_MEMORY, WEIGHTS_MEMORY
from headrace_trainer.algorithms import ALGORITHMS

sys.path.insert(0, str(ROOT / "tools" / "fake_world"))

from headrace_fake_world.models import MODELS

RECIPES = sorted((ROOT / "examples" / "reproduce").glob("*.yaml"))
ROBOTS = [file for file in RECIPES if "workflow: embodied" in file.read_text(encoding="utf-8")]
LANGUAGE = [file for file in RECIPES if file not in ROBOTS]
SHAPES = {
    "Qwen/Qwen3-30B-A3B-Base": "qwen3-30b-a3b",
    "Qwen/Qwen2.5-1.5B-Instruct": "qwen2.5-1.5b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": "qwen2.5-1.5b",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "qwen2.5-7b",
}
CARD, HOST, ON_HOST = 80 * 10**9, 2 * 10**12, 8
COMMIT = "0" * 40
PLANS = ROOT / "examples" / "plans"
PROFILES = {"qwen3": "profile_moe_30b_h100.yaml", "qwen": "profile_reasoning_7b_h100.yaml"}


def named_gpus(file: Path) -> int:
    """GPUs of the cluster that a recipe names in its head."""
    found = re.search(r"(?:needs|lays this model out on) (\d+) GPUs", file.read_text(encoding="utf-8"))
    assert found is not None, f"{file.name} names no cluster"
    return int(found[1])


@cache
def capabilities(kind: str) -> dict[str, list[str]]:
    """What an instance of a kind registers, from the registries themselves."""
    if kind == "trainer":
        return {
            "backends": ["fsdp"],
            "algorithms": ALGORITHMS.names(),
            "algorithm_options": ALGORITHMS.capabilities(pytest.fail),
            "episode_algorithms": EPISODE_ALGORITHMS.names(),
            "episode_algorithm_options": EPISODE_ALGORITHMS.capabilities(pytest.fail),
        }
    if kind == "rollout":
        schema = json.dumps(VllmOptions.model_json_schema())
        return {"engines": ["transformers", "vllm"], "engine_options": [f"vllm={schema}"]}
    return {"scorers": SCORERS.names()} if kind == "reward" else {"backends": ["libero", "maniskill"]}


def fleet_of(gpus: int, weights: int = HOST // 2) -> FleetView:
    """Instances on so many GPUs: on each of them a rollout and a trainer, which see those of their host."""

    def instance(kind: str, number: int) -> InstanceView:
        host = number // ON_HOST
        own = [f"GPU-{n}/gpu:{n % ON_HOST}" for n in range(host * ON_HOST, min(gpus, (host + 1) * ON_HOST))]
        found = {**capabilities(kind), WEIGHTS_MEMORY: [str(weights)]}
        found[GPU_MEMORY] = [f"{name}={CARD}" for name in own]
        return InstanceView(
            name=f"{kind}-{number}",
            incarnation=f"{kind}-{number}",
            kind=kind,
            state="READY",
            host=f"h{host}",
            address="",
            devices=own,
            capabilities=found,
            run="",
            resident_memory_bytes=0,
            last_heartbeat_age_s=0.0,
        )

    many = [instance(kind, number) for kind in ("rollout", "trainer") for number in range(gpus)]
    return FleetView.of([*many, instance("reward", 0), instance("simulator", 0)])


@pytest.fixture
def cached(tmp_path, monkeypatch) -> Path:
    """A Hugging Face cache with the configuration of each recipe's model, and nothing else."""
    for model, shape in SHAPES.items():
        folder = tmp_path / "cache" / f"models--{model.replace('/', '--')}"
        (folder / "snapshots" / COMMIT).mkdir(parents=True)
        (folder / "snapshots" / COMMIT / "config.json").write_text(json.dumps(MODELS[shape]))
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(COMMIT)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub, "_known", {})
    return tmp_path / "cache"


def recipe(file: Path, tmp_path: Path, *, local: bool, **more: Any) -> RunSpec:
    """A recipe with its data, and its model as a directory, or as it stands there."""
    if file in ROBOTS:
        given = load_spec(file, more)
        made = tmp_path / Path(given["model"]["path"]).name
        made.mkdir(exist_ok=True)
        for name in ("policy.json", "model.safetensors"):
            (made / name).touch()
        given["model"]["path"] = str(made)
        return RunSpec.model_validate(given)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "<｜User｜>1+1<｜Assistant｜>", "solutions": ["2"]}) + "\n")
    given = load_spec(file, {"data.options.path": str(rows), **more})
    if local:
        made = tmp_path / SHAPES[given["model"]["path"]]
        made.mkdir(exist_ok=True)
        (made / "config.json").write_text(json.dumps(MODELS[made.name]))
        (made / "model.safetensors").touch()
        given["model"]["path"] = str(made)
    return RunSpec.model_validate(given)


def submitted(spec: RunSpec, fleet: FleetView) -> Submission:
    return Submission(spec, fleet, Dataset.open(spec.data, spec.seed))


def test_every_recipe_is_admitted_on_its_cluster_by_hub_id_and_by_path(cached, tmp_path):
    for file in RECIPES:
        gpus = named_gpus(file)
        fleet, settled = fleet_of(gpus), []
        for local in (False, True):
            asked = submitted(recipe(file, tmp_path, local=local), fleet)
            assert problems_of(asked) == [], (file.name, local)
            settled.append(asked.settled.model_dump(exclude={"model"}))
            spans = engine_gpus(asked.settled.rollout.engine_options)
            assert asked.settled.rollout.instances * spans <= gpus and "unknown size" not in asked.note
            assert file in ROBOTS or asked.settled.rollout.engine == "vllm"
        assert settled[0] == settled[1], f"{file.name}: a hub's id and its directory get the same"
        less = submitted(recipe(file, tmp_path, local=False), fleet_of(gpus // 2))
        assert problems_of(less), f"{file.name} is admitted on half of what it names"


@pytest.mark.parametrize("file", LANGUAGE, ids=lambda file: file.stem)
def test_every_recipe_of_a_language_model_is_planned_by_its_hub_id(file, cached):
    gpus = named_gpus(file)
    profile = PLANS / next(name for part, name in PROFILES.items() if file.stem.startswith(part))
    plan = explain_file(file, [], gpus, None, profile, gpu_gib=CARD / 2**30)
    spec = RunSpec.model_validate(load_spec(file, {}))
    assert plan["items"] == spec.slots_per_step and plan["devices"] == {"gpu": gpus} and plan["step_s"] > 0
    decided = {each["key"]: each["value"] for each in plan.get("decided", ())}
    assert decided["rollout.engine_options.gpu_memory_utilization"] == 0.89


@pytest.mark.nightly
def test_the_trainers_read_the_same_cache_and_take_a_layout_without_the_host(cached, tmp_path):
    """A process of its own: huggingface_hub reads its variables as it is imported."""
    file = next(file for file in LANGUAGE if file.stem == "qwen3-30b-a3b-grpo")
    spec = submitted(recipe(file, tmp_path, local=False), fleet_of(named_gpus(file))).settled
    asked = {
        "config": TrainerConfig.of(spec).model_dump(mode="json"),
        "gpu_bytes": CARD,
        "host_bytes": HOST,
        "ranks_per_host": ON_HOST,
    }
    done = subprocess.run(
        [sys.executable, "-m", "headrace_trainer.layouts"],
        input=json.dumps(asked),
        env={**os.environ, "HF_HUB_CACHE": str(cached), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    found = json.loads(done.stdout)
    assert "problem" not in found, found
    assert "offload" not in found["layout"] and sum(found["device"].values()) * 1.1 <= CARD


def test_a_cluster_whose_hosts_have_no_room_for_the_weights_is_refused_with_the_figure(cached, tmp_path):
    file = next(file for file in LANGUAGE if file.stem == "qwen-7b-grpo")
    gpus, spec = named_gpus(file), recipe(file, tmp_path, local=False)
    (found, again) = problems_of(submitted(spec, fleet_of(gpus, weights=16 * 2**30)))
    assert found.key == again.key == "model.path"
    assert "a trainer's host keeps versions of its weights of 28.4 GiB in all" in found.problem
    assert "holds 16.0" in found.problem and "HEADRACE_WEIGHTS_SIZE" in found.fix
    assert problems_of(submitted(spec, fleet_of(gpus, weights=29 * 2**30))) == []
    adapters = recipe(file, tmp_path, local=False, **{"trainer.lora": {"rank": 16}})
    assert problems_of(submitted(adapters, fleet_of(gpus, weights=16 * 2**30))) == []
    parts = recipe(file, tmp_path, local=False, **{"weights.publish": "ranks"})
    assert [
        each.problem.split("'")[0] for each in problems_of(submitted(parts, fleet_of(gpus, 16 * 2**30)))
    ] == ["a rollout"]
