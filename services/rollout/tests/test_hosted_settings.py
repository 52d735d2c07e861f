"""What a run may say about an engine of another project: without it here, and what no engine has to be asked for."""

from importlib.util import find_spec

import pytest
import torch
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.hosted.backend import Start
from headrace_rollout.engines.hosted.options import check_heads, check_names, parallel_size
from headrace_servicekit.registry import PluginError


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_an_engine_that_is_not_installed_names_the_extra(name):
    if find_spec(name) is not None:
        pytest.skip(f"{name} is installed here")
    with pytest.raises(PluginError, match=rf"install headrace-rollout\[{name}\]"):
        ENGINES.choose(name, {}).build(None)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("quantisation", "vLLM has no such argument; did you mean 'quantization'?"),
        ("xyz", "vLLM has no such argument; see vLLM's AsyncEngineArgs for its names"),
        ("model", "another setting decides it; set model.path"),
        ("load_format", "Headrace sets it itself; leave it out"),
    ],
)
def test_a_further_argument_that_cannot_stand_there_says_why(name, sentence):
    with pytest.raises(PluginError) as refused:
        check_names(
            {name: 1, "seed": 1},
            ["quantization", "seed"],
            own={"model": "model.path"},
            fixed={"load_format"},
            engine="vLLM",
            listed_in="AsyncEngineArgs",
        )
    assert str(refused.value) == f"rollout.engine_options.engine_args.{name}: {sentence}"


def test_a_model_spans_what_is_leased_and_not_more():
    gpus, cpu = tuple(torch.device("cuda", index) for index in range(2)), (torch.device("cpu"),)
    assert parallel_size(None, Start(gpus, 1)) == 2 and parallel_size(1, Start(gpus, 1)) == 1
    assert parallel_size(None, Start(cpu, 1)) == 1 and parallel_size(2, Start(cpu, 1)) == 2
    with pytest.raises(ValueError, match=r"tensor_parallel_size: 3 devices are wanted and 2 are leased"):
        parallel_size(3, Start(gpus, 1))
    assert parallel_size(None, Start(gpus, 1), stages=2) == 1 == parallel_size(1, Start(gpus, 1), stages=2)
    with pytest.raises(ValueError, match=r"tensor_parallel_size: 4 devices are wanted and 2 are leased"):
        parallel_size(2, Start(gpus, 1), stages=2)


def test_devices_that_cannot_divide_the_heads_are_refused_before_anything_is_loaded(model_config):
    check_heads(None, model_config)
    check_heads(2, model_config)
    with pytest.raises(
        PluginError, match=r"tensor_parallel_size: 3 devices cannot divide 4 .* one of 1, 2, 4"
    ):
        check_heads(3, model_config)
