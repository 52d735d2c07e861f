"""Each family that reads images: what a backend computes and publishes of it, against transformers alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.tiny_vision import write_tiny_vision
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_modelkit.vision import vision_tower
from headrace_modelkit.weights import CheckpointNames, state_tensors
from headrace_schema.images import VISION_FAMILIES
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.generating import ModelSection
from headrace_trainer.algorithms._base import OLD_LOG_PROBS
from headrace_trainer.workloads import run_kind
from safetensors.torch import load_file
from vision_groups import every, expected, group_of, png, sound, video

QUICK = ("qwen3_5", "gemma4")
"""Layers with states; images that look ahead, windows, and inputs of each layer."""
CAUSAL = "gemma4-causal"
"""As its small models are."""
STATES = ("qwen3_5", "qwen3_5_moe")
APART = (*STATES, "gemma3", "gemma4")
"""Every answer of these gets a row of its own."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=() if each in QUICK else pytest.mark.nightly)
        for each in (*VISION_FAMILIES, CAUSAL)
    ],
)
def directory(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / request.param
    more = {"use_bidirectional_attention": None} if request.param == CAUSAL else {}
    write_tiny_vision(directory, family=request.param.split("-")[0], frames=2, initializer_range=0.2, **more)
    return directory


@pytest.fixture(scope="module")
def codec(directory):
    return load_tokenizer(ModelSection(path=str(directory), dtype="float32"))


@pytest.fixture
def groups(codec):
    texts = [("a<image>b<image>c", (png(3, 32), png(1))), ("no image", ())]
    if "video" in codec.images.kinds:
        texts += [("<video>d", (video(1),)), ("a<video>b<video>c", (video(1), video(2, 6)))]
        if not codec.images.family.startswith("glm"):  # whose own forward takes no image beside a video
            texts += [("a<video>b<image>c<video>", (video(1), png(3, 32), video(2, 6)))]
    if "audio" in codec.images.kinds:
        texts += [("a<audio>b<audio>c", (sound(400), sound(700, 0.3)))]
    return [group_of(codec, text, images, seed) for seed, (text, images) in enumerate(texts)]


@pytest.mark.parametrize("freeze", [[], ["vision"]])
def test_log_probs_gradient_and_names_are_those_of_transformers(
    make_backend, directory, codec, groups, relative_l2, freeze
):
    """One after the other, which saves loading the model again."""
    backend = make_backend(model={"path": str(directory)}, trainer={"freeze": freeze})
    assert backend.shares_prefixes is (directory.name not in APART)
    files = load_file(directory / "model.safetensors")
    model: Any = load_model(ModelSection(path=str(directory), dtype="float32"))
    names = CheckpointNames.of(model)
    published = {name: part for own in backend.weights() for name, part in names.split(*own)}
    assert published.keys() == files.keys()
    assert all(torch.equal(value, files[name]) for name, value in published.items())

    rows = groups if backend.shares_prefixes else [[each] for each in every(groups)]
    found = backend.infer(rows, [OLD_LOG_PROBS])
    own = [expected(model, codec, sequence) for sequence in every(groups)]
    for columns, expected_K in zip(found, own, strict=True):
        assert columns[OLD_LOG_PROBS] == pytest.approx(expected_K.tolist(), abs=1e-5)

    total = sum(
        -(torch.tensor(each.advantages) * log_probs_K).sum()
        for each, log_probs_K in zip(every(groups), own, strict=True)
    )
    total.backward()
    tower = {name for name, _ in vision_tower(model).named_parameters(prefix="model")}
    gradient = {
        name: p.grad
        for name, p in model.named_parameters()
        if p.grad is not None and p.grad.any() and not (freeze and name in tower)
    }
    assert backend.micro(rows)
    learned = {name: value for name, value in backend.reduced_gradient(1.0).items() if value.any()}
    assert learned.keys() == gradient.keys()
    assert relative_l2(learned, gradient) <= 2e-5

    before = {name: value.clone() for name, value in backend.weights()}
    assert backend.micro(rows) and backend.commit(10.0, 1e-2).finite
    moved = {name for name, value in backend.weights() if not torch.equal(value, before[name])}
    of_tower = {name for name in moved if "vis" in name or "multi_modal" in name}
    assert len(of_tower) < len(moved) and bool(of_tower) is not bool(freeze)


def test_adapters_begin_as_the_model_and_learn_in_its_language_part(make_backend, directory, codec, groups):
    backend = make_backend(model={"path": str(directory)}, trainer={"lora": {"rank": 4}})
    rows = groups if backend.shares_prefixes else [[each] for each in every(groups)]
    model: Any = load_model(ModelSection(path=str(directory), dtype="float32"))
    for columns, sequence in zip(backend.infer(rows, [OLD_LOG_PROBS]), every(groups), strict=True):
        own = expected(model, codec, sequence)
        assert columns[OLD_LOG_PROBS] == pytest.approx(own.tolist(), abs=1e-5)
    assert backend.micro(rows)
    learned = {name for name, value in backend.reduced_gradient(1.0).items() if value.any()}
    assert learned and all("lora" in name and "language_model" in name for name in learned)
    assert backend.commit(10.0, 1e-2).finite


def test_texts_alone_share_their_prompt_whatever_images_would_see(
    make_backend, directory, codec, relative_l2
):
    """Of data without images a model's language part alone is computed."""
    backend = make_backend(model={"path": str(directory)}, sees=False)
    assert backend.shares_prefixes is (directory.name not in STATES)
    groups = [group_of(codec, text, (), seed) for seed, text in enumerate(("no image", "none"))]
    rows = groups if backend.shares_prefixes else [[each] for each in every(groups)]
    model: Any = load_model(ModelSection(path=str(directory), dtype="float32"))
    own = [expected(model, codec, sequence) for sequence in every(groups)]
    for columns, expected_K in zip(backend.infer(rows, [OLD_LOG_PROBS]), own, strict=True):
        assert columns[OLD_LOG_PROBS] == pytest.approx(expected_K.tolist(), abs=1e-5)
    total = sum(
        -(torch.tensor(each.advantages) * log_probs_K).sum()
        for each, log_probs_K in zip(every(groups), own, strict=True)
    )
    total.backward()
    assert backend.micro(rows)
    learned = {name: value for name, value in backend.reduced_gradient(1.0).items() if value.any()}
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert learned.keys() == gradient.keys() and relative_l2(learned, gradient) <= 2e-5
    assert backend.commit(10.0, 1e-2).finite


def test_an_export_is_what_the_model_was_read_from(make_config, directory, codec, tmp_path):
    config = TrainerConfig.model_validate(make_config(model={"path": str(directory), "dtype": "float32"}))
    model, target = load_model(config.model), tmp_path / "exported"
    run_kind(config).export(state_tensors(model), target)
    assert {path.name for path in target.iterdir()} >= {path.name for path in directory.iterdir()}
    own, expected = load_file(target / "model.safetensors"), load_file(directory / "model.safetensors")
    assert own.keys() == expected.keys() and all(torch.equal(own[name], expected[name]) for name in own)
    again = load_tokenizer(ModelSection(path=str(target), dtype="float32"))
    image, before = again.images.read(png(1)), codec.images.read(png(1))
    assert image.ids == before.ids
    assert all(torch.equal(image.inputs[name], before.inputs[name]) for name in before.inputs)
