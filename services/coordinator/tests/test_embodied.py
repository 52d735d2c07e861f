"""Runs of robot policies: what the spaces say of a policy, who simulates what, and lost simulators."""

import asyncio
import json

import numpy as np
import pytest
from embodied_parts import Robots, Scaled, embodied
from headrace.common.v1 import common_pb2 as common
from headrace.simulator.v1 import simulator_pb2 as simulator
from headrace_coordinator.domain import events as ev
from headrace_coordinator.run.simulators.policy_fit import fit, read_policy_file
from headrace_coordinator.run.simulators.pools import BLOB_BYTES, divide
from headrace_coordinator.run.step.receiving import FEWEST_IN_A_ROW
from headrace_coordinator.run.step.trajectories import sampled
from headrace_schema.problems import Impossible
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_schema.spec import RunSpec
from headrace_servicekit.rpc.digests import trajectory_digest
from headrace_servicekit.rpc.tensors import encode_tensor
from headrace_simulation.fleet.rollout import Rollout
from headrace_simulation.virtual_time import run_virtual
from submission_parts import checked

FLOAT, PIXEL = common.DATA_TYPE_FLOAT32, common.DATA_TYPE_UINT8


def pool(**more: object) -> simulator.OpenPoolResponse:
    spaces = [
        simulator.Space(name="tool", data_type=FLOAT, shape=[3]),
        simulator.Space(name="arm", data_type=FLOAT, shape=[2, 2]),
        simulator.Space(name="front", data_type=PIXEL, shape=[48, 64, 3]),
    ]
    action = simulator.Space(
        data_type=FLOAT,
        shape=[2],
        low=encode_tensor(np.array([-2, -np.inf], np.float32)),
        high=encode_tensor(np.array([2, 1], np.float32)),
    )
    return simulator.OpenPoolResponse(observation_spaces=spaces, **{"action_space": action, **more})


def section(**more: object) -> EnvironmentSection:
    return EnvironmentSection.model_validate({"tasks": ["a"], **more})


def test_a_new_policy_takes_its_sizes_from_the_environment():
    found = fit({"kind": "mlp", "hidden": [8]}, section(), {"a": pool()})
    bounds = {"low": [-2.0, None], "high": [2.0, None]}
    assert found.policy == {"kind": "mlp", "hidden": [8], "state_size": 7, "bounds": bounds}
    assert (found.state, found.cameras) == (["arm", "tool"], {})


def test_a_cnn_takes_pictures_too_and_a_user_chooses_what_is_read():
    found = fit({"kind": "cnn"}, section(state=["tool"]), {"a": pool()})
    assert found.policy is not None
    assert {key: found.policy[key] for key in ("state_size", "cameras", "height", "width")} == {
        "state_size": 3,
        "cameras": ["front"],
        "height": 48,
        "width": 64,
    }
    assert (found.state, found.cameras) == (["tool"], {"front": "front"})


def test_a_policy_of_a_directory_is_left_as_it_is():
    found = fit(None, section(cameras={"primary": "front"}), {"a": pool()})
    assert (found.policy, found.state, found.cameras) == (None, None, {"primary": "front"})


@pytest.mark.parametrize(
    ("policy", "environment", "pools", "key"),
    [
        ({"kind": "mlp", "state_size": 5}, {}, {"a": pool()}, "model.policy.state_size"),
        (
            {"kind": "mlp", "bounds": {"low": [-1], "high": [1]}},
            {},
            {"a": pool()},
            "model.policy.bounds",
        ),
        ({"kind": "mlp"}, {"state": ["gripper"]}, {"a": pool()}, "environment.state"),
        ({"kind": "cnn"}, {"cameras": {"x": "tool"}}, {"a": pool()}, "environment.cameras"),
        ({"kind": "cnn"}, {"cameras": {}}, {"a": pool()}, "environment.cameras"),
        (
            {"kind": "openvla"},
            {},
            {"a": pool(action_space=simulator.Space(categories=[3]))},
            "model.policy.kind",
        ),
        (
            {"kind": "mlp"},
            {},
            {"a": pool(), "b": pool(action_space=simulator.Space(shape=[7]))},
            "environment.tasks",
        ),
    ],
)
def test_what_does_not_fit_the_environment_is_named(policy, environment, pools, key):
    with pytest.raises(Impossible) as caught:
        fit(policy, section(**environment), pools)
    assert [each.key for each in caught.value.problems] == [key]


CATEGORIES = simulator.Space(
    data_type=FLOAT,
    shape=[3],
    low=encode_tensor(np.array([2, 0, -1], np.float32)),
    high=encode_tensor(np.array([4, 1, 1], np.float32)),
    categories=[3, 2, 0],
)


@pytest.mark.parametrize("action", [CATEGORIES, simulator.Space(categories=[4])])
def test_categories_among_the_actions_are_the_policys(action):
    found = fit({"kind": "mlp"}, section(), {"a": pool(action_space=action)})
    assert found.policy is not None
    counts = list(action.categories)
    bounds = (
        {"low": [2.0, 0.0, -1.0], "high": [4.0, 1.0, 1.0]}
        if len(counts) > 1
        else {"low": [0.0], "high": [3.0]}
    )
    assert (found.policy["categories"], found.policy["bounds"]) == (counts, bounds)


def seen(shape: list[int]) -> simulator.OpenPoolResponse:
    spaces = [
        simulator.Space(name="tool", data_type=FLOAT, shape=[3]),
        simulator.Space(name="front", data_type=PIXEL, shape=shape),
    ]
    return simulator.OpenPoolResponse(observation_spaces=spaces, action_space=pool().action_space)


@pytest.mark.parametrize("policy", [{"kind": "mlp"}, {"kind": "cnn"}, None])
def test_images_with_channels_first_are_named_with_the_remedy(policy):
    with pytest.raises(Impossible, match="moveaxis") as caught:
        fit(policy, section(), {"a": seen([3, 64, 64])})
    assert "a shows 'front' with shape 3 x 64 x 64" in str(caught.value)
    if policy == {"kind": "mlp"}:  # A user may read it as numbers, or leave it out.
        assert fit(policy, section(cameras={}), {"a": seen([3, 64, 64])}).state is not None


@pytest.mark.parametrize("channels", [1, 4, 12])
def test_images_of_any_channels_are_a_cnns_and_no_other_policys(channels):
    found = fit({"kind": "cnn"}, section(), {"a": seen([84, 80, channels])})
    assert found.policy is not None
    assert {key: found.policy[key] for key in ("height", "width", "channels")} == {
        "height": 84,
        "width": 80,
        "channels": channels,
    }
    with pytest.raises(Impossible, match=f"84 x 80 x {channels}") as caught:
        fit({"kind": "openvla"}, section(), {"a": seen([84, 80, channels])})
    assert [each.key for each in caught.value.problems] == ["environment.cameras"]


def test_an_image_that_is_named_as_state_is_read_as_numbers_and_is_no_camera():
    found = fit({"kind": "mlp"}, section(state=["front", "tool"]), {"a": seen([7, 7, 3])})
    assert found.policy is not None and found.policy["state_size"] == 7 * 7 * 3 + 3
    with pytest.raises(Impossible, match="no images"):
        fit({"kind": "cnn"}, section(state=["front", "tool"]), {"a": seen([7, 7, 3])})
    with pytest.raises(Impossible, match="from 4 x 4 on"):
        fit({"kind": "cnn"}, section(), {"a": seen([3, 5, 3])})


def test_an_mlp_that_would_see_images_alone_is_told_so():
    spaces = [simulator.Space(name="front", data_type=PIXEL, shape=[48, 64, 3])]
    seen = simulator.OpenPoolResponse(observation_spaces=spaces, action_space=pool().action_space)
    with pytest.raises(Impossible, match="an mlp reads numbers, and a shows images alone") as caught:
        fit({"kind": "mlp"}, section(), {"a": seen})
    assert [each.key for each in caught.value.problems] == ["model.policy.kind"]


WRITTEN = {"kind": "openvla_oft", "bounds": {"low": [-1, -1], "high": [1, 1]}, "cameras": ["primary"]}
SEEN = {"state": ["tool"], "cameras": {"primary": "front"}}


@pytest.mark.parametrize(
    ("written", "environment", "keys"),
    [
        ({}, SEEN, []),
        ({"proprio": {"low": [0, 0, 0], "high": [1, 1, 1]}}, SEEN, []),
        ({"proprio": {"low": [0, 0], "high": [1, 1]}}, SEEN, ["environment.state"]),
        ({"kind": "mlp", "state_size": 9, "cameras": []}, {}, ["environment.state"]),
        ({"kind": "pi0", "state": {"low": [0] * 7, "high": [1] * 7}}, {**SEEN, "state": None}, []),
        ({"bounds": {"low": [-1] * 7, "high": [1] * 7}}, SEEN, ["model.path"]),
        ({"cameras": ["primary", "wrist"]}, SEEN, ["environment.cameras"]),
        ({}, {"state": []}, ["environment.cameras"]),
        ({"kind": "cnn", "height": 48, "width": 64}, SEEN, []),
        ({"kind": "cnn", "height": 64, "width": 64}, SEEN, ["environment.options"]),
        ({"kind": "cnn", "channels": 4}, SEEN, ["environment.cameras"]),
        ({"kind": "cnn", "categories": [2, 0]}, SEEN, ["model.path"]),
    ],
)
def test_what_a_directory_says_of_its_policy_has_to_fit(written, environment, keys, tmp_path):
    (tmp_path / "policy.json").write_text(json.dumps({**WRITTEN, **written}))
    problems = []
    try:
        fit(None, section(**environment), {"a": pool()}, read_policy_file(str(tmp_path)))
    except Impossible as impossible:
        problems = [each.key for each in impossible.problems]
    assert problems == keys


def test_environments_are_divided_evenly_and_each_rollout_has_every_task():
    pools = divide(16, ["r0", "r1"], ["a", "b"], ["s0", "s1", "s2"])
    assert sum(pools.values()) == 16
    assert {sum(n for (_, who, _), n in pools.items() if who == r) for r in ("r0", "r1")} == {8}
    assert {(who, task) for _, who, task in pools} == {(r, t) for r in ("r0", "r1") for t in ("a", "b")}
    loads = [sum(n for (where, _, _), n in pools.items() if where == s) for s in ("s0", "s1", "s2")]
    assert max(loads) - min(loads) <= 1
    assert sum(divide(1, ["r0"], ["a", "b"], ["s0"]).values()) == 2


def test_executed_actions_count_as_tokens():
    episode = common.Trajectory()
    branch = episode.branches.add()
    branch.segments.add().tokens.token_ids.extend([1, 2, 3])
    branch.segments.add(policy_number=4).actions.valid_mask.CopyFrom(
        encode_tensor(np.array([[True, True], [True, False]]))
    )
    assert sampled(episode) == (3, [(4, 3)])


def test_an_embodied_run_trains_on_episodes_and_leaves_nothing_open():
    world = Robots(1)
    outcome = run_virtual(world.live())
    assert (outcome.state, outcome.recoveries) == ("SUCCEEDED", 0)
    assert outcome.trained + outcome.dropped == 6 * 8
    assert outcome.trained > outcome.dropped
    assert "Generate" not in world.calls
    (fitted,) = world.events(ev.PolicyFitted)
    assert fitted.policy["state_size"] == 3
    assert not any(i.pools for i in world.living("simulator"))


@pytest.mark.parametrize("hosts", [1, 2])
def test_pictures_go_through_shared_memory_where_simulator_and_rollout_share_a_host(hosts):
    world = Robots(1)
    world.hosts = [f"host{index}" for index in range(hosts)]
    run_virtual(world.live())
    pools = [r for r in world.requests if isinstance(r, simulator.OpenPoolRequest)]
    asked = {r.blob_bytes for r in pools if "trial" not in r.header.run}
    assert asked == ({BLOB_BYTES} if hosts == 1 else {BLOB_BYTES, 0})


@pytest.mark.parametrize("seed", range(4))
def test_a_lost_simulator_costs_no_step_and_no_recovery(seed):
    world = Robots(seed, strikes=3)
    outcome = run_virtual(world.live())
    assert (outcome.state, outcome.recoveries) == ("SUCCEEDED", 0)
    assert outcome.trained + outcome.dropped == 6 * 8
    assert outcome.trained > outcome.dropped
    assert len(world.events(ev.PolicyFitted)) == 1
    assert sum(i.KIND == "simulator" for i in world.instances.values()) > 2


@pytest.mark.parametrize("seed", range(4))
def test_simulators_come_and_go_in_the_middle_of_a_run(seed):
    world = Scaled(seed)
    outcome = run_virtual(world.live())
    assert (outcome.state, outcome.recoveries) == ("SUCCEEDED", 0)
    assert outcome.trained + outcome.dropped == 6 * 8
    assert outcome.trained > outcome.dropped
    assert [i.name for i in world.living("simulator")] == ["simulator-9"]
    environments = [request.count for request in world.requests if hasattr(request, "max_episode_steps")]
    assert sum(environments) > 8, "environments moved"


def test_instances_are_told_the_whole_policy():
    world = Robots(2)
    run_virtual(world.live())
    told = [request.config_json for request in world.requests if hasattr(request, "config_json")]
    of_policy = [text for text in told if '"policy"' in text]
    assert len(of_policy) == 2 + world.spec.trainer.ranks
    assert all('"state_size":3' in text for text in of_policy)


WORDS = "environment 3 of reach (pools/1 at simulator-0): its process was killed by signal 11"


def fails_at(monkeypatch, prompts, failing=lambda: None):
    """Episodes of some prompts fail, except those of evaluations; `failing` is told."""
    make = Rollout._make

    async def dies(self, opening, group, sample, done):
        failing()
        if opening.evaluation or group.prompt_ordinal not in prompts:
            return await make(self, opening, group, sample, done)
        key = common.SlotKey(prompt_ordinal=group.prompt_ordinal, sample_index=sample.sample_index)
        failed = common.Trajectory(
            sample=key, attempt=sample.attempt, finish_reason=common.FINISH_REASON_ERROR
        )
        failed.body_digest = trajectory_digest(failed)
        failed.completion_text = json.dumps({"return": 0.0, "success": False, "steps": 0, "error": WORDS})
        done.put_nowait(failed)

    monkeypatch.setattr(Rollout, "_make", dies)


def test_what_an_environment_raised_is_in_the_event_that_drops_its_group(monkeypatch):
    fails_at(monkeypatch, {1})
    world = Robots(1)
    run_virtual(world.live())
    (dropped,) = [event for event in world.events(ev.GroupDropped) if event.prompt == 1]
    assert dropped.detail == f"{WORDS}; sample 0 failed 3 times"


def test_environments_that_fail_at_every_episode_end_the_run_by_their_words(monkeypatch):
    """Long before its first step is over: it has far more groups than are tried."""
    world = Robots(1)
    fails_at(
        monkeypatch, range(10_000), lambda: world.users.doomed.update(world.coordinator.event_log.state.runs)
    )
    algorithm = world.spec.algorithm.model_copy(update={"prompts_per_step": 512})
    world.spec = world.spec.model_copy(update={"algorithm": algorithm})
    outcome = run_virtual(world.live())
    last = world.events(ev.RunStateChanged)[-1]
    dropped = world.events(ev.GroupDropped)
    assert outcome.state == "FAILED" and len(dropped) == max(FEWEST_IN_A_ROW, world.spec.environment.count)
    assert last.reason.startswith(WORDS) and last.reason.endswith("(environment.tasks)")


def test_environments_that_fail_now_and_then_end_no_run(monkeypatch):
    fails_at(monkeypatch, range(0, 10_000, 16))
    world = Robots(1)
    world.spec = embodied(1, steps=20)
    outcome = run_virtual(world.live())
    dropped = {event.prompt for event in world.events(ev.GroupDropped)}
    assert outcome.state == "SUCCEEDED" and len(dropped) > world.spec.environment.count


class PicturesAlone(Robots):
    """Its simulators make environments that show pictures alone, once a run is at work."""

    found: list[str]

    async def trouble(self) -> None:
        while not self.events(ev.StepCommitted):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for each in self.living("simulator"):
            describe = each._describe

            def shown(number: int, *, conversation: bool, describe=describe) -> simulator.OpenPoolResponse:
                found = describe(number, conversation=conversation)
                del found.observation_spaces[:]
                found.observation_spaces.add(name="front", data_type=PIXEL, shape=[48, 64, 3])
                return found

            each._describe = shown
        fields = self.spec.model_dump(mode="json", exclude_unset=True)
        self.found = [each.key for each in await checked(self.coordinator, RunSpec(**fields))]


def test_pictures_that_an_mlp_does_not_see_are_refused_before_there_is_a_run():
    world = PicturesAlone(1)
    run_virtual(world.live())
    assert world.found == ["model.policy.kind"]


class Submitted(Robots):
    """While the run is at work, others are submitted that state sizes."""

    found: list[list[str]]

    async def trouble(self) -> None:
        while not self.events(ev.StepCommitted):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        self.found = []
        for size in (5, 3):
            fields = self.spec.model_dump(mode="json", exclude_unset=True)
            fields["model"]["policy"]["state_size"] = size
            self.found.append([each.key for each in await checked(self.coordinator, RunSpec(**fields))])


def test_sizes_that_are_not_the_environments_are_refused_at_submission():
    world = Submitted(1)
    outcome = run_virtual(world.live())
    assert world.found == [["model.policy.state_size"], []]
    assert outcome.state == "SUCCEEDED"
    tried = [
        r for r in world.requests if isinstance(r, simulator.OpenPoolRequest) and "trial" in r.header.run
    ]
    assert [request.count for request in tried] == [1, 1, 1], "the first run was asked about too"
    assert not any(i.pools for i in world.living("simulator"))
