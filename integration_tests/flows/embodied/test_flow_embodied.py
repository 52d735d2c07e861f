"""Robot policies with real services: trained, paused, resumed, shown; simulators are killed, come and go."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import pytest
import yaml
from harness.environments import corridor, pictures
from harness.fleet import Fleet
from harness.ledger import audit
from harness.waiting import wait_for
from headrace.client import HeadraceError, Run
from headrace_robots.cli.lerobot import EpisodeData, write_data_set
from headrace_robots.policies.directory import load_policy

BATCH, STEPS, LONGEST = 6, 4, 8


SIMULATORS = {"simulator-0", "simulator-1"}


@pytest.fixture(scope="module", autouse=True)
def two_simulators(fleet: Fleet) -> Iterator[None]:
    """Scales the fleet that modules share to two simulators, and back."""

    def registered() -> set[str]:
        return {item.name for item in fleet.client.instances() if item.kind == "simulator"}

    fleet.client.scale("simulator", 2)
    fleet.ready(*SIMULATORS)
    yield
    fleet.client.scale("simulator", 0)
    wait_for(lambda: not registered(), "the simulators to leave")


def spec(directory: Path, **more: Any) -> dict[str, Any]:
    """A run whose episodes have at most eight actions."""
    return {
        "name": "corridor",
        "workflow": "embodied",
        "steps": STEPS,
        "model": {"policy": {"kind": "mlp", "hidden": [16], "log_std": 0.0}},
        "environment": {
            "tasks": [f"{corridor.__file__}:make_env"],
            "options": {"directory": str(directory)},
            "count": 4,
            "max_episode_steps": LONGEST,
        },
        "data": {"heldout": 4, "options": {"starts": 64}},
        "algorithm": {
            "name": "ppo",
            "group_size": 1,
            "prompts_per_step": BATCH,
            "options": {"epochs": 2, "minibatch_size": 16},
        },
        "optimizer": {"lr": 1.0e-3},
        "checkpoint": {"interval_steps": 2},
        "export": True,
        **more,
    }


def demonstrations(directory: Path) -> str:
    """Two episodes of walking to the goal, as a data set."""
    states = [np.array([0.3 * step, 1.0], np.float32) for step in range(3)]
    shown = EpisodeData("walk", states, [np.ones(1, np.float32)] * len(states))
    write_data_set(directory / "shown", [shown, shown], {})
    return str(directory / "shown")


def test_a_robot_policy_is_cloned_trained_paused_resumed_and_shown(fleet: Fleet, tmp_path: Path):
    warmup = {"demonstrations": demonstrations(tmp_path), "steps": 3}
    (tmp_path / "hold").write_text(str(4 + BATCH))  # behind an evaluation and a step
    run = fleet.submit(spec(tmp_path, evaluation={"every": 2}, trainer={"warmup": warmup}))
    wait_for((tmp_path / "held").exists, "an episode to stand still")
    fleet.client.pause(run.id)
    (tmp_path / "hold").unlink()
    assert fleet.state(run, "PAUSED").step == 2
    fleet.client.resume(run.id)
    ended = fleet.succeed(run)
    found = audit(fleet, ended)
    assert len(found.trained) == STEPS * BATCH
    assert len({item.version.digest for item in found.live}) == STEPS, "every step changed the policy"
    assert all(BATCH <= item.tokens <= BATCH * LONGEST for item in found.live), "actions that were executed"
    events = fleet.events(run)
    views = [event.data["view"] for event in events if event.type == "evaluated"]
    assert [view["step"] for view in views] == [0, 2, STEPS]
    assert all(0.0 <= view["score"] <= 1.0 and view["answers"] == 4 for view in views)
    assert ended.warmup_steps == 3
    notes = [event.data["text"] for event in events if event.type == "noted"]
    assert any("imitated 6 moments of demonstrations in 3 supervised steps" in note for note in notes)
    (fitted,) = [event for event in events if event.type == "policy_fitted"]
    assert fitted.data["policy"]["state_size"] == 2
    assert (Path(ended.export_path) / "policy.json").is_file()
    fleet.json("run", "export", ended.id, "--to", str(tmp_path / "exported"))
    for file in Path(ended.export_path).iterdir():
        assert (tmp_path / "exported" / file.name).read_bytes() == file.read_bytes(), file.name
    judged = [evaluated(fleet, tmp_path, **source) for source in sources(ended)]
    assert judged[0] == judged[1], "the last checkpoint and the export are the same policy"


# Before the kills: after one, a submission that cannot be waits for what may be restarted.
def test_a_task_that_does_not_exist_is_named(fleet: Fleet, tmp_path: Path):
    with pytest.raises(HeadraceError) as refused:
        fleet.submit(spec(tmp_path, environment={"tasks": ["CartPol-v1"], "count": 2}))
    (problem,) = refused.value.problems
    assert problem.key == "environment.tasks[0]" and "did you mean CartPole-v" in problem.fix
    # Which versions there are, a simulator says as it makes one.
    with pytest.raises(HeadraceError) as refused:
        fleet.submit(spec(tmp_path, environment={"tasks": ["CartPole-v9"], "count": 2}))
    (problem,) = refused.value.problems
    assert problem.key.startswith("environment.tasks") and "CartPole-v1" in problem.problem


@pytest.mark.parametrize("mode", ["disaggregated", "hybrid"])
def test_episodes_are_made_while_a_step_is_learned(fleet: Fleet, tmp_path: Path, mode: str):
    """Episodes of one version end before the next is installed; the next step's begin while this one is learned."""
    steps, stale = 6, 2
    algorithm = {**spec(tmp_path)["algorithm"], "max_staleness": stale}
    run = fleet.submit(
        spec(
            tmp_path,
            steps=steps,
            algorithm=algorithm,
            placement={"mode": mode},
            evaluation={"every": 3},
            export=False,
        )
    )
    ended = fleet.succeed(run)
    found = audit(fleet, ended)
    assert len(found.trained) == steps * BATCH and not found.dropped
    assert ended.recoveries == 0 and not found.rewinds
    assert 1 <= max(item.max_staleness for item in found.live) <= stale, "no episode was of an older version"
    figures = [step.figures for step in fleet.client.metrics(run.id)]
    assert all(each["correction_weight"] > 0 for each in figures), "older actions are weighed"
    assert all(each["staleness_max"] <= stale for each in figures)


def test_ppo_begins_with_the_policy_of_an_imitation(fleet: Fleet, tmp_path: Path):
    policy = {"kind": "mlp", "hidden": [16], "bounds": {"low": [-1], "high": [1]}}
    clone = {
        "name": "clone",
        "workflow": "supervised",
        "steps": 2,
        "model": {"policy": policy},
        "data": {"source": "lerobot", "options": {"path": demonstrations(tmp_path)}, "heldout": 1},
        "algorithm": {"prompts_per_step": 2},
        "optimizer": {"lr": 1.0e-3},
    }
    before = fleet.submit(clone)
    run = fleet.submit(spec(tmp_path, name="ppo", steps=1, model={}, after=before.id))
    run, before = fleet.succeed(run), fleet.succeed(before)
    assert (run.spec["model"]["path"], run.spec["model"]["policy"]) == (before.export_path, None)
    cloned, learned = (load_policy(Path(each.export_path)).actor.state_dict() for each in (before, run))
    moves = [float((learned[name] - tensor).abs().max()) for name, tensor in cloned.items()]
    assert 0 < max(moves) < 0.05, "a step from there"


def test_simulators_hold_devices_while_rollouts_do(fleet: Fleet, tmp_path: Path):
    both = {"rollout": "0", "simulator": "1", "trainer": "all"}
    run = fleet.succeed(fleet.submit(spec(tmp_path, placement=both, export=False)))
    assert len(audit(fleet, run).trained) == STEPS * BATCH
    holds = fleet.client.timeline(run.id)["holds"]
    simulated = [hold for hold in holds if hold["stage"] == "simulate"]
    assert {hold["instance"] for hold in simulated} == {"simulator-0"}, "one device is for one simulator"
    assert {name.rpartition("/")[2] for hold in simulated for name in hold["devices"]} == {"cpu:1"}
    assert len(simulated) >= STEPS, "they are released before each step learns"
    learned = [(hold["start"], hold["end"]) for hold in holds if hold["stage"] == "learn"]
    assert learned and all(
        end <= hold["start"] or hold["end"] <= start for hold in simulated for start, end in learned
    )


def test_training_episodes_are_watched_and_a_rollout_and_its_simulator_hold_one_device(
    fleet: Fleet, tmp_path: Path
):
    given = spec(tmp_path, steps=3, export=False, data={"options": {"starts": 64}})
    given["model"]["policy"] |= {"kind": "cnn", "features": 8}
    filmed = {"every": 2, "starts": 2}
    given["environment"] |= {"tasks": [f"{pictures.__file__}:make_env"], "options": {}, "videos": filmed}
    given["placement"] = {
        "rollout,simulator": "0",
        "trainer": "1",
        "joint": {"rollout": 0.6, "simulator": 0.4},
    }
    run = fleet.succeed(fleet.submit(given))
    with httpx.Client(base_url=fleet.url, headers=fleet.headers, timeout=60, trust_env=False) as http:
        place = f"/v1/runs/{run.id}/videos"
        shown = http.get(place).json()["videos"]
        assert [video["step"] for video in shown] == [1, 1, 3, 3], "two episodes of every second step"
        for video in shown:
            actions = http.get(f"{place}/{video['name']}/steps").json()["actions"]
            with av.open(io.BytesIO(http.get(f"{place}/{video['name']}").content)) as film:
                frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
            assert len(frames) == 1 + len(actions), "the start, and what each action led to"
            assert frames[0].shape == (pictures.SIZE, pictures.SIZE, 3) and frames[0].max() > 200
    again = fleet.client.replay(run.id, shown[0]["name"])
    wait_for(lambda: fleet.client.evaluation(again.id).ended, f"{again.id} to end", 240)
    (played,) = fleet.client.trajectories(again.id)
    begun = {each.prompt for each in fleet.client.trajectories(run.id) if each.step == 1}
    assert played.prompt in begun and played.version == 1
    (film,) = fleet.client.videos(again.id)
    assert (
        film.name.split("-", 2)[2].rpartition("-")[0] == shown[0]["name"].split("-", 3)[3].rpartition("-")[0]
    )
    holds = fleet.client.timeline(run.id)["holds"]
    acts = [hold for hold in holds if hold["stage"] in ("generate", "simulate")]
    assert {name.rpartition("/")[2] for hold in acts for name in hold["devices"]} == {"cpu:0"}
    one, other = ([hold for hold in acts if hold["stage"] == stage] for stage in ("generate", "simulate"))
    assert any(a["start"] < b["end"] and b["start"] < a["end"] for a in one for b in other), "both at once"


def sources(run: Run) -> list[dict[str, Any]]:
    """The policy of a run's last step, as a checkpoint and as a directory."""
    return [{"checkpoint": {"run": run.id}}, {"model": {"path": run.export_path, "dtype": "float32"}}]


def evaluated(fleet: Fleet, directory: Path, **source: Any) -> tuple[str, float, float]:
    """(digest of the weights, success rate, mean actions) of six start states that no run trains on."""
    environment = spec(directory)["environment"]
    suite = {"name": "episodes", "options": {"environment": environment, "starts": 6}}
    made = fleet.client.evaluate({"suite": suite, **source})
    found = wait_for(
        lambda: now if (now := fleet.client.evaluation(made.id)).ended else None, f"{made.id} to end", 240
    )
    assert found.state == "SUCCEEDED", found.reason
    assert found.result is not None and found.answers == 6
    assert found.versions["gymnasium"] == version("gymnasium"), "what it was made in"
    (greedy,) = found.result.modes
    return found.weights_digest, greedy.score, found.result.tokens_mean


def test_episodes_are_shown_in_place_of_answers(fleet: Fleet, tmp_path: Path):
    run = fleet.succeed(fleet.submit(spec(tmp_path, steps=1, data={"options": {"starts": 64}}, export=False)))
    lines = (Path(run.run_directory) / "trajectories.jsonl").read_text().splitlines()
    episodes = [json.loads(json.loads(line)["completion"]) for line in lines]
    assert len(episodes) == BATCH
    assert all(1 <= episode["steps"] <= LONGEST and episode["return"] < 0 for episode in episodes)


def test_a_killed_simulator_costs_no_version_and_a_new_one_takes_part(fleet: Fleet, tmp_path: Path):
    fleet.ready("simulator-0", "simulator-1")
    spec_of_run = spec(tmp_path, data={"options": {"starts": 64}}, export=False)
    spec_of_run["environment"]["step_timeout_s"] = 300.0  # what stands still below is not lost for that
    (tmp_path / "hold").write_text(str(BATCH))
    run = fleet.submit(spec_of_run)
    wait_for((tmp_path / "held").exists, "an episode of the second step to stand still")
    fleet.reach(run, 1)
    killed = fleet.kill("simulator-1")
    assert fleet.client.scale("simulator", 3) == 3
    fleet.ready("simulator-2")
    newcomer = fleet.pid_of("simulator-2")
    (tmp_path / "hold").unlink()
    wait_for(lambda: corridor.Corridor.used(tmp_path, newcomer), "an episode in the new simulator", 120)
    assert fleet.client.scale("simulator", 2) == 2  # the newcomer goes, with what it has begun
    found = audit(fleet, fleet.succeed(run))
    assert len(found.trained) == STEPS * BATCH
    assert found.rewinds == 0 and not found.abandoned
    fleet.replaced("simulator-1", killed)


@pytest.mark.nightly  # quick: the kill above, at another moment
def test_a_simulator_killed_while_a_version_is_installed_costs_no_episode(fleet: Fleet, tmp_path: Path):
    """Held while the next step's episodes stand still, and the step before them has been learned."""
    fleet.ready("simulator-0", "simulator-1")
    given = spec(tmp_path, steps=6, data={"options": {"starts": 64}}, export=False)
    given["environment"]["step_timeout_s"] = 300.0
    given["algorithm"]["max_staleness"] = 1
    (tmp_path / "hold").write_text(
        str(2 * BATCH)
    )  # those of the third step begin once the first one is learned
    run = fleet.submit({**given, "placement": {"mode": "disaggregated"}})
    wait_for((tmp_path / "held").exists, "an episode of the third step to stand still")
    fleet.reach(run, 1)
    killed = fleet.kill("simulator-1")
    (tmp_path / "hold").unlink()
    fleet.replaced("simulator-1", killed)
    found = audit(fleet, fleet.succeed(run))
    assert len(found.trained) == 6 * BATCH and not found.dropped
    assert found.rewinds == 0 and not found.abandoned
    assert max(item.max_staleness for item in found.live) == 1


def test_episodes_whose_pictures_are_lost_with_their_rollout_are_made_again(fleet: Fleet, tmp_path: Path):
    """Their pictures are too large for the coordinator, and stay with the rollout until they are learned from."""
    (tmp_path / "hold").touch()
    given = spec(tmp_path, steps=2, export=False, data={"options": {"starts": 64}})
    given["model"]["policy"] |= {"kind": "cnn", "features": 8}
    given["environment"] |= {"tasks": [f"{corridor.__file__}:make_filmed"], "step_timeout_s": 300.0}
    run = fleet.submit(given)
    wait_for((tmp_path / "held").exists, "an episode to stand still")
    wait_for((tmp_path / "ended").exists, "an episode to end")
    time.sleep(1.0)  # The coordinator has heard of it.
    killed = fleet.kill("rollout-0")
    (tmp_path / "hold").unlink()
    fleet.replaced("rollout-0", killed)
    found = audit(fleet, fleet.succeed(run))
    assert len(found.trained) == 2 * BATCH and found.rewinds == 0


@pytest.mark.nightly  # quick: test_cli_plan.py
def test_an_embodied_spec_is_measured_and_planned_from(fleet: Fleet, tmp_path: Path):
    """Policy and environments are measured apart: the policy on the run's devices, the environments on the host."""
    file = tmp_path / "corridor.yaml"
    file.write_text(yaml.safe_dump(spec(tmp_path, steps=2, data={"options": {"starts": 64}})))
    found = fleet.json("profile", file, "--steps", "1")
    stages = found["profile"]["stages"]
    for stage in ("generate", "learn"):
        points = stages[stage]["points"]
        assert [point["items"] for point in points] == [BATCH, 2 * BATCH, 3 * BATCH]
        assert all(point["seconds"] > 0 for point in points)
    assert stages["simulate"]["kind"] == "host" and stages["simulate"]["host_item_s"] > 0
    plan = fleet.json("plan", file, "--devices", "2")
    assert {bar["stage"] for bar in plan["timeline"]} == {"generate", "simulate", "learn"}
    short = [run.id for run in fleet.client.list() if run.id.startswith("profile-")]
    measured = [step for run in short for step in fleet.client.metrics(run)]
    episodes = [step.stage_s for step in measured if "simulate" in step.stage_s]
    assert episodes and all(0 < each["act"] <= each["generate"] for each in episodes)
    assert all(0 < each["simulate"] <= each["generate"] for each in episodes)
