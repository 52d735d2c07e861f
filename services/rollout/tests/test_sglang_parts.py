"""What of the SGLang engine needs no SGLang: its options, its loader, its frames. The rest: `make test-engines`."""

import json
from dataclasses import replace

import pytest
import torch
from headrace_modelkit.presets.tiny import tiny_model
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.hosted.backend import rows_of
from headrace_rollout.engines.sglang.loader import load_version, request_tensor
from headrace_servicekit.contract import check_plugin
from headrace_servicekit.registry import PluginError
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


def test_a_version_is_loaded_from_its_file_and_the_digests_are_of_what_was_read(tmp_path):
    given, model = tiny_model(2), EngineModel(1)
    weights = weights_of_model(given)
    answer = load(model, weights, tmp_path)
    assert answer == {"digests": {each.name: each.digest for each in weights.entries}, "problem": ""}
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
