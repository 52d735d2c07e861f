"""What a run may say about an engine of another project: without it here, and what no engine has to be asked for."""

from importlib.util import find_spec

import pytest
import torch
from headrace_modelkit.loading import save_model
from headrace_modelkit.presets.tiny import character_tokenizer, tiny_model
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.hosted.backend import Start
from headrace_rollout.engines.hosted.options import (
    Speculation,
    check_draft,
    check_heads,
    check_invariance,
    check_names,
    parallel_size,
)
from headrace_rollout.engines.vllm.options import REFUSED_ARGUMENTS, VllmOptions
from headrace_servicekit.registry import PluginError


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_an_engine_that_is_not_installed_names_the_extra():
    with pytest.raises(PluginError, match=r"install headrace-rollout\[vllm\]"):
        ENGINES.choose("vllm", {}).build(None)


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
    assert parallel_size(None, Start(gpus, 1), hosts=2) == 4 == parallel_size(4, Start(gpus, 1), hosts=2)
    with pytest.raises(ValueError, match=r"hosts: 1 devices cannot be divided among 2 hosts"):
        parallel_size(None, Start(cpu, 1), hosts=2)


def test_devices_that_cannot_divide_the_heads_are_refused_before_anything_is_loaded(model_config):
    check_heads(None, model_config)
    check_heads(2, model_config)
    with pytest.raises(
        PluginError, match=r"tensor_parallel_size: 3 devices cannot divide 4 .* one of 1, 2, 4"
    ):
        check_heads(3, model_config)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("nnodes", "Headrace says where the ranks"), ("data_parallel_size_local", "enable_expert_parallel")],
)
def test_what_is_not_offered_says_why_and_what_is(name, sentence):
    with pytest.raises(PluginError, match=sentence):
        check_names(
            {name: 2},
            [name],
            own={},
            fixed=frozenset(),
            engine="it",
            listed_in="it",
            refused=REFUSED_ARGUMENTS,
        )


@pytest.mark.parametrize(
    ("speculative", "sentence"),
    [
        ({"method": "draft"}, "draft needs one"),
        ({"method": "ngram", "model": "small"}, "ngram has none"),
        ({"method": "draft", "model": "small", "longest_match": 3}, "longest_match: has no effect"),
        ({"method": "ngram", "shortest_match": 9}, "shortest_match: 9 is above longest_match"),
        ({"method": "ngram", "tokens": 0}, "speculative.tokens"),
        ({"method": "mtp"}, "speculative.method: mtp drafts by weights .* trainer.draft"),
    ],
)
def test_drafts_are_described_whole(speculative, sentence):
    with pytest.raises(PluginError, match=sentence):
        ENGINES.choose("vllm", {"speculative": speculative})


def test_a_draft_model_of_another_vocabulary_is_refused(model_config, tmp_path):
    save_model(tiny_model(1, vocab_size=40), character_tokenizer(), tmp_path)
    with pytest.raises(
        PluginError, match=r"speculative.model: .* a vocabulary of 40 tokens and .* one of 32"
    ):
        check_draft(Speculation(method="draft", model=str(tmp_path)), model_config)
    check_draft(Speculation(method="draft", model=model_config.path), model_config)
    check_draft(Speculation(method="ngram"), model_config)


def test_kernels_that_do_not_follow_the_batch_are_refused_where_the_engine_has_none():
    check_invariance(VllmOptions(batch_invariant=True), has_gpu=True)
    check_invariance(VllmOptions(), has_gpu=False)
    with pytest.raises(
        PluginError, match=r"batch_invariant: on a CPU .* the engine transformers with determ"
    ):
        check_invariance(VllmOptions(batch_invariant=True), has_gpu=False)
