"""What of the SGLang engine needs no SGLang: its options, its loader, its frames. The rest: `make test-engines`."""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from unittest.mock import MagicMock

import pytest
import torch
from headrace_modelkit.presets.tiny import tiny_model
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.hosted.backend import rows_of
from headrace_rollout.engines.hosted.options import check_names
from headrace_servicekit.contract import check_plugin
from headrace_servicekit.registry import PluginError
from headrace_sglang.loader import load_version, request_tensor
from headrace_sglang.options import REFUSED_ARGUMENTS
from model_weights import weights_of_model


def test_the_options_hold_the_contract():
    chosen = check_plugin(ENGINES, "sglang", {"tensor_parallel_size": 2, "engine_args": {"page_size": 16}})
    assert chosen.options.engine_args == {"page_size": 16}
    with pytest.raises(PluginError, match=r"rollout.engine_options.memory_fractoin.*memory_fraction"):
        ENGINES.choose("sglang", {"memory_fractoin": 0.5})


class EngineModel(torch.nn.Module):
    """Takes weights as SGLang's models do: by its own loader, which skips what it does not know."""

    def __init__(self, seed):
        super().__init__()
        self.inner = tiny_model(seed)

    def load_weights(self, tensors):
        own = dict(self.inner.named_parameters())
        for name, tensor in tensors:
            if name in own:
                own[name].copy_(tensor)


def load(model, weights, directory):
    file = directory / "body"
    file.write_bytes(weights.body)
    answers = directory / "answers"
    answers.mkdir(exist_ok=True)
    load_version(model, [("version", request_tensor(file, rows_of(weights.entries), answers))])
    (answer,) = answers.iterdir()
    return json.loads(answer.read_text())


def test_a_version_is_loaded_from_its_file(tmp_path):
    given, model = tiny_model(2), EngineModel(1)
    weights = weights_of_model(given)
    answer = load(model, weights, tmp_path)
    assert answer == {"problem": ""}
    for own, wanted in zip(model.inner.parameters(), given.parameters(), strict=True):
        assert torch.equal(own, wanted)


def test_a_parameter_without_a_tensor_is_an_answer_and_not_an_error(tmp_path):
    weights = weights_of_model(tiny_model(2))
    last = weights.entries[-1].name
    answer = load(EngineModel(1), replace(weights, entries=weights.entries[:-1]), tmp_path)
    assert (
        "1 parameters of the engine's model got no tensor" in answer["problem"] and last in answer["problem"]
    )
    misshapen = replace(weights.entries[0], shape=(3, 5))
    answer = load(EngineModel(1), replace(weights, entries=(misshapen, *weights.entries[1:])), tmp_path)
    assert "shape" in answer["problem"]


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed here")
def test_without_sglang_its_extra_is_named():
    assert "sglang" not in ENGINES.installed()
    with pytest.raises(PluginError, match=r"install headrace-rollout\[sglang\]"):
        ENGINES.choose("sglang", {}).build(None)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("node_rank", "set rollout.engine_options.hosts of vLLM"),
        ("quantization", "use rollout.engine: vllm, which can"),
    ],
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


def test_a_draft_model_is_refused():
    with pytest.raises(PluginError, match="set method: ngram"):
        ENGINES.choose("sglang", {"speculative": {"method": "draft", "model": "small"}})


def test_sglang_drafts_from_the_sequence_with_an_nvidia_gpu_alone(model_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "headrace_sglang.arguments", MagicMock())
    monkeypatch.setitem(sys.modules, "headrace_sglang.backend", MagicMock())
    chosen = ENGINES.choose("sglang", {"speculative": {"method": "ngram"}})
    with pytest.raises(PluginError, match="without an NVIDIA GPU SGLang takes the likeliest token"):
        chosen.build(MagicMock(model=model_config))
