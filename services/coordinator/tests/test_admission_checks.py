"""What a fleet cannot satisfy is refused at submission, with the nearest value that it can."""

import json
from dataclasses import replace

import pytest
from headrace_coordinator.api.submission.fleet_view import FleetView
from headrace_coordinator.api.submission.rules import answers, problems_of
from headrace_coordinator.api.submission.submission import Evaluated, Submission
from headrace_coordinator.suites import open_suite
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import sentence
from headrace_schema.resources.views import InstanceView
from headrace_schema.spec import RunSpec
from submission_parts import submission_of

SCHEMA = '{"additionalProperties": false, "properties": {"cap": {"type": "number", "exclusiveMinimum": 0}}}'
OPTIONS = frozenset({f"grpo={SCHEMA}", "grpo-like={}"})
FLEET = FleetView(
    capabilities={
        "rollout": {"engines": frozenset({"transformers", "vllm"})},
        "trainer": {
            "backends": frozenset({"fsdp"}),
            "algorithms": frozenset({"grpo"}),
            "algorithm_options": OPTIONS,
        },
        "reward": {"scorers": frozenset({"exact", "last_number"})},
    },
    instances={"rollout": 2, "trainer": 1, "reward": 1},
    devices=["h/cpu:0", "h/cpu:1"],
)


def problems(changes: dict | None = None, fleet: FleetView = FLEET) -> dict[str, str]:
    spec = {
        "model": {"path": "owner/model"},
        "data": {"source": "copy_digits", "heldout": 10},
        "reward": {"scorers": [{"name": "exact"}]},
        **(changes or {}),
    }
    found = problems_of(submission_of(RunSpec.model_validate(spec), fleet))
    return {item.key: sentence(item) for item in found}


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


def test_options_must_suit_one_of_the_releases_that_run():
    newer = SCHEMA.replace("cap", "limit")
    trainer = {**FLEET.capabilities["trainer"], "algorithm_options": OPTIONS | {f"grpo={newer}"}}
    fleet = replace(FLEET, capabilities={**FLEET.capabilities, "trainer": trainer})
    assert problems({"algorithm": {"options": {"limit": 2}}}, fleet) == {}
    assert list(problems({"algorithm": {"options": {"both": 2}}}, fleet)) == ["algorithm.options.both"]
    # No schema: the service checks when the run opens.
    assert problems({"rollout": {"engine_options": {"any": 1}}}) == {}


def test_an_algorithm_that_is_right_on_policy_only_refuses_older_samples_at_submission():
    """One of somebody else's: of the built-in ones the schema says so."""
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
    # Trainers that register no features say it when the run opens.
    assert problems({"algorithm": {"max_staleness": 1}, "placement": placement}) == {}


ENGINES = {
    "engines": frozenset({"transformers", "vllm"}),
    "engine_features": frozenset({"transformers:deterministic", "vllm:resume_from_prefix"}),
}
BOTH = replace(FLEET, capabilities={**FLEET.capabilities, "rollout": ENGINES})
GPUS = replace(BOTH, devices=["h/gpu:0", "h/gpu:1"])
ONE = replace(FLEET, capabilities={**FLEET.capabilities, "rollout": {"engines": frozenset({"transformers"})}})


def test_a_need_that_the_engine_lacks_names_key_and_engine():
    wanted = {"deterministic": True, "rollout": {"engine": "vllm"}}
    (found,) = problems(wanted, BOTH).items()
    assert found[0] == "deterministic"
    assert "rollout.engine: vllm cannot" in found[1] and "set rollout.engine: transformers" in found[1]
    assert problems({"deterministic": True}, BOTH) == {}
    assert problems(wanted, FLEET) == {}, "instances of a release that registers no features"


def test_an_engine_that_installs_between_answers_only_is_told_how_older_answers_are_made_with_it():
    stale = {"algorithm": {"max_staleness": 1}}
    found = problems({**stale, "rollout": {"engine": "vllm"}}, BOTH)
    assert "set rollout.install: abort_and_resume or drain" in found["rollout.install"]
    between = {"engine": "vllm", "install": "drain"}
    assert "rollout.install" not in problems({**stale, "rollout": between}, BOTH)


def test_what_a_gpu_cannot_do_is_refused_with_what_would_fit():
    resident = {"placement": {"mode": "collocated", "memory": "resident"}}
    assert "set placement.memory: offloaded" in problems(resident, GPUS)["placement.memory"]
    assert (
        "collocated with trainer.helpers"
        in problems({"placement": {"mode": "hybrid"}}, GPUS)["placement.mode"]
    )
    assert problems(resident, BOTH) == {}, "on CPU slots"


SPAN = "rollout.engine_options.tensor_parallel_size"


def spans(size, **rollout):
    return {"rollout": {"engine": "vllm", "engine_options": {"tensor_parallel_size": size}, **rollout}}


def test_engines_that_span_more_gpus_than_there_are_name_what_fits():
    eight = replace(
        BOTH,
        devices=[f"h/gpu:{n}" for n in range(8)],
        rollouts_see=[4, 8],
        instances={"rollout": 4, "trainer": 4, "reward": 1},
    )
    apart = {"placement": {"mode": "disaggregated"}}
    assert problems(spans(8), eight) == problems({**spans(4, instances=2)}, eight) == {}
    assert "the nearest valid value is 8" in problems(spans(16), eight)[SPAN]
    found = problems({**spans(4, instances=2), **apart}, eight)
    assert "needs 9 devices (8 to generate and 1 to learn) and there are 8" in found["placement.mode"]
    assert "take rollout.instances: 1" in found["placement.mode"]
    named = {"placement": {"rollout": ["gpu:0", "gpu:1"], "trainer": ["gpu:7"]}}
    assert "need 4, and 2 are named" in problems({**spans(4), **named}, eight)["placement.rollout"]
    helpers = {**spans(2, helpers=1), **apart}
    assert (
        "leave rollout.engine_options.tensor_parallel_size out" in problems(helpers, eight)["rollout.helpers"]
    )


def test_gpus_that_cannot_divide_a_models_heads_are_refused(tmp_path):
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(heads))
    (tmp_path / "model.safetensors").touch()
    model = {"model": {"path": str(tmp_path)}}
    assert problems({**spans(4), **model}, BOTH)[SPAN].endswith("set one of 1, 2, 14")
    assert problems({**spans(2), **model}, BOTH) == {}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": heads}))
    assert SPAN in problems({**spans(7), **model}, BOTH), "heads of keys and values neither"
    assert SPAN not in problems(spans(3), BOTH), "an id's configuration is the engine's to read"


def test_answers_that_the_engine_would_sample_otherwise_are_refused():
    features = frozenset(
        {"sglang:resume_from_prefix", "vllm:top_p_after_others", "vllm:penalty_counts_prompt"}
    )
    fleet = replace(FLEET, capabilities={"rollout": {"engine_features": features}})

    def refused(engine: str, **sampling: float) -> list[str]:
        model, suite = {"path": "owner/model"}, {"name": "items", "options": {"source": "copy_digits"}}
        asked = EvaluationSpec.model_validate({"model": model, "suite": suite, "sampling": sampling})
        evaluated = Evaluated(asked, open_suite(**suite), "owner/model")
        submission = Submission(spec_of(rollout={"engine": engine}), fleet, evaluated=evaluated)
        return [sentence(each) for each in answers(submission)]

    both = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    top_p, penalty = refused("sglang", **both)
    assert top_p.startswith("sampling.top_p") and "top_k: 0 and min_p: 0" in top_p
    assert penalty.startswith("sampling.repetition_penalty") and "set 1" in penalty
    assert refused("vllm", **both) == [] == refused("sglang", temperature=0.7, top_p=0.9)


def test_an_engine_that_nobody_has_installed_names_the_extra():
    found = problems({"rollout": {"engine": "vllm"}}, ONE)
    assert "install headrace-rollout[vllm]" in found["rollout.engine"]
    assert "set rollout.engine: transformers" in found["rollout.engine"]


def spec_of(**changes):
    made = {
        "model": {"path": "owner/model"},
        "data": {"source": "copy_digits"},
        "reward": {"scorers": [{"name": "exact"}]},
    }
    return RunSpec.model_validate(made | changes)


def settled(fleet, **changes):
    submission = submission_of(spec_of(rollout={"engine": "auto"}, **changes), fleet)
    assert problems_of(submission) == [] == problems_of(submission_of(submission.settled, fleet))
    return submission.settled.rollout.engine, submission.note


def test_auto_takes_what_is_installed_and_fits_and_says_why(tmp_path):
    assert settled(ONE) == (
        "transformers",
        "rollout.engine: auto takes transformers: no rollout instance has vllm or sglang installed",
    )
    assert settled(BOTH)[0] == "transformers" and "no GPU" in settled(BOTH)[1]
    name, why = settled(GPUS)
    assert name == "vllm" and why.startswith(
        "rollout.engine: auto takes vllm: it is installed and the run has GPUs;"
    )
    name, why = settled(GPUS, deterministic=True)
    assert name == "transformers" and "deterministic: true, which vllm cannot promise" in why
    (tmp_path / "config.json").write_text('{"layer_types": ["linear_attention", "full_attention"]}')
    (tmp_path / "model.safetensors").touch()
    name, why = settled(BOTH, model={"path": str(tmp_path)})
    assert name == "vllm" and "linear_attention layers" in why
    named = submission_of(spec_of(rollout={"engine": "transformers"}), BOTH)
    assert (named.settled, named.note) == (named.spec, "")


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


STAGES = {"generate": "rollout", "reply": "rollout", "score": "reward", "learn": "trainer"}
PATHS = ["generate reply turn", "reply generate turn", "generate score", "score learn"]


@pytest.mark.parametrize(
    ("placement", "instances", "expected"),
    [
        ({"rollout,trainer": "0", "reply": "1"}, 1, {}),
        (
            {"rollout,trainer": "0", "reply": "1,h/cpu:1"},
            2,
            {"placement.reply": "too few", "reply.instances": "3"},
        ),
        ({"rollout,trainer": "h/cpu:0", "reply": "0"}, 1, {"placement.reply": "h/cpu:0 generates too"}),
        ({"rollout,trainer": "0", "reply": "9"}, 1, {"placement.reply[0]": "there is no device '9'"}),
        (
            {"mode": "disaggregated", "rollout": "0", "reply": "cpu:1", "trainer": "1"},
            1,
            {"placement.reply": "h/cpu:1 learns too"},
        ),
    ],
)
def test_devices_for_replies_must_be_there_and_of_their_own(placement, instances, expected):
    edges = [dict(zip(("source", "target", "granularity"), path.split(), strict=False)) for path in PATHS]
    given = {
        "workflow": {"stages": {n: {"service": s} for n, s in STAGES.items()}, "edges": edges},
        "reply": {"instances": instances},
        "placement": placement,
    }
    found = problems(given)
    assert found.keys() == expected.keys(), found
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
    offered = {"backends": frozenset({backend}), "tasks": frozenset(TASKS)}
    fleet = replace(ROBOTS, capabilities={"simulator": offered})
    found = {name: text for name, text in problems(robots, fleet).items() if name.startswith("environment")}
    assert [*found] == ([key] if key else [])
    assert words in found.get(key, "")


def decided(fleet, **sections):
    submission = Submission(spec_of(**sections), fleet)
    return submission.settled, submission.note


def test_a_run_on_gpus_needs_no_option(tmp_path):
    spec, note = decided(GPUS)
    assert (spec.rollout.engine, spec.rollout.max_concurrency, spec.trainer.micro_batch_tokens) == (
        "vllm",
        256,
        2048,
    )
    assert "rollout.engine: auto takes vllm: it is installed and the run has GPUs" in note
    assert "on GPUs the defaults are rollout.max_concurrency: 256, trainer.micro_batch_tokens: 2048" in note
    again, _ = decided(GPUS, **{name: spec.model_dump()[name] for name in ("rollout", "trainer")})
    assert again.rollout == spec.rollout, "a fork keeps what was decided"


def test_what_a_spec_names_stays_and_cpus_keep_their_defaults():
    named = {
        "rollout": {"engine": "transformers", "max_concurrency": 8},
        "trainer": {"micro_batch_tokens": 512},
    }
    spec, note = decided(GPUS, **named)
    assert (spec.rollout.max_concurrency, spec.trainer.micro_batch_tokens, note) == (8, 512, "")
    assert spec.rollout.engine == "transformers"
    cpus, note = decided(replace(BOTH, devices=["h/cpu:0", "h/cpu:1"]))
    assert (cpus.rollout.engine, cpus.rollout.max_concurrency, note) == ("transformers", 64, "")
    assert cpus.trainer.micro_batch_tokens == 2048


@pytest.mark.parametrize(
    ("width", "layers", "checkpointing", "tokens"),
    [(896, 24, False, 16_384), (3584, 28, False, 4096), (3584, 28, True, 16_384), (8192, 80, False, 2048)],
)
def test_a_forward_on_a_gpu_is_as_large_as_its_activations_allow(
    tmp_path, width, layers, checkpointing, tokens
):
    config = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec, _ = decided(GPUS, model={"path": str(tmp_path)}, trainer={"gradient_checkpointing": checkpointing})
    assert spec.trainer.micro_batch_tokens == tokens


def test_heads_that_an_installed_engine_does_not_take_leave_the_built_in_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "num_attention_heads": 4}))
    spec, note = decided(GPUS, model={"path": str(tmp_path)})
    assert spec.rollout.engine == "transformers" and "heads have 16 numbers" in note


def test_a_run_that_works_ahead_needs_devices_for_both_sides_where_auto_chooses():
    one = replace(FLEET, devices=["h/cpu:0"])
    assert "placement.mode" not in problems(fleet=one), "in turns one is enough"
    found = problems({"algorithm": {"max_staleness": 1}}, one)["placement.mode"]
    assert "needs 2 devices (1 to generate and 1 to learn) and there are 1" in found
    assert "set algorithm.max_staleness: 0 and placement.mode: collocated" in found
