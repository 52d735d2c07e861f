"""What a plan says that towers keep of videos, images and sounds, against what autograd keeps of real ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from headrace_modelkit.loading import body_of, load_model
from headrace_modelkit.presets.clips import video_file
from headrace_modelkit.presets.tiny_vision import write_tiny_vision
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_modelkit.vision import vision_tower
from headrace_schema.images import READS
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends.fsdp.layouts.planned import choose_layout
from headrace_trainer.backends.fsdp.layouts.towers import saved_bytes, towers_of
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.memory import Room, Rooms
from vision_groups import sound

TOKENS = 2048
SIDE = 32
ROOMY = Rooms(Room("host memory", 2**50, 2**50), Room("GPU memory", 2**50, 2**50))


@pytest.fixture(scope="module", params=[family for family in READS if family != "gemma3"])
def directory(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    write_tiny_vision(directory, family=request.param, frames=2)
    return directory


@pytest.fixture
def config_of(make_config, directory):
    def make(
        frames: int = 8, freeze: tuple[str, ...] = (), files: tuple[str, ...] = ("video",)
    ) -> TrainerConfig:
        video = {"frames": frames, "max_frames": 1024, "max_pixels": SIDE**2}
        model = {"path": str(directory), "video": video}
        trainer = {"freeze": list(freeze), "micro_batch_tokens": TOKENS}
        return TrainerConfig.model_validate(
            make_config(model=model, trainer=trainer) | {"files": list(files)}
        )

    return make


def clip(count: int) -> bytes:
    drawn = np.random.default_rng(0)
    return video_file([*drawn.integers(0, 255, (count, SIDE, SIDE, 3), dtype=np.uint8)])


@pytest.mark.parametrize("frames", [4, 16])
def test_a_tower_is_planned_to_keep_of_a_video_what_autograd_keeps(config_of, frames):
    config = config_of(frames)
    model, reader = load_model(config.model), load_tokenizer(config.model).images
    video, body = reader.read(clip(frames)), body_of(model)
    untyped: Any = body
    kept = saved_bytes(vision_tower(model), lambda: untyped.get_image_features(**video.tower_inputs))
    tower = towers_of(config, TOKENS)["image"]
    assert len(video.slots) <= TOKENS
    assert 2 * tower.block + tower.outside == pytest.approx(kept, rel=0.1)


def test_a_tower_is_planned_to_keep_of_sounds_what_autograd_keeps(config_of):
    config = config_of(files=("audio",))
    reader = load_tokenizer(config.model).images
    if "audio" not in reader.kinds:
        return
    model, heard = load_model(config.model), reader.read(sound(440, 4.0))
    untyped: Any = body_of(model)
    kept = saved_bytes(vision_tower(model), lambda: untyped.get_audio_features(**heard.tower_inputs))
    tower = towers_of(config, len(heard.slots))["audio"]
    assert 2 * tower.block + tower.outside == pytest.approx(kept, rel=0.1)


def activations(config: TrainerConfig) -> int:
    algorithm = build_algorithm(config.algorithm)
    options = FsdpOptions(shard="state")
    _, plan = choose_layout(config, algorithm, options, 1, 1, ROOMY)
    return plan.device["activations"]


def test_a_plan_grows_with_the_frames_of_a_video_up_to_the_tokens_of_a_micro_batch(config_of):
    few, more = activations(config_of(4)), activations(config_of(8))
    most, all_tokens = activations(config_of(1024)), activations(config_of(files=("image",)))
    assert few < more < most == all_tokens, "of images no key bounds the size"
    assert (
        activations(config_of(4, freeze=("vision",))) == activations(config_of(8, freeze=("vision",))) < few
    )
