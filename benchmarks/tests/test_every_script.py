"""What holds for every script of the benchmarks: it explains itself, and what it submits is what services take."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import embodied
import engines
import growth
import lease_switch
import modes
import pipeline
import pytest
import regroup
import side_by_side
import streaming
import two_runs
import weight_sync
from _chunk_coordinator import make_spec as chunk_spec
from _chunk_services import MESSAGE, PIPELINED
from _elastic_here import MODES, Here
from _elastic_here import make_spec as elastic_spec
from algorithms import EXAMPLES as ALGORITHMS
from algorithms import overrides
from chunk_stream import BURSTS, WINDOWS
from headrace.client import load_spec
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.openings import RolloutConfig, TrainerConfig
from headrace_schema.spec import RunSpec

FOLDER = Path(__file__).parents[1]
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if not path.name.startswith("_"))
PAGES = [*FOLDER.parent.glob("*.md"), *FOLDER.parent.glob("docs/**/*.md"), FOLDER / "README.md"]
MODEL = Path("/models/imaginary")


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_itself_and_starts_nothing(script, tmp_path):
    done = subprocess.run(
        [sys.executable, FOLDER / script, "--help"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout and not list(tmp_path.iterdir())
    known = set(re.findall(r"--[a-z][a-z-]*", done.stdout.partition("\noptions:")[2]))
    for page, options in documented(script):
        assert set(options) <= known, page


def documented(script: str) -> Iterator[tuple[str, list[str]]]:
    """The options with which pages show a script."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", "")
        for line in re.findall(rf"benchmarks/{script}([^\n`]*)", text):
            yield page.name, re.findall(r"--[a-z][a-z-]*", line)


def test_pages_show_the_scripts_that_there_are():
    shown = {name for page in PAGES for name in re.findall(r"benchmarks/(\w+\.py)", page.read_text("utf-8"))}
    assert shown <= {path.name for path in FOLDER.glob("*.py")}
    assert not [name for name in SCRIPTS if name not in (FOLDER / "README.md").read_text(encoding="utf-8")]


def specs(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each run that a script submits, by the script's name and what tells its runs apart."""
    prompts = folder / "prompts.jsonl"
    for name in (streaming.WAITING, streaming.STREAMED):
        spec = streaming.make_spec(MODEL, prompts, 2, 4)
        yield f"streaming {name}", {**spec, "algorithm": {**spec["algorithm"], "name": name}}
    auto = {"mode": "auto", "measure_steps": 2}
    for workload, work in modes.WORKLOADS.items():
        small = replace(work, width=64, layers=1, reference=(64, 1) if work.reference else None)
        spec = modes.make_spec(folder / workload, small)
        for style, placement in (*modes.STYLES.items(), ("auto", auto)):
            yield f"modes {workload} {style}", {**spec, "steps": 2, "placement": placement}
    for mode, setting in MODES.items():
        yield f"elastic {mode}", elastic_spec(Here(), MODEL, prompts, 2, **setting)
    for mode, spec in lease_switch.small(folder, 1).items():
        yield f"lease_switch {mode}", spec
    for mode, spec in lease_switch.real(MODEL, folder, 1).items():
        yield f"lease_switch --model {mode}", spec
    for placement in (two_runs.APART, two_runs.TOGETHER):
        for shared in ({}, {"share": True}):
            spec = two_runs.make_spec(folder, 2, 4)
            yield f"two_runs {placement['mode']} {shared}", {**spec, "placement": {**placement, **shared}}
    for core in side_by_side.CORES:
        yield f"side_by_side {core}", side_by_side.make_spec(MODEL, core, 2, 0)
    yield "regroup", regroup.make_spec(2, MODEL)
    yield "growth", growth.make_spec(2)
    for name, (path, changes) in ALGORITHMS.items():
        yield f"algorithms {name}", load_spec(path, [*changes, *overrides(0, 2, MODEL)])
    for name in embodied.recipes():
        yield f"embodied {name}", load_spec(embodied.EXAMPLES / f"{name}.yaml", ["seed=0"])


def test_services_know_every_run_that_a_script_submits(tmp_path):
    for name, spec in specs(tmp_path):
        try:
            RunSpec.model_validate(spec)
        except ValueError as error:
            raise AssertionError(f"{name}: {error}") from error
    chunk_spec(f"{MESSAGE}-{PIPELINED}", BURSTS[MESSAGE], 2, WINDOWS[MESSAGE])


def test_a_real_models_switches_have_short_answers_whose_rewards_differ(tmp_path):
    for spec in lease_switch.real(MODEL, tmp_path, 3).values():
        run = RunSpec.model_validate(spec)
        assert run.sampling.max_new_tokens == lease_switch.LONGEST and run.data.prompt.chat
        assert [scorer.name for scorer in run.reward.scorers] == ["length"]


def test_services_know_what_they_are_opened_with_by_hand():
    load = engines.Load(str(MODEL), 2, 4, 4, "float32")
    for name in engines.ENGINES:
        assert RolloutConfig.model_validate(engines.make_config(name, load)).rollout.engine == name
    for transport in weight_sync.WAYS:
        RolloutConfig.model_validate(weight_sync.rollout_config(MODEL, transport))
    RolloutConfig.model_validate(pipeline.make_config(128, 2))
    TrainerConfig.model_validate(weight_sync.trainer_config(MODEL))


def test_the_judgement_of_a_robot_policy_is_an_evaluation():
    run = RunSpec.model_validate(load_spec(embodied.EXAMPLES / "reach.yaml"))
    assert run.environment is not None
    EvaluationSpec.model_validate(embodied.judgement("reach-000001", run.environment.model_dump(mode="json")))
