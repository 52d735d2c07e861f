"""Runs whose prompts have images: one reads digits, over a killed trainer; wrong ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.fleet import Fleet
from harness.ledger import audit
from harness.processes import ROOT, run_python
from headrace.client import HeadraceError

STEPS = 5


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of digits, as the example draws them, and a model that reads images."""
    directory = tmp_path_factory.mktemp("digits")
    run_python(ROOT / "examples" / "vision" / "make_digits.py", directory, "--count", "200")
    run_python("-m", "headrace_modelkit.presets.tiny_vision", directory / "model")
    return directory


@pytest.fixture
def pictured(spec_of: Callable[..., dict[str, Any]], digits: Path) -> Callable[..., dict[str, Any]]:
    """Makes specs of runs over these pictures."""

    def make(**overrides: Any) -> dict[str, Any]:
        spec = spec_of(
            steps=STEPS,
            model__path=str(digits / "model"),
            data={"source": "jsonl", "heldout": 20, "prompt": {"chat": True, "template": "{question}"}},
            sampling={"max_new_tokens": 2},
            trainer={"freeze": [], "warmup": {"steps": 80, "lr": 2.0e-3, "batch": 128}},
            algorithm={"prompts_per_step": 16, "group_size": 8},
            optimizer={"lr": 1.0e-4},
            rollout={"max_concurrency": 128},
            deterministic=True,
            **overrides,
        )
        spec["data"]["options"] = {"path": str(digits / "digits.jsonl"), "images": "image"}
        spec["reward"] = {"scorers": [{"name": "exact"}]}
        return spec

    return make


# What is refused comes first: after a kill, a submission waits for what may be restarted.


def counting(model: Path) -> dict[str, Any]:
    """The example's spec with a few short steps."""
    folder = ROOT / "examples" / "vision"
    spec: dict[str, Any] = yaml.safe_load((folder / "count.yaml").read_text(encoding="utf-8"))
    spec["model"]["path"] = str(model)
    options = {"patient": True}  # random weights say no number
    spec["environment"] |= {"tasks": [f"{folder / 'count.py'}:Count"], "count": 8, "options": options}
    spec["reward"] = {"scorers": [{"name": f"{folder / 'count.py'}:reward"}]}
    spec["algorithm"] |= {"prompts_per_step": 4, "group_size": 4}
    spec["sampling"]["max_new_tokens"] = 8  # long enough for some turns to end by themselves
    return spec | {"steps": 3, "evaluation": {"every": 0}, "data": {"heldout": 4}, "export": False}


@pytest.mark.usefixtures("one_simulator")
def test_an_environment_shows_pictures_in_two_turns(fleet: Fleet, digits: Path, tiny_model: Path) -> None:
    with pytest.raises(HeadraceError) as refused:
        fleet.submit(counting(tiny_model))
    assert [each.key for each in refused.value.problems] == ["model.path"]
    found = audit(fleet, fleet.succeed(run := fleet.submit(counting(digits / "model"))))
    worst = max(item.log_prob_mismatch_mean for item in found.live)
    assert worst < 1e-3, "the trainer sees what the engine saw"
    for step in fleet.client.metrics(run.id):
        assert step.figures["operations_by_socket"] > 0 and "operations_by_grpc" not in step.figures
    talks = [each.messages for each in fleet.client.trajectories(run.id, limit=48)]
    for first, _, second, *_ in talks:
        assert first.content == "?<image>" and second.content in ("yes<image>", "no<image>")
        assert first.images[0].startswith("data:image/webp;base64,")
    # What nobody answered is not sent: its image was for no token.
    twice = [talk for talk in talks if len(talk) == 5]
    assert twice and all(talk[2].images for talk in twice)
    assert any(talk[0].images != talk[2].images for talk in twice)


def test_a_broken_image_is_refused_with_its_line(
    fleet: Fleet, pictured: Callable[..., dict[str, Any]], digits: Path, tmp_path: Path
) -> None:
    whole = (digits / "images" / "00000.png").read_bytes()
    (tmp_path / "whole.png").write_bytes(whole)
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    rows = tmp_path / "rows.jsonl"
    line = '{{"image": "{0}", "question": "which digit?", "answer": "1"}}\n'
    rows.write_text(line.format("whole.png") + line.format("cut.png"))
    spec = pictured()
    spec["data"]["options"]["path"] = str(rows)
    with pytest.raises(HeadraceError) as refused:
        fleet.submit(spec)
    (problem,) = refused.value.problems
    assert problem.key == "data.options.path" and f"line 2 of {rows}" in problem.problem
    assert "broken" in problem.problem


def test_a_model_that_reads_no_images_is_refused(
    fleet: Fleet, pictured: Callable[..., dict[str, Any]], tiny_model: Path
) -> None:
    spec = pictured()
    spec["model"]["path"] = str(tiny_model)
    with pytest.raises(HeadraceError) as refused:
        fleet.submit(spec)
    assert [each.key for each in refused.value.problems] == ["model.path"]
    assert "qwen2_5_vl" in refused.value.problems[0].fix


@pytest.mark.nightly  # quick: the flow above reads images; test_flow_lora kills the trainer
def test_a_vision_model_reads_digits_over_a_killed_trainer(
    fleet: Fleet, pictured: Callable[..., dict[str, Any]]
) -> None:
    run = fleet.submit(pictured(name="digits", export=True))
    fleet.reach(run, 2)
    fleet.replaced("trainer-0", fleet.kill("trainer-0"))
    found = audit(fleet, run := fleet.succeed(run))
    assert found.rewinds == 1 and len(found.live) == STEPS
    assert all(item.log_prob_mismatch_mean < 1e-3 for item in found.live), "engines see what is trained on"
    rewards = [step.reward_mean for step in fleet.client.metrics(run.id)]
    # A model that saw no image, or another one than the trainer, could not do better than 0.1 for long. Whether the
    # reward rises takes more steps than a test has: docs/results.md.
    assert sum(rewards) / len(rewards) > 0.25, rewards
    shown = fleet.client.trajectories(run.id, limit=1)[0]
    assert [image.partition(",")[0] for image in shown.images] == ["data:image/webp;base64"]
    exported = Path(run.export_path or "")
    assert (exported / "preprocessor_config.json").is_file()
