"""Robot policies imitate a data set in runs of their own: no rollout, no simulator, a held-out loss, the same bits."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from harness.fleet import Fleet
from harness.ledger import audit
from headrace.client import HeadraceError, Run
from headrace_robots.cli.lerobot import EpisodeData, write_data_set
from headrace_robots.demonstrations import Demonstrations
from headrace_robots.policies.directory import load_policy, policy_config
from headrace_robots.policies.policy import Observation, imitation_loss
from PIL import Image

EPISODES, LENGTH, BATCH, STEPS, RATE, HELDOUT = 12, 9, 16, 12, 1e-2, 3
SIDE = 12


def picture(shade: float) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((SIDE, SIDE, 3), int(128 + 100 * shade), np.uint8)).save(file, format="PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def data_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes of a script that goes toward 0, seen from a camera too, as films."""
    folder = tmp_path_factory.mktemp("data") / "shown"
    random = np.random.default_rng(0)
    episodes = []
    for _ in range(EPISODES):
        states = random.uniform(-1, 1, (LENGTH, 2)).astype(np.float32)
        films = {"top": [picture(float(state[0])) for state in states]}
        episodes.append(EpisodeData("go to the middle", [*states], [-state for state in states], films))
    write_data_set(folder, episodes, {"top": (SIDE, SIDE, 3)}, videos=True)
    return folder


def spec(data_set: Path, kind: str = "mlp", **more: Any) -> dict[str, Any]:
    """A run that imitates."""
    policy = {"kind": kind, "chunk_length": 2}
    seen = {"mlp": {"hidden": [16], "bounds": {"low": [-2, -2], "high": [2, 2]}}, "cnn": {}}[kind]
    options = (
        {"path": str(data_set), "cameras": {"front": "top"}} if kind == "cnn" else {"path": str(data_set)}
    )
    return {
        "name": "imitation",
        "workflow": "supervised",
        "steps": STEPS,
        "seed": 7,
        "model": {"policy": {**policy, **seen}},
        "data": {"source": "lerobot", "options": options, "heldout": HELDOUT},
        "algorithm": {"prompts_per_step": BATCH},
        "optimizer": {"lr": RATE},
        "evaluation": {"every": 4},
        "checkpoint": {"interval_steps": 1},
        **more,
    }


@pytest.fixture(scope="module")
def imitated(fleet: Fleet, data_set: Path) -> Run:
    """A run that nothing has disturbed."""
    return fleet.succeed(fleet.submit(spec(data_set)))


def plain_losses(data_set: Path, batches: list[list[tuple[int, int]]], fields: dict[str, Any]) -> list[float]:
    """Losses of a loop in plain torch over batches of (episode, step)."""
    policy = policy_config(fields).build(7)
    shown = list(Demonstrations(data_set))
    policy.normalizer.update(torch.cat([each.state_TS for each in shown]))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for batch in batches:
        state_BS = torch.stack([shown[episode].state_TS[step] for episode, step in batch])
        horizons = [shown[episode].horizons(2) for episode, _ in batch]
        actions = torch.stack([each[0][step] for each, (_, step) in zip(horizons, batch, strict=True)])
        valid = torch.stack([each[1][step] for each, (_, step) in zip(horizons, batch, strict=True)])
        found = policy.imitate(Observation(state_BS), actions, range(len(batch)))
        loss = imitation_loss(found, valid)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def moments(fleet: Fleet, run: Run) -> list[list[tuple[int, int]]]:
    """(episode, step) of each row of each step."""
    return [
        [
            (told["episode"], told["step"])
            for each in fleet.client.trajectories(run.id, step=step.step)
            for told in [json.loads(each.completion)]
        ]
        for step in fleet.client.metrics(run.id)
    ]


def test_steps_are_those_of_a_plain_loop_and_held_out_episodes_are_not_learned(
    fleet: Fleet, imitated: Run, data_set: Path
) -> None:
    found, batches = audit(fleet, imitated), moments(fleet, imitated)
    assert len(found.trained) == STEPS * BATCH and not found.dropped
    learned = {episode for batch in batches for episode, _ in batch}
    assert len(learned) == EPISODES - HELDOUT, "whole episodes are held out"
    steps = fleet.client.metrics(imitated.id)
    fields = {**spec(data_set)["model"]["policy"], "state_size": 2}
    assert imitated.spec["model"]["policy"] == fields, "what is left out is the data set's"
    wanted = plain_losses(data_set, batches, fields)
    assert [step.figures["loss"] for step in steps] == pytest.approx(wanted, rel=1e-4)
    assert all(step.reward_mean is None and "generate" not in step.stage_s for step in steps)
    first, *_, last = imitated.evaluations
    assert first.answers == HELDOUT * LENGTH and last.measure == "loss"
    assert last.score < 0.7 * first.score, "the loss of episodes that were held out"
    address = f"{fleet.url}/v1/runs/{imitated.id}/demonstrations"
    shown = httpx.get(address, headers=fleet.headers, timeout=60, trust_env=False).json()
    assert [each["steps"] for each in shown["demonstrations"]] == [LENGTH] * EPISODES


def test_a_run_that_goes_on_from_its_checkpoint_ends_with_the_same_bits(
    fleet: Fleet, imitated: Run, data_set: Path
) -> None:
    run = fleet.submit(spec(data_set))
    fleet.reach(run, 2)
    fleet.client.pause(run.id)
    assert fleet.state(run, "PAUSED").step < STEPS
    fleet.client.resume(run.id)
    assert fleet.succeed(run).policy.digest == imitated.policy.digest


def test_an_export_acts_as_the_demonstrations_do(fleet: Fleet, imitated: Run, data_set: Path) -> None:
    policy = load_policy(Path(imitated.export_path))
    shown = Demonstrations(data_set)[0]
    acted = policy.act(Observation(shown.state_TS), range(LENGTH), deterministic=True).executed_BCA[:, 0]
    untrained = policy_config(imitated.spec["model"]["policy"]).build(7)
    before = untrained.act(Observation(shown.state_TS), range(LENGTH), deterministic=True).executed_BCA[:, 0]
    off, off_before = ((each - shown.action_TA).abs().mean() for each in (acted, before))
    assert off < 0.8 * off_before


def test_a_policy_with_eyes_imitates_films(fleet: Fleet, data_set: Path) -> None:
    run = fleet.succeed(fleet.submit(spec(data_set, "cnn", steps=4)))
    first, *_, last = run.evaluations
    assert last.score < first.score
    actions = torch.cat([each.action_TA for each in Demonstrations(data_set)])
    read = run.spec["model"]["policy"]
    assert (read["cameras"], read["height"], read["width"]) == (["front"], SIDE, SIDE)
    for name, limit in (("low", actions.amin(0)), ("high", actions.amax(0))):
        assert read["bounds"][name] == pytest.approx(limit.tolist())


@pytest.mark.nightly  # quick: the run above that is paused goes on from a checkpoint, too
def test_a_killed_trainer_changes_no_bit(fleet: Fleet, data_set: Path) -> None:
    wanted = fleet.succeed(fleet.submit(spec(data_set, steps=60)))
    run = fleet.submit(spec(data_set, steps=60))
    fleet.reach(run, 3)
    fleet.kill("trainer-0")
    run = fleet.succeed(run)
    assert run.recoveries and len(audit(fleet, run).trained) == 60 * BATCH
    assert run.policy.digest == wanted.policy.digest


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"workflow": "reasoning", "reward": {"scorers": [{"name": "exact"}]}}, "data.source"),
        ({"data": {"source": "lerobot", "options": {"path": "/nowhere"}, "heldout": 1}}, "data.options.path"),
        ({"evaluation": {"data": {"copied": {"source": "copy_digits"}}}}, "evaluation.data"),
        ({"trainer": {"reference": {"path": "x"}}}, "trainer.reference"),
        ({"data": {"source": "copy_digits", "heldout": 1}}, "model.policy"),
        ({"sampling": {"max_new_tokens": 3}}, "sampling.max_new_tokens"),
        ({"model": {"policy": {"kind": "mlp", "state_size": 3}}}, "model.policy.state_size"),
        ({"model": {"policy": {"kind": "mlp", "bounds": {"low": [0], "high": [1]}}}}, "model.policy.bounds"),
        ({"model": {"policy": {"kind": "cnn", "cameras": ["side"]}}}, "model.policy.cameras"),
        ({"model": {"policy": {"kind": "cnn", "width": 9}}}, "model.policy.width"),
    ],
)
def test_what_such_a_run_has_not_is_refused_by_its_key(
    fleet: Fleet, data_set: Path, change: dict[str, Any], key: str
) -> None:
    with pytest.raises(HeadraceError) as refused:
        fleet.client.submit({**spec(data_set), **change})
    assert key in [each.key for each in refused.value.problems]
