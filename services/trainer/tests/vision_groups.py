"""Made groups of samples whose prompts have images, and their log-probs by a forward of transformers for each."""

from __future__ import annotations

import io
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from headrace_modelkit.pictures import place_number
from headrace_modelkit.presets.clips import sound_file, video_file
from headrace_modelkit.presets.tiny_vision import plain_inputs
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_trainer.learning.pictures import place_images
from headrace_trainer.learning.samples import Image, Sample
from PIL import Image as Pillow


def png(seed: int, width: int = 16) -> bytes:
    file = io.BytesIO()
    values = np.random.default_rng(seed).integers(0, 255, (16, width, 3), dtype=np.uint8)
    Pillow.fromarray(values).save(file, "PNG")
    return file.getvalue()


def video(seed: int, count: int = 4) -> bytes:
    drawn = np.random.default_rng(seed)
    return video_file([drawn.integers(0, 255, (16, 16, 3), dtype=np.uint8) for _ in range(count)])


def sound(hertz: int, seconds: float = 1.05) -> bytes:
    times = np.arange(int(16_000 * seconds)) / 16_000
    return sound_file((0.5 * np.sin(2 * np.pi * hertz * times)).astype(np.float32))


def group_of(codec: Any, text: str, files: tuple[bytes, ...], seed: int) -> list[Sample]:
    drawn = random.Random(seed)
    ids = codec.encode_prompt(chat=[{"role": "user", "content": text}], images=files)
    images = tuple(Image(digest_bytes(data), data) for data in files)
    prompt = place_images(ids, images, codec.images)
    found = []
    for length in (3, 5, 4):
        answer = [7, *(drawn.randrange(3, 30) for _ in range(length))]
        trained = list(range(len(prompt), len(prompt) + len(answer)))
        advantages = [drawn.gauss(0, 1)] * len(answer)
        found.append(
            Sample([*prompt, *answer], trained, [-1.0] * len(answer), advantages, 1.0, images=images)
        )
    return found


def expected(model: Any, codec: Any, sequence: Sample) -> torch.Tensor:
    """(K,) log-probs of the trained tokens by transformers alone."""
    files = {place_number(image.digest): codec.images.read(image.data) for image in sequence.images}
    ids, images = list[int](), []
    while len(ids) < len(sequence.tokens):
        token = sequence.tokens[len(ids)]
        images += [files[token]] if token < 0 else []
        ids += files[token].ids if token < 0 else [token]
    tokens_BL = torch.tensor([ids])
    found_LV = (
        model(input_ids=tokens_BL, **plain_inputs(codec.images, tokens_BL, images)).logits[0].log_softmax(-1)
    )
    rows = torch.tensor(sequence.trained) - 1
    return found_LV[rows, tokens_BL[0, sequence.trained]]


def every(groups: Iterable[list[Sample]]) -> list[Sample]:
    return [sequence for group in groups for sequence in group]
