"""What a fleet cannot satisfy is refused at submission, with the nearest value that it can."""

import json
from dataclasses import replace

import pytest
from headrace_coordinator.api.submission.fleet_view import FleetView
from headrace_schema.resources.fleet import InstanceView
from submission_parts import FLEET, OPTIONS, SCHEMA, problems


def test_a_spec_that_fits_has_no_problem():
    assert problems() == {}
    assert (
        problems({"placement": {"mode": "disaggregated", "rollout": ["cpu:0"], "trainer": ["h/cpu:1"]}}) == {}
    )


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"rollout": {"engine": "transformer"}}, "rollout.engine", "did you mean transformers?"),
        ({"trainer": {"backend": "fdsp"}}, "trainer.backend", "did you mean fsdp?"),
        ({"algorithm": {"name": "gpro"}}, "algorithm.name", "did you mean grpo?"),
        ({"algorithm": {"options": {"cpa": 1}}}, "algorithm.options.cpa", "unknown key; did you mean cap?"),
        ({"algorithm": {"options": {"cap": 0}}}, "algorithm.options.cap", "use a number above 0"),
        ({"reward": {"scorers": [{"name": "exakt"}]}}, "reward.scorers[0].name", "did you mean exact?"),
        (
            {"reward": {"scorers": [{"name": "exact"}], "evaluation": [{"name": "last-number"}]}},
            "reward.evaluation[0].name",
            "did you mean last_number?",
        ),
        ({"rollout": {"instances": 3}}, "rollout.instances", "the nearest valid value is 2"),
        ({"trainer": {"ranks": 2}}, "trainer.ranks", "2 trainer instances are wanted and 1 are ready"),
        (
            {"placement": {"rollout": ["cpu:7"], "trainer": ["cpu:7"]}},
            "placement.rollout[0]",
            "there is no device 'cpu:7'; did you mean cpu:",
        ),
        (
            {"placement": {"mode": "disaggregated"}, "rollout": {"instances": 2}},
            "placement.mode",
            "needs 3 devices (2 to generate and 1 to learn) and there are 2",
        ),
        ({"data": {"source": "copy-digits"}}, "data.source", "did you mean 'copy_digits'?"),
        (
            {"data": {"source": "copy_digits", "heldout": 1000}},
            "data.heldout",
            "the nearest valid value is 999",
        ),
        (
            {"data": {"source": "copy_digits", "heldout": 9}, "evaluation": {"baseline_prefill": "{e} ="}},
            "evaluation.baseline_prefill",
            "items have no field 'e'",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes, key, words):
    assert words in problems(changes)[key]


def test_several_problems_are_named_at_once():
    found = problems({"rollout": {"engine": "x", "instances": 9}, "data": {"source": "x"}})
    assert {"rollout.engine", "rollout.instances", "placement.mode", "data.source"} == set(found)


def test_a_users_own_scorer_is_left_to_the_reward_service():
    assert problems({"reward": {"scorers": [{"name": "mine/score.py:by_length"}]}}) == {}


def test_an_empty_fleet_says_how_to_start_one():
    found = problems(fleet=FleetView({}, {}, []))
    assert set(found) == {"rollout.instances", "trainer.ranks", "reward.scorers", "placement.mode"}
    assert "headrace scale trainer=1" in found["trainer.ranks"]


def test_the_fleet_is_the_union_of_ready_instances():
    def instance(name: str, state: str, engines: list[str], device: str) -> InstanceView:
        return InstanceView(
            name=name,
            incarnation=name,
            kind="rollout",
            state=state,
            host="h",
            address="",
            devices=[device],
            capabilities={"engines": engines},
            run="",
            resident_memory_bytes=0,
            last_heartbeat_age_s=0,
        )

    fleet = FleetView.of(
        [
            instance("a", "READY", ["x"], "h/cpu:0"),
            instance("b", "READY", ["x", "y"], "h/cpu:0"),
            instance("c", "LOST", ["z"], "h/cpu:1"),
        ]
    )
    assert fleet.names("rollout", "engines") == {"x", "y"}
    assert fleet.instances == {"rollout": 2}
    assert fleet.devices == ["h/cpu:0"]


def test_a_warm_up_needs_answers(tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text('{"question": "a", "answer": ""}\n{"question": "b", "answer": "c"}\n')
    data = {"source": "jsonl", "options": {"path": str(path)}}
    found = problems({"data": data, "trainer": {"warmup": {"steps": 3}}})
    assert "1 of 2 training items have no answer" in found["trainer.warmup.steps"]
    assert problems({"data": data}) == {}


def test_a_warm_up_fits_the_message_that_opens_the_run(tmp_path):
    path = tmp_path / "items.jsonl"
    rows = [{"question": f"{number} {'x' * 900_000}", "answer": "c"} for number in range(55)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": "jsonl", "options": {"path": str(path)}}
    found = problems({"data": data, "trainer": {"warmup": {"steps": 3}}})
    assert "the 55 training items have 50 MB as examples" in found["trainer.warmup.steps"]
    assert problems({"data": data}) == {}


def test_options_must_suit_one_of_the_releases_that_run():
    newer = SCHEMA.replace("cap", "limit")
    trainer = {**FLEET.capabilities["trainer"], "algorithm_options": OPTIONS | {f"grpo={newer}"}}
    fleet = replace(FLEET, capabilities={**FLEET.capabilities, "trainer": trainer})
    assert problems({"algorithm": {"options": {"limit": 2}}}, fleet) == {}
    assert list(problems({"algorithm": {"options": {"both": 2}}}, fleet)) == ["algorithm.options.both"]
    # No schema: the service checks when the run opens.
    assert problems({"rollout": {"engine_options": {"any": 1}}}) == {}


def test_an_algorithm_that_is_right_on_policy_only_refuses_older_samples_at_submission():
    trainer = {
        **FLEET.capabilities["trainer"],
        "algorithms": frozenset({"grpo", "mine"}),
        "algorithm_features": frozenset({"grpo:off_policy"}),
    }
    fleet = replace(FLEET, capabilities={**FLEET.capabilities, "trainer": trainer})
    placement = {"mode": "disaggregated", "rollout": ["cpu:0"], "trainer": ["h/cpu:1"]}
    found = problems({"algorithm": {"name": "mine", "max_staleness": 1}, "placement": placement}, fleet)
    assert list(found) == ["algorithm.max_staleness"]
    assert "mine is right" in found["algorithm.max_staleness"] and "grpo" in found["algorithm.max_staleness"]
    assert problems({"algorithm": {"name": "mine"}, "placement": placement}, fleet) == {}
    assert problems({"algorithm": {"max_staleness": 1}, "placement": placement}, fleet) == {}
    assert problems({"algorithm": {"max_staleness": 1}, "placement": placement}) == {}, (
        "no features are known"
    )


JOINT = {"rollout": 0.6, "simulator": 0.4}
ROBOTS = replace(
    FLEET,
    capabilities={"simulator": {"backends": frozenset({"gymnasium"})}},
    instances={**FLEET.instances, "simulator": 1},
    devices=["h/cpu:0", "h/cpu:1", "h/cpu:2"],
    simulate={"h/cpu:1", "h/cpu:2"},
)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({"rollout": "0", "simulator": "1", "trainer": "2"}, {}),
        ({"rollout,simulator,trainer": "all"}, {}),
        (
            {"rollout,trainer": "1", "simulator": "0"},
            {"placement.simulator[0]": "no simulator instance sees '0'"},
        ),
        ({"rollout,trainer": "1", "simulator": "7"}, {"placement.simulator[0]": "there is no device '7'"}),
        (
            {"mode": "disaggregated", "rollout": "0", "simulator": "cpu:1", "trainer": "1"},
            {"placement.simulator": "h/cpu:1 learns too"},
        ),
        ({"rollout,trainer": "1", "simulator": "cpu:1"}, {"placement.simulator": "1 is named for a rollout"}),
        ({"rollout,trainer,simulator": "1", "joint": JOINT}, {}),
    ],
)
def test_devices_of_simulators_must_be_ones_that_they_see(placement, expected):
    robots = {
        "workflow": "embodied",
        "model": {"policy": {"kind": "mlp"}},
        "environment": {"tasks": ["reach"], "count": 8},
        "data": {},
        "reward": {"scorers": [{"name": "episode"}]},
        "placement": placement,
    }
    found = {key: text for key, text in problems(robots, ROBOTS).items() if key.startswith("placement")}
    assert found.keys() == expected.keys()
    assert all(words in found[key] for key, words in expected.items())


TASKS = 'metaworld=["push", "reach"]', 'libero=["libero_spatial/0", "libero_spatial/1"]'


@pytest.mark.parametrize(
    ("backend", "tasks", "key", "words"),
    [
        ("metaworld", ["push", "raech"], "environment.tasks[1]", "did you mean reach?"),
        ("metaworld", ["reach@hard", "puhs@hard"], "environment.tasks[1]", "did you mean push?"),
        ("libero", ["libero_spatail/0"], "environment.tasks[0]", "did you mean libero_spatial/0?"),
        ("libero", ["libero_spatial/1", "libero_spatial/7"], "environment.tasks[1]", "libero_spatial/"),
        ("metaworld", ["libero_spatial/0"], "environment.tasks[0]", "no simulator instance has the task"),
        (
            "maniskill",
            ["PushCube-v1"],
            "environment.backend",
            "start the fleet with headrace up --sim maniskill",
        ),
        ("metaworld", ["push/7"], "", ""),
        ("metaworld", ["reach-v3", "push"], "", ""),
        ("libero", ["libero_spatial/pick_up_the_bowl"], "", ""),
        ("gymnasium", ["anything"], "", ""),
        ("metaworld", ["own.py:make_env"], "", ""),
    ],
)
def test_a_task_that_no_simulator_has_is_refused_with_the_nearest(backend, tasks, key, words):
    variants = {"hard": {"execution": {"action_noise": 0.1}}} if "@" in tasks[0] else {}
    robots = {
        "workflow": "embodied",
        "model": {"policy": {"kind": "mlp"}},
        "environment": {"backend": backend, "tasks": tasks, "count": 8, "variants": variants},
        "data": {},
        "reward": {"scorers": [{"name": "episode"}]},
    }
    offered = {"backends": frozenset({"metaworld", "libero", "gymnasium"}), "tasks": frozenset(TASKS)}
    fleet = replace(ROBOTS, capabilities={"simulator": offered})
    found = {name: text for name, text in problems(robots, fleet).items() if name.startswith("environment")}
    assert [*found] == ([key] if key else [])
    assert words in found.get(key, "")


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"backend": "maniskill", "options": {"sim_backend": "gpu"}}, "environment.options.sim_backend"),
        ({"backend": "maniskill", "vectorized": True}, "environment.vectorized"),
        ({"backend": "isaaclab", "vectorized": True}, "environment.backend"),
        ({"backend": "maniskill", "options": {"sim_backend": "physx_cpu"}, "vectorized": True}, ""),
        ({"backend": "maniskill"}, ""),
        ({"backend": "gymnasium", "vectorized": True}, ""),
    ],
)
def test_a_simulation_on_a_gpu_needs_a_simulator_that_sees_one(section, key):
    robots = {
        "workflow": "embodied",
        "model": {"policy": {"kind": "mlp"}},
        "environment": {"tasks": ["own.py:make_env"], "count": 8, **section},
        "data": {},
        "reward": {"scorers": [{"name": "episode"}]},
    }
    offered = {"simulator": {"backends": frozenset({section["backend"]})}}
    without = replace(ROBOTS, capabilities=offered, instances={**ROBOTS.instances, "simulator": 1})
    seen = replace(without, simulate=["GPU-8f2a/gpu:0"])
    found = {name for name in problems(robots, without) if name.startswith("environment")}
    assert found == ({key} if key else set())
    assert not [name for name in problems(robots, seen) if name.startswith("environment")]


def test_a_run_that_works_ahead_needs_devices_for_both_sides_where_auto_chooses():
    one = replace(FLEET, devices=["h/cpu:0"])
    assert "placement.mode" not in problems(fleet=one), "in turns one is enough"
    found = problems({"algorithm": {"max_staleness": 1}}, one)["placement.mode"]
    assert "needs 2 devices (1 to generate and 1 to learn) and there are 1" in found
    assert "set algorithm.max_staleness: 0 and placement.mode: collocated" in found
