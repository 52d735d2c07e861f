"""Checkpoints of quantised weights, in the layout in which they are published: what is read is what they say."""

import json

import pytest
import torch
from headrace_modelkit.dequantising import FP4
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.exporting import export_model
from headrace_modelkit.loading import load_architecture, load_model, quantisation
from headrace_modelkit.model_files import ModelFiles, check_model, empty_model, open_model
from headrace_modelkit.presets.families import write_family
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_modelkit.weights import state_tensors
from headrace_schema.sections.generating import ModelSection
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
WIDE = {"hidden_size": 64, "intermediate_size": 64}
"""MXFP4 has groups of 32 numbers."""


def written(directory, family, change, scheme, **keys):
    """A model of the family whose files and config.json are as its quantised checkpoints; and its tensors before."""
    write_family(directory, family, **keys)
    before = load_file(directory / "model.safetensors")
    save_file(change(before), directory / "model.safetensors", metadata={"format": "pt"})
    configure(directory, quantization_config=scheme, dtype="bfloat16")
    return before


def configure(directory, **keys):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def blocks_of(weight, rows=16, columns=16):
    """fp8 numbers, their scales, and what they say: a block's largest number is 448, as DeepSeek's converter has it."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    grid = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scales = grid.abs().amax((1, 3)).clamp(min=1e-4) / 448
    wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    wide = wide[: weight.shape[0], : weight.shape[1]]
    numbers = (weight / wide).to(torch.float8_e4m3fn)
    return numbers, scales, numbers.float() * wide


def in_fp8(tensors):
    """As DeepSeek V3's files: linear layers and experts, not embeddings, head, norms and routers."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            found[name], found[f"{name}_scale_inv"], _ = blocks_of(tensor)
        else:
            found[name] = tensor.bfloat16() if tensor.dim() > 1 else tensor
    return found


def in_mxfp4(tensors):
    """As gpt-oss's files: (E, inputs, outputs) as groups of 32 inputs for each output."""
    found = {}
    drawn = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            groups = (experts, outputs, inputs // 32)
            found[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), generator=drawn, dtype=torch.uint8)
            found[f"{name}_scales"] = torch.randint(118, 128, groups, generator=drawn, dtype=torch.uint8)
        else:
            found[name] = tensor.bfloat16()
    return found


def section(directory, dtype="float32"):
    return ModelSection(path=str(directory), dtype=dtype)


def same_parts(given):
    """Whole weights, and boxes that begin and end within blocks and groups."""
    empty = empty_model(given)
    source = open_model(given, empty)
    assert isinstance(source, ModelFiles)
    loaded = {name: value.detach() for name, value in state_tensors(load_model(given))}
    for name, whole in loaded.items():
        assert torch.equal(source.read(name), whole), name
        ends = [(size // 3, max(size // 3 + 1, size - 1)) for size in whole.shape]
        assert torch.equal(source.read(name, tuple(ends)), whole[tuple(slice(*end) for end in ends)]), name
    return loaded


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3"])
def test_fp8_in_blocks_is_what_numbers_and_scales_say(family, tmp_path):
    """Of sizes that blocks do not divide too: DeepSeek V3's 576 rows of keys in blocks of 128."""
    before = written(tmp_path / "model", family, in_fp8, FP8)
    loaded = same_parts(section(tmp_path / "model"))
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(loaded[name], blocks_of(before[name])[2])
    if family == "deepseek_v3":
        ragged = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
        assert before[ragged].shape[0] % 16 and torch.equal(loaded[ragged], blocks_of(before[ragged])[2])
        each = [f"model.layers.1.mlp.experts.{at}.down_proj.weight" for at in range(4)]
        experts = torch.stack([blocks_of(before[name])[2] for name in each])
        assert torch.equal(loaded["model.layers.1.mlp.experts.down_proj"], experts)
    off = max(float((loaded[name] - before[name]).abs().max()) for name in before if name in loaded)
    assert off < 0.1


def test_fp8_is_what_transformers_makes_of_it(tmp_path):
    """Where blocks divide all sizes: transformers reads no others."""
    written(tmp_path / "model", "qwen3", in_fp8, FP8)
    own = dict(state_tensors(load_model(section(tmp_path / "model", "bfloat16"))))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        dtype=torch.bfloat16,
        quantization_config=FineGrainedFP8Config(weight_block_size=(16, 16), dequantize=True),
    )
    assert all(torch.equal(own[name], tensor) for name, tensor in state_tensors(theirs))


def test_fp8_with_one_scale_for_all_is_read(tmp_path):
    """As Ministral 3 has it, with a scale of activations that nothing here uses."""

    def change(tensors):
        found = {}
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight"):
                found[name] = (tensor / 0.01).to(torch.float8_e4m3fn)
                found[f"{name}_scale_inv"] = torch.tensor(0.01)
                found[name.replace("weight", "activation_scale")] = torch.tensor(3.0)
            else:
                found[name] = tensor
        return found

    before = written(tmp_path / "model", "ministral3", change, {**FP8, "weight_block_size": None})
    loaded = same_parts(section(tmp_path / "model"))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(loaded[name], (before[name] / 0.01).to(torch.float8_e4m3fn).float() * 0.01)


def test_packed_fp4_experts_with_scales_of_their_own_are_read(tmp_path):
    """DeepSeek V4: two numbers a byte, an exponent for each 8 here (32 there), called `.scale`."""
    stored = {}

    def change(tensors):
        found = dict(tensors)
        for name in tensors:
            if ".experts." in name and name.endswith(".weight") and "shared" not in name:
                codes = torch.randint(0, 256, (tensors[name].shape[0], tensors[name].shape[1] // 2))
                scales = torch.full((len(codes), tensors[name].shape[1] // 8), 0.25)
                low, high = (torch.tensor(FP4)[each] for each in (codes & 15, codes >> 4))
                stored[name] = torch.stack([low, high], -1).flatten(1) * 0.25
                found[name] = codes.to(torch.uint8).view(torch.int8)
                found[name.removesuffix("weight") + "scale"] = scales.to(torch.float8_e8m0fnu)
        return found

    written(tmp_path / "model", "deepseek_v4", change, {**FP8, "scale_fmt": "ue8m0", "expert_dtype": "fp4"})
    loaded = same_parts(section(tmp_path / "model"))
    down = sorted(name for name in stored if "layers.0" in name and ".w2." in name)
    assert torch.equal(
        loaded["model.layers.0.mlp.experts.down_proj"], torch.stack([stored[name] for name in down])
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_is_what_transformers_makes_of_it(dtype, tmp_path):
    written(tmp_path / "model", "gpt_oss", in_mxfp4, {"quant_method": "mxfp4"}, **WIDE)
    files = load_file(tmp_path / "model" / "model.safetensors")
    loaded = same_parts(section(tmp_path / "model", dtype))
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"):
        blocks, scales = files[f"{name}_blocks"], files[f"{name}_scales"]
        expected = convert_moe_packed_tensors(blocks, scales, dtype=getattr(torch, dtype))
        assert torch.equal(loaded[name], expected)


def test_its_export_has_plain_weights_and_says_so(tmp_path):
    before = written(tmp_path / "model", "deepseek_v3", in_fp8, FP8)
    given = section(tmp_path / "model", "bfloat16")
    tensors = [(name, value.clone()) for name, value in state_tensors(load_model(given))]
    export_model(given, tensors, character_tokenizer(), tmp_path / "out")
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert made.keys() == before.keys()
    kinds = {value.dtype for name, value in made.items() if "correction_bias" not in name}
    assert kinds == {torch.bfloat16}
    again = load_architecture(section(tmp_path / "out"))
    assert not quantisation(again) and again.dtype is torch.bfloat16


def without(end):
    return lambda tensors: {name: each for name, each in in_fp8(tensors).items() if not name.endswith(end)}


def grown(tensors):
    found = in_fp8(tensors)
    return found | {name: torch.ones(9, 9) for name in found if name.endswith("o_proj.weight_scale_inv")}


@pytest.mark.parametrize(
    ("change", "scheme", "words"),
    [
        (
            without("o_proj.weight_scale_inv"),
            FP8,
            r"o_proj\.weight is quantised \(F8_E4M3\).*no .*_scale_inv",
        ),
        (without("o_proj.weight"), FP8, r"2 weights are missing, first .*o_proj\.weight"),
        (grown, FP8, r"o_proj\.weight_scale_inv has the shape \[9, 9\].*weight_block_size \[16, 16\]"),
        (in_fp8, None, r"quantised.*, and config\.json has no quantization_config"),
        (in_fp8, {"quant_method": "awq", "bits": 4}, r"quantised by awq, and those of fp8 and mxfp4 alone"),
    ],
    ids=["no scale", "no weight", "scale of another shape", "not said", "another method"],
)
def test_what_cannot_be_read_is_named(change, scheme, words, tmp_path):
    written(tmp_path / "model", "qwen3", change, scheme)
    for ask in (check_model, load_model):
        with pytest.raises(ModelNotReadable, match=r"model\.path: .*" + words):
            ask(section(tmp_path / "model"))


def test_mxfp4_without_exponents_is_named(tmp_path):
    def change(tensors):
        return {name: each for name, each in in_mxfp4(tensors).items() if not name.endswith("_scales")}

    written(tmp_path / "model", "gpt_oss", change, {"quant_method": "mxfp4"}, **WIDE)
    with pytest.raises(ModelNotReadable, match=r"down_proj_blocks is quantised, and no .*down_proj_scales"):
        check_model(section(tmp_path / "model"))
