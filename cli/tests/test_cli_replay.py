"""`headrace record` against a coordinator, and `headrace replay` of recordings made here, into real services."""

import asyncio
import json

import pytest
from headrace.common.v1 import common_pb2, recording_pb2
from headrace.reward.v1 import reward_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_cli.replaying.results import Difference, differences, hash_of, worst
from headrace_servicekit.recording.recorder import Recorder, RunRecorder

RUN = {"id": "r-1", "name": "runs/r-1", "state": "RUNNING", "step": 3, "steps": 9, "spec": {}}
KEPT = {"name": "step-4.recording", "step": 4, "reason": "asked for", "size_bytes": 5, "kept_at": 1.0}


def header():
    return common_pb2.CommandHeader(run="runs/r-1", coordinator_epoch=2, open_id=7, lease_epoch=5)


def made(directory, *calls, base="", **fields):
    """A recording of step 4: `calls` are (kind, method, requests, responses)."""

    async def make():
        recorder = Recorder()
        run = recorder.open(RunRecorder("runs/r-1", directory, keep="all"))
        if base:
            run.based(base, 3, "digest", 3)
        run.begin(4)
        for kind, method, requests, responses in calls:
            call = recorder.call(kind, f"{kind}-x", method, requests[0])
            for request in requests:
                call.request(request)
            for response in responses:
                call.response(response)
            call.ended()
        instance = recording_pb2.RecordedInstance(kind="reward", name="reward-0", incarnation="reward-x")
        found = await run.end(lambda: ("{}", [instance]))
        recorder.close(run)
        return found.path

    return str(asyncio.run(make()))


def scored(directory, reward):
    """A recording of one answer, "4" to "2 + 2", that got `reward`."""
    config = json.dumps({"scorers": [{"name": "exact"}]})
    key = common_pb2.SlotKey(prompt_ordinal=6, sample_index=1)
    item = reward_pb2.ScoreItem(
        sample=key, attempt=2, prompt="2 + 2", completion="4", reference="4", token_count=1
    )
    result = reward_pb2.ScoreResult(
        sample=key, attempt=2, status=reward_pb2.SCORE_STATUS_OK, reward=reward, parts={"exact": reward}
    )
    return made(
        directory,
        (
            "reward",
            "OpenRun",
            [reward_pb2.OpenRunRequest(header=header(), config_json=config)],
            [reward_pb2.OpenRunResponse(scorer_digest="another digest")],
        ),
        (
            "reward",
            "Score",
            [reward_pb2.ScoreRequest(header=header()), reward_pb2.ScoreRequest(items=[item])],
            [reward_pb2.ScoreResponse(results=[result])],
        ),
    )


def test_a_step_is_asked_for_waited_for_and_downloaded(headrace, coordinator, tmp_path):
    looks = iter([[], [], [KEPT]])
    coordinator.routes["GET /v1/runs/r-1/recordings"] = lambda got: (
        200,
        {"recordings": next(looks), "wanted": [4]},
    )
    coordinator.routes["POST /v1/runs/r-1:record"] = (200, {"recordings": [], "wanted": [4]})
    coordinator.routes["GET /v1/runs/r-1"] = (200, RUN)
    coordinator.routes["GET /v1/runs/r-1/recordings/step-4.recording"] = (200, b"bytes")
    done = headrace("record", "r-1", "--step", "4", "--to", str(tmp_path / "mine.recording"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine.recording").read_bytes() == b"bytes"
    asked = [got for got in coordinator.received if got.method == "POST"]
    assert [got.query for got in asked] == [{"step": ["4"]}]


def test_a_recording_comes_with_its_checkpoint_and_a_refusal_leaves_no_file(headrace, coordinator, tmp_path):
    kept = {**KEPT, "checkpoint": "lineage-1/step-3"}
    coordinator.routes["GET /v1/runs/r-1/recordings"] = (200, {"recordings": [kept], "wanted": []})
    coordinator.routes["GET /v1/runs/r-1/recordings/step-4.recording"] = (200, b"bytes")
    file = tmp_path / "mine.recording"
    refused = headrace("record", "r-1", "--step", "4", "--to", str(file), "--with-checkpoint")
    assert refused.returncode != 0 and [path.name for path in tmp_path.glob("mine*")] == [file.name]
    coordinator.routes["GET /v1/runs/r-1/recordings/step-4.recording/checkpoint"] = (200, b"tar")
    assert headrace("record", "r-1", "--step", "4", "--to", str(file), "--with-checkpoint").returncode == 0
    assert (tmp_path / "mine.checkpoint.tar").read_bytes() == b"tar"


def test_recordings_are_listed(headrace, coordinator):
    coordinator.routes["GET /v1/runs/r-1/recordings"] = (200, {"recordings": [KEPT], "wanted": [6]})
    text = headrace("record", "r-1").stdout
    assert "asked for" in text and "not made yet: 6" in text


def test_what_is_in_a_recording_is_shown(headrace, tmp_path):
    file = scored(tmp_path, 1.0)
    text = headrace("replay", file, "--show").stdout
    assert "runs/r-1" in text and "reward-0" in text and "Score" in text
    calls = json.loads(headrace("replay", file, "--show", "--json").stdout)["calls"]
    assert [call["method"] for call in calls] == ["OpenRun", "Score"]
    assert calls[1]["bytes_sent"] > calls[1]["bytes_back"] > 0


def test_what_a_service_says_otherwise_than_it_is_recorded_is_named(headrace, tmp_path):
    done = headrace("replay", scored(tmp_path, 0.5), "--service", "reward", "--json")
    said = json.loads(done.stdout)
    assert done.returncode == 1 and not said["same"] and said["recorded_hash"] != said["replayed_hash"]
    scorers, answer = said["differences"]
    assert (scorers["name"], scorers["recorded"]) == ("step 4 scorers", "another digest")
    assert answer["name"] == "step 4 answer 6.1 attempt 2"
    assert (answer["recorded"][1], answer["replayed"][1]) == (0.5, 1.0)


def learned(directory, base="", path="/no/such/model"):
    config = json.dumps(
        {"model": {"path": path}, "algorithm": {}, "optimizer": {}, "trainer": {}, "sampling": {}, "steps": 9}
    )
    opened = trainer_pb2.OpenRunRequest(header=header(), config_json=config, run_directory="/far/away")
    joined = trainer_pb2.JoinTrainerGroupRequest(header=header(), generation=1, world_size=1)
    begun = trainer_pb2.BeginStepRequest(header=header(), step=3, attempt=1, base_number=3, next_number=4)
    return made(
        directory,
        ("trainer", "OpenRun", [opened], [trainer_pb2.OpenRunResponse()]),
        ("trainer", "JoinTrainerGroup", [joined], [trainer_pb2.JoinTrainerGroupResponse()]),
        ("trainer", "BeginStep", [begun], [trainer_pb2.BeginStepResponse()]),
        base=base,
    )


def test_what_a_replay_lacks_is_named(headrace, tmp_path):
    nowhere = headrace("replay", learned(tmp_path / "a"))
    assert nowhere.returncode == 1 and "no checkpoint" in nowhere.stderr and "--step N" in nowhere.stderr
    away = headrace("replay", learned(tmp_path / "b", base="lineage-1/step-3"))
    assert away.returncode == 2 and "lineage-1/step-3" in away.stderr and "--with-checkpoint" in away.stderr
    (tmp_path / "empty").mkdir()
    empty = headrace(
        "replay", learned(tmp_path / "c", base="lineage-1/step-3"), "--checkpoint", str(tmp_path / "empty")
    )
    assert empty.returncode == 2 and "no state.json" in empty.stderr
    unasked = headrace("replay", scored(tmp_path / "d", 1.0), "--service", "trainer")
    assert unasked.returncode == 2 and "nothing was asked of a trainer in step 4" in unasked.stderr
    alone = headrace("replay", scored(tmp_path / "e", 1.0), "--service", "simulator")
    assert alone.returncode == 2 and "trainer, reward, rollout" in alone.stderr
    bad = tmp_path / "bad.recording"
    bad.write_bytes(b"PK")
    damaged = headrace("replay", str(bad), "--json")
    assert damaged.returncode == 2 and json.loads(damaged.stdout)["error"]["reason"] == "BAD_RECORDING"


def test_ranks_that_changed_on_the_way_are_named(headrace, tmp_path):
    opened = trainer_pb2.OpenRunRequest(header=header(), config_json="{}")
    restored = trainer_pb2.RestoreRequest(header=header(), number=3)
    joined = trainer_pb2.JoinTrainerGroupRequest(header=header(), generation=2, world_size=1)
    file = made(
        tmp_path,
        ("trainer", "OpenRun", [opened], [trainer_pb2.OpenRunResponse()]),
        ("trainer", "Restore", [restored], [trainer_pb2.RestoreResponse()]),
        ("trainer", "JoinTrainerGroup", [joined], [trainer_pb2.JoinTrainerGroupResponse()]),
    )
    done = headrace("replay", file)
    assert done.returncode == 1 and "changed its ranks" in done.stderr


def test_a_model_that_this_machine_lacks_is_named_with_the_option(headrace, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "state.json").write_text("{}")
    file = learned(tmp_path / "a", base="lineage-1/step-3")
    lacking = headrace("replay", file, "--checkpoint", str(tmp_path / "checkpoint"))
    assert lacking.returncode == 1 and "/no/such/model" in lacking.stderr and "--model" in lacking.stderr


def test_answers_that_depend_on_others_are_refused_by_their_reason(headrace, tmp_path):
    opened = rollout_pb2.GenerateOpen(header=header(), pools=[rollout_pb2.EnvironmentPool(pool="p")])
    talked = made(tmp_path, ("rollout", "Generate", [rollout_pb2.GenerateRequest(open=opened)], []))
    done = headrace("replay", talked, "--service", "rollout")
    assert done.returncode == 2 and "environments" in done.stderr


def test_observations_that_stayed_with_their_rollout_are_named(headrace, tmp_path):
    learn = trainer_pb2.LearnRequest(header=header())
    trajectory = learn.groups.add(prompt_ordinal=1).members.add().trajectory
    observation = trajectory.branches.add().segments.add().actions.observation
    observation["state"].data = b"here"
    observation["image/front"].blob.blob_id = "away"
    file = made(tmp_path, ("trainer", "Learn", [learn], []), base="lineage-1/step-3")
    done = headrace("replay", file)
    assert done.returncode == 2 and "1 observations of this step were sent by reference" in done.stderr


@pytest.mark.parametrize(
    ("recorded", "replayed", "most"),
    [
        (1.0, 1.0 + 1e-12, 1e-11),
        ([1.0, 2.0], [1.0, 2.1], 0.06),
        (float("nan"), 1.0, float("inf")),
        ("NONFINITE", "ACCUMULATED", float("inf")),
    ],
)
def test_every_bit_counts_for_the_hash_and_the_worst_difference_says_how_much(recorded, replayed, most):
    one, other = {"a": recorded, "b": 1}, {"a": replayed, "b": 1}
    assert hash_of(one) != hash_of(other) and hash_of(one) == hash_of(dict(reversed(one.items())))
    [unlike] = differences(one, other)
    assert unlike == Difference("a", recorded, replayed) or recorded != recorded
    assert 0 < worst([unlike]) <= most


def test_nan_is_the_same_as_nan():
    assert not differences({"loss": float("nan")}, {"loss": float("nan")})
