"""Images and videos in prompts in every engine that takes them: log-probs are transformers' own, also after an
install.
"""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from headrace_modelkit.presets.clips import video_file
from headrace_modelkit.presets.tiny_vision import START, plain_inputs, tiny_vision_model, write_tiny_vision
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.base import EngineConfig
from headrace_rollout.engines.samples import Group, ImageAt, Sample
from headrace_schema.images import marks_in
from headrace_schema.sections.generating import ModelSection
from PIL import Image
from rig import ENGINES_HERE, OPTIONS, Rig

pytestmark = pytest.mark.timeout(900)  # an engine of each family is started
SHAPE = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}
TRIED = ("qwen2_5_vl", "qwen3_vl")
"""`READS` of `engines.vllm.backend`, which cannot be imported where vLLM is not."""
PROMPTS = (
    ("<image>which?", 1),
    ("<image>which?", 1),  # the same ids, another image
    ("a<image>b<image>c", 2),
    ("no image", 0),
    ("<video>which?", 1),
    ("a<video>b<image>c<video>", 3),
)
RIGS = [
    pytest.param((name, family), id=f"{name}-{family}", marks=pytest.mark.nightly)  # they take long to start
    for name in ENGINES_HERE
    if name == "vllm"  # test_engine_vision.py has the built-in one; no other takes images
    for family in TRIED
]


@pytest.fixture(scope="module", params=RIGS)
def rig(request, tmp_path_factory):
    chosen, family = request.param
    directory = tmp_path_factory.mktemp(family)
    write_tiny_vision(directory, family=family, seed=1, frames=2, **SHAPE)
    forget_interleaving(directory / "config.json")
    section = ModelSection(path=str(directory), dtype="float32")
    config = EngineConfig(section, load_tokenizer(section), 8)
    engine = ENGINES.choose(chosen, OPTIONS[chosen]).build(config)
    assert family in engine.capabilities.images

    async def place() -> None:
        await engine.place((torch.device("cpu"),), 1)

    asyncio.run(place())
    models = [tiny_vision_model(family, seed, frames=2, **SHAPE) for seed in (1, 2)]
    yield Rig(chosen, section, engine, *models)
    asyncio.run(engine.close())


def forget_interleaving(file: Path) -> None:
    """Takes out what transformers computes anyway, and vLLM only where it is said."""
    written = json.loads(file.read_text())
    written["text_config"]["rope_parameters"].pop("mrope_interleaved", None)
    file.write_text(json.dumps(written))


def made(kind: str, seed: int) -> bytes:
    """An image that is made smaller, or a video of four or six frames."""
    drawn, file = np.random.default_rng(seed), io.BytesIO()
    if kind == "video":
        shape = (4 + 2 * (seed % 2), 16, 16, 3)
        return video_file([*drawn.integers(0, 255, shape, dtype=np.uint8)])
    Image.fromarray(drawn.integers(0, 255, (70, 40, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def groups(codec) -> list[Group]:
    found, drawn = [], 0
    for text, count in PROMPTS:
        kinds = marks_in(text, ("image", "video"))
        images = tuple(made(kind, drawn + index) for index, kind in enumerate(kinds))
        assert len(images) == count
        drawn += count
        ids = codec.encode_prompt(chat=[{"role": "user", "content": text}], images=images)
        starts = codec.images.starts(ids, [codec.images.read(data) for data in images])
        found.append(
            Group(len(found), ids, [Sample(0, 1), Sample(1, 1)], tuple(map(ImageAt, starts, images)))
        )
    return found


def expected(model, codec, group: Group, answer: list[int]) -> list[float]:
    """By transformers alone: its own positions, its own placing of features."""
    ids = torch.tensor([[*group.prompt_ids, *answer]])
    read = [codec.images.read(image.data) for image in group.images]
    kinds = torch.zeros_like(ids)
    for at, image in zip(group.images, read, strict=True):
        kinds[:, at.start + image.slots] = 1 + (image.kind == "video")
    inputs = plain_inputs(codec.images, ids, read, kinds)
    with torch.no_grad():
        found = model(input_ids=ids, **inputs).logits[0].log_softmax(-1)
    start = len(group.prompt_ids)
    return [float(found[start + at - 1, token]) for at, token in enumerate(answer)]


async def test_log_probs_of_prompts_with_images_are_transformers_also_after_an_install(rig):
    codec = load_tokenizer(rig.model)
    told = 0
    for model in (rig.model_a, rig.model_b, rig.model_a):
        await rig.install(model)
        asked = groups(codec)
        for key, output in (await rig.generate(asked, max_new_tokens=12)).items():
            group = asked[key.prompt_ordinal]
            answer = list(output.whole.token_ids)
            # transformers' forward places features by id
            own = {*codec.images.tokens.values(), codec.tokenizer.convert_tokens_to_ids(START)}
            answer = answer[: next((at for at, token in enumerate(answer) if token in own), len(answer))]
            own = expected(model, codec, group, answer)
            assert output.whole.log_probs[: len(answer)] == pytest.approx(own, abs=1e-4), key
            told += len(answer)
    assert told > 100
