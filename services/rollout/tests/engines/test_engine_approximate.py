"""Rollouts that compute with fewer bits than the trainer, or draft tokens: what they sample, and how far off it is."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
import torch
from headrace_modelkit.loading import save_model
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_rollout.engines.samples import Distribution
from headrace_schema.sections.generating import ModelSection
from rig import CONTEXT, ENGINES_HERE, START_S, Rig, build, expected_log_probs, group, make_model

pytestmark = [
    pytest.mark.timeout(START_S),
    pytest.mark.skipif("vllm" not in ENGINES_HERE, reason="vLLM's options; see `make test-engines`"),
]
PROMPT = [3 + index % 5 for index in range(40)]
"""It repeats itself: there is something to draft."""
SAMPLES = 400


@pytest.fixture
def rig_with(tmp_path):
    """`rig_with(options, dtype)`: an engine with these options, serving model A."""
    made: list[Rig] = []

    async def make(options: dict[str, Any], dtype: str = "float32") -> Rig:
        model = make_model(1)
        save_model(model, character_tokenizer(), tmp_path / "model")
        section = ModelSection(path=str(tmp_path / "model"), dtype=dtype, max_context=CONTEXT)
        codec = load_tokenizer(section)
        engine = await asyncio.to_thread(build, "vllm", section, codec, 64, options)
        rig = Rig("vllm", section, engine, model, make_model(2))
        made.append(rig)
        await rig.install(rig.model_a)
        return rig

    yield make
    for rig in made:
        asyncio.run(rig.engine.close())


async def check_exact(rig: Rig) -> None:
    """Log-probs are the model's, and tokens come as often as they say."""
    for distribution in (Distribution(0.0), Distribution(1.0), Distribution(0.7, top_p=0.8)):
        found = await rig.generate([group(0, PROMPT, 8)], distribution, max_new_tokens=40)
        for output in found.values():
            answer = list(output.whole.token_ids)
            expected = expected_log_probs(
                rig.model_a, PROMPT, answer, distribution if distribution.temperature else Distribution()
            )
            assert output.whole.log_probs == pytest.approx(expected, abs=1e-4)
    found = await rig.generate([group(0, PROMPT, SAMPLES)], max_new_tokens=3)
    seconds = Counter(
        output.whole.token_ids[1] for output in found.values() if len(output.whole.token_ids) > 1
    )
    expected = second_tokens(rig.model_a)
    off = sum(abs(seconds[token] / seconds.total() - share) for token, share in enumerate(expected)) / 2
    # The distance that as many draws of the right distribution have on average, and half as much again.
    assert (
        off
        < 1.5 * sum((share * (1 - share) / SAMPLES) ** 0.5 for share in expected) * (2 / 3.14159) ** 0.5 / 2
    )


def second_tokens(model: Any) -> list[float]:
    """The share of each token at the second place of an answer that goes on behind the first."""
    with torch.no_grad():
        first = model(torch.tensor([PROMPT])).logits[0, -1].softmax(-1)
        rows = torch.tensor([[*PROMPT, token] for token in range(len(first))])
        second = model(rows).logits[:, -1].softmax(-1)
    first[1] = 0.0  # it ends
    return ((first / first.sum()) @ second).tolist()


@pytest.mark.nightly  # a start of the engine, as each below; that vLLM takes the option is seen last
async def test_drafts_from_the_sequence_keep_the_distribution(rig_with):
    rig = await rig_with({"speculative": {"method": "ngram", "tokens": 3}})
    await check_exact(rig)
    await rig.install(rig.model_b)
    await rig.serves(rig.model_b)


@pytest.mark.nightly
async def test_drafts_of_a_smaller_model_keep_the_distribution_also_after_an_install(rig_with, tmp_path):
    """Its weights are its own: an install of the policy leaves them."""
    draft = make_model(3, num_hidden_layers=1)
    save_model(draft, character_tokenizer(), tmp_path / "draft")
    speculative = {"method": "draft", "model": str(tmp_path / "draft"), "tokens": 3}
    rig = await rig_with({"speculative": speculative})
    await check_exact(rig)
    await rig.install(rig.model_b)
    await rig.serves(rig.model_b)


@pytest.mark.nightly
async def test_weights_are_quantised_at_each_install_and_the_mismatch_shows(rig_with):
    """Both versions come out near the model's own log-probs, further off than bfloat16 is, and not each other's."""
    rig = await rig_with({"quantization": "fp8"}, "bfloat16")
    off_a = await mean_mismatch(rig, rig.model_a)
    await rig.install(rig.model_b)
    off_b, wrong = await mean_mismatch(rig, rig.model_b), await mean_mismatch(rig, rig.model_a)
    assert 1e-3 < off_a < 0.3 and 1e-3 < off_b < 0.3 and wrong > 3 * off_b
    plain = await rig_with({}, "bfloat16")
    assert await mean_mismatch(plain, plain.model_a) < off_a / 1.5


async def mean_mismatch(rig: Rig, model: Any) -> float:
    """Mean distance of an engine's log-probs to those of a model in float32."""
    found = await rig.generate([group(0, PROMPT, 16)], max_new_tokens=40)
    pairs = [
        (log_prob, expected)
        for output in found.values()
        for log_prob, expected in zip(
            output.whole.log_probs,
            expected_log_probs(model, PROMPT, list(output.whole.token_ids), Distribution()),
            strict=True,
        )
    ]
    return sum(abs(log_prob - expected) for log_prob, expected in pairs) / len(pairs)


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ({"quantization": "fp8"}, "quantization", "fp8_per_channel"),
        ({"quantization": "fp8_block"}, "quantization", "fp8_per_block"),
        ({"quantization": "int8"}, "quantization", "int8_per_channel_weight_only"),
        ({"speculative": {"method": "ngram"}}, "method", "ngram"),
        ({"speculative": {"method": "draft", "model": "MODEL"}}, "method", "draft_model"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size", 2),
    ],
)
def test_vllms_own_configuration_takes_the_options(tmp_path, options, key, value):
    from headrace_rollout.engines.base import EngineConfig
    from headrace_rollout.engines.hosted.backend import Start
    from headrace_rollout.engines.vllm.arguments import check_extra, engine_args
    from headrace_rollout.engines.vllm.options import VllmOptions

    save_model(make_model(1), character_tokenizer(), tmp_path)
    section = ModelSection(path=str(tmp_path), max_context=CONTEXT)
    given = json.loads(json.dumps(options).replace("MODEL", str(tmp_path)))
    wanted = VllmOptions.model_validate(given)
    check_extra(wanted.engine_args)
    start = Start((torch.device("cpu"),), 1)
    found = engine_args(
        EngineConfig(section, load_tokenizer(section), 4), wanted, start
    ).create_engine_config()
    parts = (found.model_config, found.speculative_config, found.parallel_config)
    assert value in [getattr(part, key, None) for part in parts]
    if "draft" in str(options):
        assert found.speculative_config.draft_load_config.load_format == "auto", "the policy's own is dummy"


def gpu_arguments(tmp_path, options, gpus=1, rows=4):
    from headrace_rollout.engines.base import EngineConfig
    from headrace_rollout.engines.hosted.backend import Start
    from headrace_rollout.engines.vllm.arguments import engine_args
    from headrace_rollout.engines.vllm.options import VllmOptions

    save_model(make_model(1), character_tokenizer(), tmp_path)
    section = ModelSection(path=str(tmp_path), max_context=CONTEXT)
    devices = tuple(torch.device("cuda", index) for index in range(gpus))
    config = EngineConfig(section, load_tokenizer(section), rows)
    return engine_args(config, VllmOptions.model_validate(options), Start(devices, 1))


def test_an_engine_on_gpus_gives_back_graphs_and_communicators_by_vllms_own_parser(tmp_path):
    """Without these an engine over two GPUs keeps 2 to 7 GiB of each asleep, and was ended at each lease's end."""
    from vllm import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    asked = ("enable_sleep_mode", "sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend")
    flags = [f"--{name.replace('_', '-')}" for name in asked]
    parsed = parser.parse_args([*flags, "--max-num-batched-tokens", "8192"])
    found = gpu_arguments(tmp_path, {}, gpus=2)
    for name in (*asked, "max_num_batched_tokens"):
        assert getattr(found, name) == getattr(parsed, name), name
    alone = gpu_arguments(tmp_path, {}, gpus=1)
    assert alone.sleep_mode_offload_cudagraph and not alone.enable_nccl_comm_suspend
    assert not gpu_arguments(tmp_path, {"enforce_eager": True}).sleep_mode_offload_cudagraph
    own = {"engine_args": {"sleep_mode_offload_cudagraph": False, "max_num_batched_tokens": 4096}}
    found = gpu_arguments(tmp_path, own)
    assert not found.sleep_mode_offload_cudagraph and found.max_num_batched_tokens == 4096
    drafting = {"speculative": {"method": "ngram", "tokens": 9}}
    assert gpu_arguments(tmp_path, drafting, rows=1024).max_num_batched_tokens == 10_240


def test_vllms_sleep_reads_what_is_set_and_a_cache_wakes_what_is_left():
    """By its source: graphs are kept at level 2 as well, and `wake_up(None)` brings back whatever still sleeps."""
    import inspect

    from vllm.config import VllmConfig
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend
    from vllm.v1.worker.gpu_worker import Worker

    assert '("runtime", "cudagraph")' in inspect.getsource(CuMemBackend.suspend)
    pool = inspect.getsource(VllmConfig.use_cumem_cudagraph_pool.fget)
    assert "sleep_mode_offload_cudagraph" in pool and 'sleep_mode_backend == "cumem"' in pool
    for method, call in ((Worker.sleep, "suspend_device_comms()"), (Worker.wake_up, "resume_device_comms()")):
        source = inspect.getsource(method)
        assert "enable_nccl_comm_suspend" in source and call in source


@pytest.mark.parametrize("asked", [True, False])
def test_vllm_reads_that_its_kernels_are_not_to_follow_the_batch(asked):
    import vllm.envs
    from headrace_rollout.engines.hosted.backend import Start
    from headrace_rollout.engines.vllm.arguments import environment, variables_of
    from headrace_rollout.engines.vllm.options import VllmOptions

    start = Start((torch.device("cpu"),), 1)
    with environment(variables_of(start, VllmOptions(batch_invariant=asked), routed_experts=False)):
        assert vllm.envs.VLLM_BATCH_INVARIANT is asked
