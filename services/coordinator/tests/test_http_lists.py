"""Lists of the HTTP API: pages, orders and filters."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from headrace_coordinator.api.reading.reads import Reads
from headrace_coordinator.api.recordings import steps_of
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.state import EndedRun
from headrace_coordinator.projections.projection import RunProjection
from headrace_coordinator.projections.trajectories import SettledTrajectory
from headrace_coordinator.projections.videos import read_episode
from headrace_schema.resources.evaluations import VideoView
from headrace_servicekit.rpc.episodes import Episode, encode_episode
from history_parts import train
from http_parts import problems, walk


def steady(entry: dict) -> dict:
    """What does not change from one request to the next."""
    return {key: value for key, value in entry.items() if key != "last_heartbeat_age_s"}


async def test_lists_come_in_pages(api, served, spec_json, run_id):
    await train(served.event_log, 7, run=run_id)
    await served.post(
        *(
            ev.CheckpointSaved(at=0, run=run_id, name=f"step-{step}", number=step + 1, step=step)
            for step in (3, 6)
        )
    )
    for _ in range(6):
        await api.post("/v1/runs", json=spec_json)
    for path, key, count in (
        ("/v1/runs", "runs", 7),
        (f"/v1/runs/{run_id}/metrics", "steps", 7),
        (f"/v1/runs/{run_id}/certificates", "certificates", 7),
        (f"/v1/runs/{run_id}/checkpoints", "checkpoints", 2),
        ("/v1/instances", "instances", 6),
        ("/v1/leases", "leases", 1),
    ):
        whole = (await api.get(path)).json()[key]
        assert len(whole) == count
        for size in (1, 2, 3, 1000):
            assert list(map(steady, await walk(api, path, key, size))) == list(map(steady, whole))


async def test_runs_by_state_in_either_order_with_specs_only_when_asked_for(api, spec_json, run_id):
    made = [(await api.post("/v1/runs", json=spec_json)).json()["id"] for _ in range(3)]
    await api.post(f"/v1/runs/{made[1]}:cancel")

    async def ids(query):
        return [run["id"] for run in (await api.get(f"/v1/runs?{query}")).json()["runs"]]

    assert await ids("state=CANCELLED") == [made[1]]
    assert await ids("state=QUEUED&state=CANCELLED&order=oldest") == [run_id, *made]
    # A page goes on behind a run that has left the state meanwhile.
    assert await ids(f"state=QUEUED&page_token={made[1]}") == [made[0], run_id]
    assert {len(run["spec"]) for run in (await api.get("/v1/runs")).json()["runs"]} == {0}
    assert all(run["spec"]["name"] == "sums" for run in (await api.get("/v1/runs?full")).json()["runs"])
    for query, key in (("state=SLEEPING", "state"), ("order=best", "order")):
        assert key in problems(await api.get(f"/v1/runs?{query}"))


async def test_a_new_run_shifts_no_page(api, spec_json, run_id):
    for _ in range(3):
        await api.post("/v1/runs", json=spec_json)
    first = (await api.get("/v1/runs?page_size=2")).json()
    await api.post("/v1/runs", json=spec_json)
    second = (
        await api.get("/v1/runs", params={"page_size": 2, "page_token": first["next_page_token"]})
    ).json()
    assert [run["id"] for run in first["runs"] + second["runs"]] == ["sums-3", "sums-2", "sums-1", "sums-0"]


@pytest.mark.parametrize(
    "list_path", ["", "/R/metrics", "/R/certificates", "/R/checkpoints", "/R/trajectories"]
)
@pytest.mark.parametrize(
    "query", ["page_size=0", "page_size=1001", "page_size=x", "page_token=nonsense", "pagesize=3"]
)
async def test_a_wrong_page_is_named(api, run_id, list_path, query):
    answer = await api.get(f"/v1/runs{list_path.replace('R', run_id)}?{query}")
    assert answer.status_code == 422
    assert set(problems(answer)) == {query.partition("=")[0]}


async def test_trajectories_are_read_from_the_runs_directory(api, served, run_id):
    def view(step: int, prompt: int) -> SettledTrajectory:
        return SettledTrajectory(
            step=step,
            version=step,
            prompt_ordinal=prompt,
            sample_index=0,
            attempt=1,
            prompt="1 + 1 =",
            completion="²",
            reference="2",
            reward=0.5,
            parts={},
            finish_reason="EOS",
            tokens=1,
        )

    path = f"/v1/runs/{run_id}/trajectories"
    assert (await api.get(path)).json() == {"trajectories": [], "next_page_token": ""}
    projection = RunProjection(served.runs / run_id)
    projection.trajectories([view(step, 2 * step + prompt) for step in range(3) for prompt in range(2)])
    projection.close()
    found = await walk(api, path, "trajectories", 4)
    assert [item["prompt_ordinal"] for item in found] == [0, 1, 2, 3, 4, 5]
    assert found[0]["completion"] == "²"
    only = (await api.get(path, params={"step": 1})).json()["trajectories"]
    assert [item["prompt_ordinal"] for item in only] == [2, 3]


async def test_instances_and_leases_by_state_in_an_order(api, served, monkeypatch):
    reads = served.coordinator.reads
    found = [each for each in reads.instances() if each.kind == "rollout"]
    states = ("READY", "DRAINING", "READY")
    found = [item.model_copy(update={"state": state}) for item, state in zip(found, states, strict=True)]
    found[2] = found[2].model_copy(update={"host": "a"})
    monkeypatch.setattr(reads, "instances", lambda: found[::-1])
    lease = reads.leases()[0]
    leases = [
        lease.model_copy(update={"epoch": n, "state": s})
        for n, s in ((7, "HELD"), (8, "GRANTED"), (9, "HELD"))
    ]
    monkeypatch.setattr(reads, "leases", lambda: leases)

    async def names(query):
        body = (await api.get(f"/v1/instances?{query}")).json()
        return [item["name"][-1] for item in body["instances"]], body["next_page_token"]

    async def epochs(query):
        body = (await api.get(f"/v1/leases?{query}")).json()
        assert body["devices"]
        return [item["epoch"] for item in body["leases"]], body["next_page_token"]

    assert await names("") == (["0", "1", "2"], "")
    assert await names("order=host") == (["2", "0", "1"], "")
    assert await names("state=READY") == (["0", "2"], "")
    assert await names("state=READY&page_size=1") == (["0"], "i-rollout-0")
    assert await names("state=DRAINING&state=LOST&page_token=i-rollout-0") == (["1"], "")
    assert await epochs("state=HELD&order=newest") == ([9, 7], "")
    assert await epochs("state=HELD&page_size=1") == ([7], "7")
    for path in ("/v1/instances", "/v1/leases"):
        for query, key in (("state=SLEEPING", "state"), ("order=best", "order")):
            assert key in problems(await api.get(f"{path}?{query}"))


async def test_videos_are_listed_and_served_as_files(api, served, run_id):
    folder = served.runs / run_id / "videos"
    folder.mkdir(parents=True)
    (folder / "0001-0-push-success.mp4").write_bytes(b"film")
    view = VideoView(name="0001-0-push-success.mp4", item=1, sample=0, success=True, size_bytes=4)
    listed = await api.get(f"/v1/evaluations/{run_id}/videos")
    assert listed.json() == {"videos": [view.model_dump()]}
    answer = await api.get(f"/v1/evaluations/{run_id}/videos/{view.name}")
    assert (answer.headers["content-type"], answer.content) == ("video/mp4", b"film")
    lacking = await api.get(f"/v1/evaluations/{run_id}/videos/{view.name}/episode")
    assert lacking.status_code == 404 and "alone" in lacking.json()["message"]
    (folder / "0001-0-push-success.episode").write_bytes(b"arrays")
    answer = await api.get(f"/v1/evaluations/{run_id}/videos/{view.name}/episode")
    assert (answer.headers["content-type"], answer.content) == ("application/x-protobuf", b"arrays")


async def test_a_start_state_of_a_run_without_any_is_refused(api, run_id):
    refused = await api.post(f"/v1/evaluations:replay?run={run_id}&start=push,+seed+1")
    assert refused.status_code == 422 and "workflow: embodied" in problems(refused)["start"]
    assert (await api.post("/v1/evaluations:replay?run=none&start=push")).status_code == 404


def test_an_episode_is_told_action_by_action(tmp_path):
    valid_TC = np.array([[True, True], [True, False]])
    episode = Episode(
        observation={},
        sampled={"actions": np.zeros((2, 2, 1), np.float32)},
        executed_TCA=np.array([[[1.0], [2.0]], [[3.0], [9.0]]], np.float32),
        valid_TC=valid_TC,
        log_probs_TCA=np.zeros((2, 2, 1), np.float32),
        rewards_TC=np.array([[0.0, 0.5], [1.0, 9.0]], np.float32),
        successes_TC=np.array([[False, False], [True, False]]),
        terminated=True,
        truncated=False,
        values_T=np.array([0.25, 0.75], np.float32),
    )
    path = tmp_path / "0001-0-push-success.episode"
    path.write_bytes(encode_episode(episode).SerializeToString())
    told = steps_of(read_episode(path))
    assert (told.actions, told.rewards, told.successes) == (
        [[1.0], [2.0], [3.0]],
        [0.0, 0.5, 1.0],
        [False, False, True],
    )
    assert (told.chunk_starts, told.values) == ([0, 2], [0.25, 0.75])
    path.write_bytes(b"no message")
    with pytest.raises(ValueError, match=r"0001-0-push-success\.episode holds no episode"):
        read_episode(path)


async def test_a_long_list_of_runs_lets_others_in_and_leaves_out_what_is_deleted_meanwhile(monkeypatch):
    """A thousand archived runs are read from a thousand files."""
    ended = {f"run-{number}": EndedRun("SUCCEEDED", 0.0) for number in range(100)}
    event_log = SimpleNamespace(state=SimpleNamespace(runs={}, ended=ended))
    reads = Reads(event_log, None, None, None, SimpleNamespace(tags=lambda name: []))

    async def summary(run, columns):
        return SimpleNamespace(id=run)

    monkeypatch.setattr(reads, "run", lambda name: name)
    monkeypatch.setattr(reads, "_summary", summary)
    monkeypatch.setattr(reads, "newest_first", lambda: list(ended))
    asked = asyncio.create_task(reads.summaries(100, "", frozenset(), ""))
    turns = 0
    while not asked.done():
        await asyncio.sleep(0)
        turns += 1
        ended.pop("run-99", None)
    shown, _, _ = await asked
    assert turns >= 5 and [each.id for each in shown] == [f"run-{number}" for number in range(99)]
