"""What a run on GPUs gets without being asked: engine, spans, shares of memory, corrections; and what never fits."""

import json
from dataclasses import replace

import pytest
from headrace_coordinator.api.submission.submission import Submission
from headrace_schema.rules.table import conflicts
from submission_parts import BOTH, FLEET, GPUS, SPAN, evaluated, problems, spans, spec_of


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
QWEN_30B_A3B = {
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
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


@pytest.mark.parametrize(
    ("shape", "checkpointing", "tokens"),
    [("7b", None, 2048), ("7b", True, 16_384), ("72b", None, 2048), ("72b", True, 8192)],
)
def test_without_the_gpus_memory_a_forward_has_16_gib_for_its_activations(
    model_of, shape, checkpointing, tokens
):
    """A token of 7B keeps 6.1 MiB, 34 bytes a unit of width were reckoned with before: 3.3."""
    given = {} if checkpointing is None else {"trainer": {"gradient_checkpointing": checkpointing}}
    spec, _ = decided(GPUS, model=model_of(QWEN_7B if shape == "7b" else QWEN_72B), **given)
    assert spec.trainer.micro_batch_tokens == tokens


@pytest.mark.parametrize(
    ("options", "tokens"),
    [({}, 2048), ({"tensor_parallel": 2}, 4096), ({"tensor_parallel": 2, "pipeline_parallel": 2}, 16_384)],
)
def test_ranks_and_stages_of_megatron_keep_a_share_of_a_micro_batchs_activations(model_of, options, tokens):
    able = {**CARDS.capabilities["trainer"], "backends": frozenset({"fsdp", "megatron"})}
    fleet = replace(CARDS, capabilities={**CARDS.capabilities, "trainer": able})
    trainer = {"backend": "megatron", "ranks": 8, "backend_options": options}
    spec, _ = decided(fleet, model=model_of(QWEN_7B), trainer=trainer, algorithm={"prompts_per_step": 8})
    assert spec.trainer.micro_batch_tokens == tokens


@pytest.mark.parametrize(
    ("longest", "ranks", "tokens", "layout"),
    [
        (1024, 8, 4096, "shard: gradients"),
        (2048, 8, 4096, "shard: gradients"),
        (16_384, 8, 17_408, "shard: weights, gradient_checkpointing: true"),
        (1024, 1, 8192, "shard: weights, gradient_checkpointing: true, offload: optimizer"),
    ],
)
def test_a_micro_batch_is_as_large_as_the_layout_leaves_room_for(model_of, longest, ranks, tokens, layout):
    """One answer of full length fits, which else would be a micro-batch that nobody has planned."""
    run = {
        "sampling": {"max_new_tokens": longest},
        "trainer": {"ranks": ranks},
        "algorithm": {"prompts_per_step": 8},
    }
    model = model_of(QWEN_7B) | {"max_context": 32_768}
    spec, note = decided(CARDS, model=model, **run)
    assert spec.trainer.micro_batch_tokens == tokens
    assert f"beside the layout that the trainers take ({layout})" in note
    named = {**run, "trainer": {"ranks": ranks, "micro_batch_tokens": 3000}}
    assert decided(CARDS, model=model, **named)[0].trainer.micro_batch_tokens == 3000


def test_an_engine_spans_no_more_gpus_than_the_instances_leave_it(model_of):
    """Qwen3-30B-A3B on 32 GPUs: 32 instances with two GPUs each were refused for want of 64."""
    shape = model_of(QWEN_30B_A3B)
    many = replace(
        CARDS,
        devices=[f"h{n // 8}/gpu:{n % 8}" for n in range(32)],
        instances={"rollout": 32, "trainer": 32, "reward": 1},
        gpu_bytes={f"h{n // 8}/gpu:{n % 8}": 80 * 10**9 for n in range(32)},
    )

    def chosen(instances, **more):
        run = {
            "rollout": {"instances": instances},
            "trainer": {"ranks": 32},
            "algorithm": {"prompts_per_step": 32},
        }
        spec, note = decided(many, model=shape, **run, **more)
        assert problems({"model": shape, **run, **more}, many) == {}
        return spec.rollout.engine_options.get("tensor_parallel_size", 1), note

    assert chosen(16)[0] == 2
    span, note = chosen(32)
    assert span == 1
    assert "36 sequences" in note or "keys and values hold" in note


def test_a_model_of_the_hub_is_sized_by_its_configuration_or_told_to_be_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("headrace_schema.hub._known", {})
    model = {"path": "Qwen/Qwen2.5-72B"}
    spec, note = decided(CARDS, model=model)
    assert "tensor_parallel_size" not in spec.rollout.engine_options
    assert (
        "model.path: config.json of Qwen/Qwen2.5-72B is not in the coordinator's Hugging Face cache, and "
        "HF_HUB_OFFLINE is set: these are defaults of a model of unknown size" in note
    )
    assert "run `hf download Qwen/Qwen2.5-72B config.json` there, or name a directory" in note
    cached = tmp_path / "models--Qwen--Qwen2.5-72B" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text(json.dumps(QWEN_72B))
    (cached.parents[1] / "refs").mkdir()
    (cached.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.setattr("headrace_schema.hub._known", {})
    spec, note = decided(CARDS, model=model)
    assert spec.rollout.engine_options["tensor_parallel_size"] == 4 and "unknown size" not in note
    one = {"engine": "vllm", "engine_options": {"tensor_parallel_size": 1}}
    assert "weights of 135.4 GiB" in problems({"model": model, "rollout": one}, CARDS)[SPAN]


def test_a_model_that_one_gpu_does_not_hold_spans_as_many_as_it_needs(model_of):
    """72.7 billion parameters in bfloat16 are 135.4 GiB."""
    spec, note = decided(CARDS, model=model_of(QWEN_72B))
    options = spec.rollout.engine_options
    assert options == {"gpu_memory_utilization": 0.9, "tensor_parallel_size": 4}
    assert "weights of 135.4 GiB leave room for keys and values on so many GPUs of 80 GiB" in note
    assert "hold 389 sequences of the 1040 tokens that are expected" in note, "320 KiB a token"
    assert spec.rollout.max_concurrency == 384
    longer, _ = decided(
        CARDS, model=model_of(QWEN_72B) | {"max_context": 28_672}, sampling={"max_new_tokens": 27_648}
    )
    assert longer.rollout.max_concurrency == 48, "worst-case lengths would let 16 run"
    smaller, _ = decided(CARDS, model=model_of(QWEN_7B))
    assert "tensor_parallel_size" not in smaller.rollout.engine_options
    assert smaller.rollout.max_concurrency == 896


def test_memory_decides_the_share_of_an_engine_and_the_size_of_a_forward(model_of):
    small = replace(CARDS, gpu_bytes={**CARDS.gpu_bytes, "h/gpu:3": 24 * 2**30})
    spec, note = decided(small, model=model_of(QWEN_7B))
    assert spec.rollout.engine_options == {"gpu_memory_utilization": 0.85, "tensor_parallel_size": 2}
    assert "it leaves 3.6 of 24 GiB to contexts and a trainer that waits" in note
    assert (
        spec.trainer.micro_batch_tokens,
        decided(CARDS, model=model_of(QWEN_7B))[0].trainer.micro_batch_tokens,
    ) == (
        16_384,
        8192,
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
    corrected = decided(QUANTISING, **run, rollout=engine)
    assert "truncate (the engine computes with adapters merged into bfloat16 weights" in corrected[1]
    assert "correction" not in decided(QUANTISING, **run, rollout=engine | {"enable_lora": True})[1]
    alone = {"model": run["model"], "trainer": lora}
    assert "correction" in decided(QUANTISING, **alone)[0].algorithm.options
    exact = decided(QUANTISING, **alone, deterministic=True)  # the trainer merges too
    assert "correction" not in exact[0].algorithm.options


def taught(path):
    """A run whose teacher reads answers beside the policy's engine."""
    teacher = {"trainer": {"reference": path}} if path else {}
    return {"algorithm": {"name": "distill", "options": {"top_k": 8}}, **teacher}


def test_frozen_models_beside_an_engine_take_of_its_memory(model_of):
    own, one = {"model": model_of(QWEN_7B)}, spans(1)
    alone, _ = decided(CARDS, **own, **one)
    beside, note = decided(CARDS, **own, **one, **taught(model_of(QWEN_7B)))
    assert "beside frozen models of 14.2 GiB" in note
    assert beside.rollout.max_concurrency < alone.rollout.max_concurrency
    role = {"path": model_of(QWEN_7B)["path"]}
    roles = {"environment": {"backend": "conversation", "tasks": ["a.py:A"], "roles": {"a": role, "b": role}}}
    _, note = decided(CARDS, **own, **one, workflow="agentic", **roles)
    assert "beside frozen models of 14.2 GiB" in note, "one that plays two roles is there once"
    apart = {**role, "own_devices": True}
    _, note = decided(
        CARDS, **own, **one, workflow="agentic", environment={**roles["environment"], "roles": {"a": apart}}
    )
    assert "frozen" not in note, "it has devices of its own"
    teacher = model_of(QWEN_72B, "teacher")
    found = problems({**own, **one, **taught(teacher)}, CARDS)["trainer.reference.path"]
    assert "135.4 GiB are on the policy's devices too: weights of 149.6 GiB in all on 1 x 72.0 GiB" in found


def learning_beside(algorithm):
    """A quantised run with a policy of this algorithm beside its own; None: as its own learns."""
    roles = {"tutor": {"policy": "tutor"}, "guide": {"policy": "guide"}}
    policies = {"tutor": {} if algorithm is None else {"algorithm": algorithm}, "guide": {}}
    return quantising(
        workflow="agentic",
        environment={"backend": "conversation", "tasks": ["a.py:A"], "roles": roles},
        policies=policies,
    )


def test_a_quantised_rollout_is_corrected_for_in_every_policys_algorithm():
    spec, note = decided(QUANTISING, **learning_beside({"name": "grpo", "options": {"entropy_coef": 0.1}}))
    assert spec.algorithm.options == {"correction": "truncate"}
    assert spec.policies["tutor"].algorithm.options == {"entropy_coef": 0.1, "correction": "truncate"}
    assert "policies.tutor.algorithm.options.correction: truncate" in note and "guide" not in note
    for options in ({"correction": "mask"}, {"old_log_probs": "engine"}):
        spec, _ = decided(QUANTISING, **learning_beside({"name": "grpo", "options": options}))
        assert spec.policies["tutor"].algorithm.options == options
        assert spec.algorithm.options == {"correction": "truncate"}
    found = problems(learning_beside({"name": "own", "options": {}}), QUANTISING)
    assert (
        "own is right on samples of the trainer's own distribution"
        in found["rollout.engine_options.quantization"]
    )
    stale = {**learning_beside({"name": "own"}), "algorithm": {"name": "grpo", "max_staleness": 1}}
    assert (
        "own is right on samples of the newest version"
        in problems(stale, QUANTISING)["algorithm.max_staleness"]
    )


def test_a_quantised_rollout_is_of_what_can_correct_and_of_what_it_quantises(model_of):
    key = "rollout.engine_options.quantization"
    assert problems(quantising(algorithm={"name": "own"}), QUANTISING)[key].endswith(
        "set algorithm.name: grpo"
    )
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
        options = {"speculative": {"method": "ngram"}}
        spec = spec_of(rollout={"engine": engine, "engine_options": options})
        return [each.key for each in conflicts(evaluated(spec, fleet, **sampling).resolved)]

    capable = {
        "engines": frozenset({"sglang", "vllm"}),
        "engine_features": frozenset({"vllm:drafts_truncated", "vllm:top_p_after_others"}),
    }
    fleet = replace(FLEET, capabilities={"rollout": capable})

    both = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1}
    assert refused("vllm", **both) == ["sampling.min_p"]
    assert {*refused("sglang", **both)} == {"sampling.top_p", "sampling.min_p"}
    assert refused("vllm", temperature=0.7, top_p=0.9) == []


def test_heads_that_an_installed_engine_does_not_take_leave_the_built_in_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "num_attention_heads": 4}))
    spec, note = decided(GPUS, model={"path": str(tmp_path)})
    assert spec.rollout.engine == "transformers" and "heads have 16 numbers" in note
