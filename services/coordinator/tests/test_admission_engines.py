"""Engines and devices that a fleet has not are refused at submission, and `auto` takes what it has."""

import json
from dataclasses import replace

import pytest
from headrace_coordinator.api.submission.rules import problems_of
from headrace_schema.problems import sentence
from headrace_schema.rules.table import conflicts
from submission_parts import BOTH, FLEET, GPUS, ONE, SPAN, evaluated, problems, spans, spec_of, submission_of


def test_a_need_that_the_engine_lacks_names_key_and_engine():
    wanted = {"deterministic": True, "rollout": {"engine": "vllm"}}
    (found,) = problems(wanted, BOTH).items()
    assert found[0] == "deterministic"
    assert "rollout.engine: vllm computes log-probs by kernels of its own" in found[1]
    assert "set rollout.engine: transformers" in found[1]
    assert problems({"deterministic": True}, BOTH) == {}
    assert problems(wanted, FLEET) == {}, "instances of a release that registers no features"
    beside = {"trainer": {"lora": {}}, "rollout": {"enable_lora": True}}
    found = problems(beside, BOTH)["rollout.enable_lora"]
    assert "transformers computes with no adapters" in found and "leave it out" in found
    assert "rollout.enable_lora" not in problems(beside, FLEET)


def test_an_engine_that_installs_between_answers_only_is_told_how_older_answers_are_made_with_it():
    stale = {"algorithm": {"max_staleness": 1}}
    found = problems({**stale, "rollout": {"engine": "vllm"}}, BOTH)
    assert "set rollout.install: abort_and_resume or drain" in found["rollout.install"]
    between = {"engine": "vllm", "install": "drain"}
    assert "rollout.install" not in problems({**stale, "rollout": between}, BOTH)


def test_what_a_gpu_cannot_do_is_refused_with_what_would_fit():
    resident = {"placement": {"mode": "collocated", "memory": "resident"}}
    assert "set placement.memory: offloaded" in problems(resident, GPUS)["placement.memory"]
    assert problems(resident, BOTH) == {}, "on CPU slots"


HYBRID = {"mode": "hybrid", "rollout": "0-1", "trainer": "2-3"}


@pytest.mark.parametrize(
    ("changed", "key", "words"),
    [
        ({"trainer": {"ranks": 2}}, "trainer.ranks", "set one for each GPU (4)"),
        ({"algorithm": {"max_staleness": 1}}, "algorithm.max_staleness", "sleep while answers are made"),
        ({"placement": {**HYBRID, "memory": "resident"}}, "placement.memory", "offloaded"),
    ],
)
def test_hybrid_on_gpus_wants_a_rank_on_each_and_one_step_at_a_time(changed, key, words):
    fleet = replace(
        GPUS, devices=[f"h/gpu:{n}" for n in range(4)], instances={"rollout": 2, "trainer": 4, "reward": 1}
    )
    spec = {"placement": HYBRID, "trainer": {"ranks": 4}, "algorithm": {"prompts_per_step": 4}}
    assert problems(spec, fleet) == {}
    whole = {**spec, "placement": {**HYBRID, "trainer": "0-3"}}
    assert problems(whole, fleet) == {}, "the trainer's devices may be said to be all"
    cores = replace(fleet, devices=[f"h/cpu:{n}" for n in range(4)])
    assert "generates too" in problems(whole, cores)["placement.trainer"]
    assert words in problems({**spec, **{k: {**spec[k], **v} for k, v in changed.items()}}, fleet)[key]


HOSTS = "rollout.engine_options.hosts"


def test_an_engine_over_hosts_names_what_it_needs():
    two = replace(
        BOTH,
        devices=[f"{host}/gpu:{n}" for host in "ab" for n in range(4)],
        rollouts_see=[4, 4],
        rollout_hosts=["a", "b"],
        instances={"rollout": 2, "trainer": 4, "reward": 1},
    )

    def over(size, hosts, **more):
        spec = spans(size, instances=hosts)
        spec["rollout"]["engine_options"]["hosts"] = hosts
        spec["placement"] = {"mode": "collocated"}
        return problems({**spec, **more}, two)

    assert over(8, 2) == {}
    assert f"set {HOSTS}: 2 and rollout.instances: 2" in problems(spans(8), two)[SPAN]
    assert "on 2" in over(6, 3)[HOSTS] and "headrace join" in over(6, 3)[HOSTS]
    for size, changes, problem in (
        (5, {}, rf"{HOSTS}: 5 devices cannot be divided among 2 hosts"),
        (8, {"trainer": {"helpers": 1}}, r"trainer\.helpers: .*answers prompts alone"),
    ):
        with pytest.raises(ValueError, match=problem):
            over(size, 2, **changes)
    odd = spans(8, instances=3)
    odd["rollout"]["engine_options"]["hosts"] = 2
    with pytest.raises(ValueError, match=r"rollout\.instances: .*the nearest valid value is 2"):
        problems(odd, two)


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


def test_models_with_devices_of_their_own_that_there_are_not_name_the_key():
    fleet = replace(BOTH, instances={**BOTH.instances, "simulator": 1})
    replier = {"path": "owner/frozen", "own_devices": True}
    talk = {
        "workflow": "agentic",
        "environment": {"tasks": ["exchange"], "roles": {"replier": replier}},
    }
    own = "environment.roles.replier.own_devices"
    assert problems(talk, fleet) == {}
    found = problems(talk, replace(fleet, devices=["h/cpu:0"]))
    assert "2 devices are wanted for a rollout instance, and one sees 1 at most" in found[own]
    found = problems({**talk, "placement": {"mode": "disaggregated"}}, fleet)
    assert "needs 3 devices (2 to generate and 1 to learn) and there are 2" in found["placement.mode"]
    gpus = replace(fleet, devices=[f"h/gpu:{n}" for n in range(8)], rollouts_see=[8])
    named = {"placement": {"rollout": "gpu:0-2", "trainer": "gpu:7"}}
    assert (
        f"of 4 devices need 4, and 3 are named; name more devices, or set {own}: false"
        in (problems({**talk, **spans(2), **named}, gpus)["placement.rollout"])
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
    engines = {"engines": frozenset({"sglang", "vllm"}), "engine_features": features}
    fleet = replace(FLEET, capabilities={"rollout": engines})

    def refused(engine: str, **sampling: float) -> list[str]:
        submission = evaluated(spec_of(rollout={"engine": engine}), fleet, **sampling)
        return [sentence(each) for each in conflicts(submission.resolved)]

    both = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    top_p, penalty = refused("sglang", **both)
    assert top_p.startswith("sampling.top_p") and "top_k: 0 and min_p: 0" in top_p
    assert penalty.startswith("sampling.repetition_penalty") and "set 1" in penalty
    assert refused("vllm", **both) == [] == refused("sglang", temperature=0.7, top_p=0.9)


def test_an_engine_that_nobody_has_installed_names_the_extra():
    found = problems({"rollout": {"engine": "vllm"}}, ONE)
    assert "install headrace-rollout[vllm]" in found["rollout.engine"]
    assert "set rollout.engine: transformers" in found["rollout.engine"]


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
    (tmp_path / "config.json").write_text(
        '{"layer_types": ["linear_attention", "compressed_sparse_attention"]}'
    )
    (tmp_path / "model.safetensors").touch()
    name, why = settled(BOTH, model={"path": str(tmp_path)})
    assert name == "vllm" and "has compressed_sparse_attention layers" in why
    named = submission_of(spec_of(rollout={"engine": "transformers"}), BOTH)
    assert (named.settled, named.note) == (named.spec, "")
