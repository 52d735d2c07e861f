"""Engines and devices that a fleet has not are refused at submission, and what is left open is chosen by them."""

import json
from dataclasses import replace

import pytest
from headrace_coordinator.api.submission.approximate import drafted
from headrace_coordinator.api.submission.rules import answers, problems_of
from headrace_coordinator.api.submission.submission import Evaluated, Submission
from headrace_coordinator.suites import open_suite
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import sentence
from submission_parts import BOTH, FLEET, GPUS, ONE, problems, spec_of, submission_of


def test_a_need_that_the_engine_lacks_names_key_and_engine():
    wanted = {"deterministic": True, "rollout": {"engine": "vllm"}}
    (found,) = problems(wanted, BOTH).items()
    assert found[0] == "deterministic"
    assert "rollout.engine: vllm cannot" in found[1] and "set rollout.engine: transformers" in found[1]
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
    assert (
        "collocated with trainer.helpers"
        in problems({"placement": {"mode": "hybrid"}}, GPUS)["placement.mode"]
    )
    assert problems(resident, BOTH) == {}, "on CPU slots"


SPAN = "rollout.engine_options.tensor_parallel_size"


def spans(size, **rollout):
    return {"rollout": {"engine": "vllm", "engine_options": {"tensor_parallel_size": size}, **rollout}}


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
        (8, {"placement": {"mode": "auto"}}, r"placement\.mode: .*set collocated or disaggregated"),
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
    assert (
        "rollout.max_concurrency: 256 (the model's size is not known here; the cache admits what fits)"
        in note
    )
    assert "trainer.micro_batch_tokens: 2048 (the model's size is not known here)" in note
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


CARDS = replace(
    BOTH,
    devices=[f"h/gpu:{n}" for n in range(8)],
    instances={"rollout": 8, "trainer": 8, "reward": 1},
    rollouts_see=[8] * 8,
    gpu_bytes={f"h/gpu:{n}": 80 * 2**30 for n in range(8)},
)
QWEN_72B = {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 29568,
    "vocab_size": 152064,
}
QWEN_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}


@pytest.fixture
def model_of(tmp_path):
    """`model_of(shape)`: the section of a local model whose configuration says so."""

    def make(shape, name="model"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(shape))
        (tmp_path / name / "model.safetensors").touch()
        return {"path": str(tmp_path / name), "max_context": 4096}

    return make


def test_a_model_that_one_gpu_does_not_hold_spans_as_many_as_it_needs(model_of):
    """72.7 billion parameters in bfloat16 are 135.4 GiB."""
    spec, note = decided(CARDS, model=model_of(QWEN_72B))
    options = spec.rollout.engine_options
    assert options == {"gpu_memory_utilization": 0.9, "tensor_parallel_size": 4}
    assert "weights of 135.4 GiB leave room for keys and values on so many GPUs of 80 GiB" in note
    assert "123.8 GiB of keys and values hold 372 sequences of 1088 tokens" in note, "320 KiB a token"
    assert spec.rollout.max_concurrency == 256
    smaller, _ = decided(CARDS, model=model_of(QWEN_7B))
    assert "tensor_parallel_size" not in smaller.rollout.engine_options
    assert smaller.rollout.max_concurrency == 512


def test_memory_decides_the_share_of_an_engine_and_the_size_of_a_forward(model_of):
    small = replace(CARDS, gpu_bytes={**CARDS.gpu_bytes, "h/gpu:3": 24 * 2**30})
    spec, note = decided(small, model=model_of(QWEN_7B))
    assert spec.rollout.engine_options == {"gpu_memory_utilization": 0.85, "tensor_parallel_size": 2}
    assert "it leaves 3.6 of 24 GiB to contexts and a trainer that waits" in note
    assert (
        spec.trainer.micro_batch_tokens,
        decided(CARDS, model=model_of(QWEN_7B))[0].trainer.micro_batch_tokens,
    ) == (
        2048,
        4096,
    )
    named, _ = decided(CARDS, rollout={"engine": "vllm", "engine_options": {"gpu_memory_utilization": 0.5}})
    assert named.rollout.engine_options == {"gpu_memory_utilization": 0.5}
    ours, _ = decided(small, model=model_of(QWEN_7B), placement={"rollout": ["gpu:0"], "trainer": ["gpu:1"]})
    assert "tensor_parallel_size" not in ours.rollout.engine_options, (
        "the small card is not among those named"
    )


def test_weights_that_do_not_fit_name_the_sizes_that_do(model_of):
    big = {"model": model_of(QWEN_72B)}
    found = problems({**big, **spans(1)}, CARDS)[SPAN]
    assert (
        "weights of 135.4 GiB are wanted on 1 GPU, of each of which the engine takes 72.0 of 80 GiB" in found
    )
    assert found.endswith("set one of 2, 4, 8")
    assert problems({**big, **spans(2)}, CARDS) == {}
    two = replace(CARDS, gpu_bytes=dict.fromkeys(CARDS.devices, 24 * 2**30), rollouts_see=[2] * 8)
    found = problems({**big, "rollout": {"engine": "vllm"}}, two)[SPAN]
    assert found.endswith("take GPUs with more memory, or a smaller model")
    halved = {"engine": "vllm", "engine_options": {"tensor_parallel_size": 1, "quantization": "fp8"}}
    assert problems({**big, "rollout": halved}, CARDS) == {}, "a byte each"


TIS = frozenset({'grpo={"properties": {"correction": {}}}', "own={}"})
QUANTISING = replace(
    GPUS,
    capabilities={
        **BOTH.capabilities,
        "trainer": {
            **BOTH.capabilities["trainer"],
            "algorithms": frozenset({"grpo", "own"}),
            "algorithm_features": frozenset({"grpo:off_policy"}),
            "algorithm_options": TIS,
        },
    },
)


def quantising(**more):
    return {"rollout": {"engine": "vllm", "engine_options": {"quantization": "fp8"}}, **more}


def test_a_quantised_rollout_is_corrected_for_and_says_so():
    spec, note = decided(QUANTISING, **quantising())
    assert spec.algorithm.options["correction"] == "truncate"
    assert "correction: truncate (the engine computes with fp8 weights, and the trainer without)" in note
    for options in ({"correction": "mask"}, {"old_log_probs": "engine"}):
        spec, note = decided(QUANTISING, **quantising(algorithm={"options": options}))
        assert spec.algorithm.options == options and "correction" not in note
    kept = {"engine": "vllm", "engine_options": {"engine_args": {"kv_cache_dtype": "fp8"}}}
    assert "fp8 keys and values" in decided(QUANTISING, rollout=kept)[1]
    assert "correction" not in decided(QUANTISING)[0].algorithm.options


def test_policies_in_one_engine_have_their_base_once_and_are_corrected_for_where_it_rounds(model_of):
    lora, policies = {"lora": {"rank": 64}}, {"guesser": {}}
    roles = {
        "environment": {
            "backend": "conversation",
            "tasks": ["a.py:A"],
            "roles": {"guesser": {"policy": "guesser"}},
        }
    }
    run = {"workflow": "agentic", "model": model_of(QWEN_7B), "policies": policies, **roles, "trainer": lora}
    engine = {"engine": "vllm", "engine_options": {"tensor_parallel_size": 1}}
    each, note = decided(CARDS, **run, rollout=engine)
    assert "36.4 GiB of keys and values" in note and "beside the weights of 2 policies" in note
    assert "correction" not in each.algorithm.options
    _, note = decided(CARDS, **run, rollout=engine | {"enable_lora": True})
    assert "49.4 GiB of keys and values" in note
    assert "beside one base (14.2 GiB) and adapters of 2 (1.20 GiB)" in note
    corrected = decided(QUANTISING, **run, rollout=engine | {"enable_lora": True})
    assert "truncate (the engine computes with adapters beside bfloat16 weights" in corrected[1]


def test_what_asks_for_exact_answers_of_a_quantised_rollout_is_refused(model_of):
    key = "rollout.engine_options.quantization"
    exact = quantising(model={"path": "owner/model", "dtype": "float32"})
    assert "set model.dtype: bfloat16" in problems(exact, QUANTISING)[key]
    none = quantising(algorithm={"options": {"correction": "none"}})
    assert "leave it out (truncate then)" in problems(none, QUANTISING)["algorithm.options.correction"]
    assert problems(quantising(algorithm={"name": "own"}), QUANTISING)[key].endswith("one of grpo")
    assert "deterministic" in problems(quantising(deterministic=True), QUANTISING)
    int8 = {"engine": "vllm", "engine_options": {"quantization": "int8"}}
    dense = problems({"model": model_of(QWEN_7B), "rollout": int8}, QUANTISING)
    assert "int8 is of experts alone" in dense[key]
    experts = model_of({**QWEN_7B, "num_experts": 8, "moe_intermediate_size": 64})
    assert problems({"model": experts, "rollout": int8}, QUANTISING) == {}


def drafting(**speculative):
    return {"rollout": {"engine": "vllm", "engine_options": {"speculative": speculative}}}


def test_drafts_go_with_what_they_can(model_of):
    assert problems(drafting(method="ngram"), QUANTISING) == {}
    assert "correction" not in decided(QUANTISING, **drafting(method="ngram"))[0].algorithm.options
    replay = {**drafting(method="ngram"), "algorithm": {"options": {"routing_replay": True}}}
    assert "drafted tokens" in problems(replay, QUANTISING)["algorithm.options.routing_replay"]
    small = model_of({**QWEN_7B, "vocab_size": 32000}, "small")["path"]
    with_draft = {"model": model_of(QWEN_7B), **drafting(method="draft", model=small)}
    found = problems(with_draft, QUANTISING)["rollout.engine_options.speculative.model"]
    assert "a vocabulary of 32000 tokens" in found and "one of 152064" in found
    assert (
        problems({"model": model_of(QWEN_7B), **drafting(method="draft", model="owner/small")}, QUANTISING)
        == {}
    )


def test_what_a_spec_names_and_is_not_there_is_refused(model_of):
    gone = problems(drafting(method="draft", model="/nowhere/small"), QUANTISING)
    assert "rollout.engine_options.speculative.model" in gone
    parallel = {"engine": "vllm", "engine_options": {"engine_args": {"enable_expert_parallel": True}}}
    found = problems({"model": model_of(QWEN_7B), "rollout": parallel}, QUANTISING)
    assert "no experts to divide" in found["rollout.engine_options.engine_args.enable_expert_parallel"]


def test_an_evaluation_of_drafted_answers_keeps_to_what_their_check_knows():
    def refused(engine, **sampling):
        model, suite = {"path": "owner/model"}, {"name": "items", "options": {"source": "copy_digits"}}
        asked = EvaluationSpec.model_validate({"model": model, "suite": suite, "sampling": sampling})
        options = {"speculative": {"method": "ngram"}}
        spec = spec_of(rollout={"engine": engine, "engine_options": options})
        evaluated = Evaluated(asked, open_suite(**suite), "owner/model")
        return [each.key for each in drafted(Submission(spec, FLEET, evaluated=evaluated))]

    both = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1}
    assert refused("vllm", **both) == ["sampling.min_p"]
    assert refused("sglang", **both) == ["sampling.top_p", "sampling.min_p"]
    assert refused("vllm", temperature=0.7, top_p=0.9) == []


def test_heads_that_an_installed_engine_does_not_take_leave_the_built_in_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "num_attention_heads": 4}))
    spec, note = decided(GPUS, model={"path": str(tmp_path)})
    assert spec.rollout.engine == "transformers" and "heads have 16 numbers" in note
