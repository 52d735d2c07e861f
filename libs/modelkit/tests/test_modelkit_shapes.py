"""Models of published shapes: as many parameters as the published ones, and a text for every token."""

import pytest
import torch
from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.shapes import SHAPES, main, many_characters
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_schema.sections.generating import ModelSection
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("qwen2.5-0.5b", 494_032_768), ("qwen2.5-1.5b", 1_543_714_304), ("qwen2.5-7b", 7_615_616_512)],
)
def test_a_shape_has_the_published_models_parameters(name, parameters):
    kind, fields = SHAPES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(kind(**fields))
    assert sum(weight.numel() for weight in model.parameters()) == parameters


def test_every_token_of_an_answer_is_a_text():
    tokenizer = many_characters(50_000)
    ids = [0, 3, 31, 32, 49_999]
    assert len(tokenizer) == 50_000 and len(tokenizer.decode(ids[1:])) == 4
    assert tokenizer("482=").input_ids == [tokenizer.convert_tokens_to_ids(each) for each in "482="]


def test_the_command_writes_a_model_that_loads(tmp_path, capsys):
    main(["qwen3-moe-tiny", str(tmp_path / "moe"), "--tokenizer", "characters"])
    section = ModelSection(path=str(tmp_path / "moe"))
    model = load_model(section)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert load_tokenizer(section).eos_ids and capsys.readouterr().out.strip() == str(tmp_path / "moe")
