"""Images of prompts: placed among tokens, positions, features, what is frozen; against transformers' own forward."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from headrace_modelkit.loading import load_architecture, load_model
from headrace_modelkit.lora import adapted_layers, add_adapters
from headrace_modelkit.pictures import decode_image
from headrace_modelkit.presets.tiny_vision import plain_inputs, write_tiny_vision
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_modelkit.vision import (
    Pictures,
    freeze_vision,
    language_inputs,
    rope_positions,
    rope_shift,
    vision_tower,
)
from headrace_schema.images import VISION_FAMILIES
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.learning import LoraSection
from PIL import Image


def png(seed: int, width: int = 16, height: int = 16) -> bytes:
    file = io.BytesIO()
    values = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def section(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    write_tiny_vision(directory, family=request.param)
    return ModelSection(path=str(directory), dtype="float32")


@pytest.fixture(scope="module")
def codec(section):
    return load_tokenizer(section)


@pytest.fixture(scope="module")
def model(section):
    return load_model(section)


def test_two_images_of_a_prompt_are_read_as_transformers_reads_them(model, codec):
    """With what its processor makes of them: tokens around an image, positions, tokens that look ahead."""
    reader, files = codec.images, [png(1), png(2, width=24)]
    ids = codec.encode_prompt(chat=[{"role": "user", "content": "a<image>b<image>cd"}], images=files)
    images = [reader.read(file) for file in files]
    assert ids.count(reader.token) == sum(len(image.slots) for image in images)
    starts = reader.starts(ids, images)
    spans = [reader.span(ids, start, data) for start, data in zip(starts, files, strict=True)]
    tokens_BL = torch.tensor([ids])
    positions = rope_positions(len(ids), spans)
    given = plain_inputs(reader, tokens_BL, images)
    if hasattr(model.model, "get_rope_index"):
        told = {name: value for name, value in given.items() if "pixel" not in name}
        expected, shift = model.model.get_rope_index(tokens_BL, **told)
        assert (expected[:, 0].numpy() == positions).all() and int(shift) == rope_shift(spans)
    with torch.no_grad():
        whole = model(input_ids=tokens_BL, **given)
        # The same two rows, the second with the images the other way round in the list.
        places = [(np.arange(s.image.tokens) + s.start, s.image) for s in spans]
        again = [(own + len(ids), image) for own, image in reversed(places)]
        pictures = Pictures.of([*places, *again], np.stack([positions] * 2, 1), reader)
        count = sum(len(image.inputs["pixel_values"]) for image in images)
        assert len(pictures.inputs["image"]["pixel_values"]) == count, (
            "an image that stands there twice is computed once"
        )
        inputs = language_inputs(model.model, tokens_BL.repeat(2, 1), pictures)
        hidden_RLD = model.model.language_model(**inputs, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden_RLD)
        cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        logits = cap * (logits / cap).tanh() if cap else logits
        blind = model(input_ids=tokens_BL, **given | {"pixel_values": 0.5 * given["pixel_values"]})
    assert torch.allclose(logits, whole.logits.repeat(2, 1, 1), atol=1e-5)
    assert not torch.allclose(blind.logits[:, -1], whole.logits[:, -1], atol=1e-3), "the images are seen"


def test_images_and_their_tokens_must_match(codec):
    chat = [{"role": "user", "content": "<image>which?"}]
    with pytest.raises(ValueError, match="1 image tokens for 2 images"):
        codec.encode_prompt(chat=chat, images=[png(1), png(2)])
    with pytest.raises(ValueError, match="2 image tokens for 1 images"):
        twice = {**chat[0], "content": f"<image>{codec.images.placeholders['image']}"}
        codec.encode_prompt(chat=[twice], images=[png(1)])
    with pytest.raises(ValueError, match="an image cannot be read"):
        codec.encode_prompt(chat=chat, images=[png(1)[:60]])
    image = codec.images.read(png(1))
    with pytest.raises(ValueError, match="tokens of image 1 of 1 are not there"):
        codec.images.starts(image.ids[:-1], [image])
    with pytest.raises(ValueError, match="image tokens, and the 1 images have"):
        codec.images.starts([*image.ids, codec.images.token], [image])
    for ids, start in ((image.ids[:-1], 0), (image.ids, 1)):
        with pytest.raises(ValueError, match="are not those of an image"):
            codec.images.span(ids, start, png(1))
    assert codec.encode_prompt(chat=chat).count(codec.images.token) == 0, "without images a mark is text"


def test_a_policy_may_sample_the_image_token(codec):
    image = codec.images.read(png(1))
    ids = [3, *image.ids, 4, codec.images.token]
    span = codec.images.span(ids, 1, png(1))
    assert rope_positions(len(ids), [span])[:, -1].tolist() == [2 + image.extent] * 3


def test_an_image_is_turned_as_its_orientation_says():
    image = Image.new("L", (8, 4))
    exif = image.getexif()
    exif[0x0112] = 6
    file = io.BytesIO()
    image.save(file, "JPEG", exif=exif)
    assert (decode_image(file.getvalue()).size, decode_image(file.getvalue()).mode) == ((4, 8), "RGB")


def test_a_frozen_tower_learns_nothing(section):
    model = load_model(section)
    freeze_vision(model, torch.bfloat16)
    tower = [*vision_tower(model).parameters()]
    assert all(not own.requires_grad and own.dtype == torch.bfloat16 for own in tower)
    assert all(own.requires_grad for own in model.model.language_model.parameters())


@pytest.mark.parametrize("vision", [False, True])
def test_adapters_reach_the_tower_where_it_learns(section, vision):
    model = load_model(section)
    add_adapters(model, LoraSection(rank=2), 0, vision=vision)
    names = [name for name, _ in adapted_layers(model)]
    of_text = [name for name in names if "language_model" in name]
    assert of_text and (len(of_text) < len(names)) is vision


def test_a_processor_of_other_patches_is_refused(section, tmp_path):
    for file in Path(section.path).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    if "merge_size" not in settings:
        pytest.skip("a family that makes all images as large")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**settings, "patch_size": 8}))
    with pytest.raises(ValueError, match="other patches"):
        load_tokenizer(section.model_copy(update={"path": str(tmp_path)}))


def test_a_template_beside_the_processor_alone_is_found(section, tmp_path):
    for file in Path(section.path).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    template = (tmp_path / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    codec = load_tokenizer(section.model_copy(update={"path": str(tmp_path)}))
    assert codec.tokenizer.chat_template == template
    assert load_architecture(section).model_type in VISION_FAMILIES
