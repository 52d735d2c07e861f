"""The processor of a model that reads images, videos or sounds, from its files, without what needs torchvision."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

from headrace_schema.images import READS
from headrace_schema.sections.generating import ModelSection
from transformers import (
    CONFIG_MAPPING,
    PROCESSOR_MAPPING,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedConfig,
)
from transformers.utils.hub import cached_file

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import load_architecture, location, reading, reads_images, trusted
from headrace_modelkit.pictures import ImageReader

_Configs: Any = CONFIG_MAPPING
_ImageProcessors: Any = AutoImageProcessor  # its functions are not annotated
_Extractors: Any = AutoFeatureExtractor
_Tokenizers: Any = AutoTokenizer
_Processors: Any = PROCESSOR_MAPPING
_VIDEO_FILE = "video_preprocessor_config.json"
_PROCESSOR_FILE = "processor_config.json"
_FILES = ("preprocessor_config.json", _PROCESSOR_FILE, _VIDEO_FILE)
"""Of a processor, beside a model."""
_VIDEO_BOUNDS = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
"""Pixels where neither a model's files nor its processor say them."""
_OF_GLM = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30_000}
"""As its video processor has them; no processor of GLM-V says it."""
_FRAME_TOKENS = 70
"""Of a frame of Gemma 4 at most, where a model's files do not say it."""


def load_images(config: ModelSection) -> ImageReader | None:
    """What reads images for a model; None for one that takes none. Raises ModelNotReadable."""
    architecture = load_architecture(config)
    if not reads_images(architecture):
        return None
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ModelNotReadable(
            f"model.path: {config.path!r} reads images, which needs Pillow: pip install 'headrace-modelkit[vision]'"
        ) from error
    with reading(config):
        processor = _processor(config, architecture)
    tower: Any = architecture.vision_config
    own = processor.image_processor
    if hasattr(own, "merge_size") and hasattr(tower, "spatial_merge_size"):
        patches = int(own.merge_size), int(own.patch_size)
        if patches != (int(tower.spatial_merge_size), int(tower.patch_size)):
            raise ModelNotReadable(
                f"model.path: preprocessor_config.json of {config.path!r} has other patches than its config.json; put "
                "the processor that the model was trained with beside it"
            )
    return ImageReader(processor, architecture, config.video, _video_bounds(config, processor, architecture))


def _video_bounds(config: ModelSection, processor: Any, architecture: PreTrainedConfig) -> dict[str, int]:
    """Fewest and most pixels of a frame, or of all, as the model's video processor has them; of Gemma 4 most tokens."""
    told = _told(config, _VIDEO_FILE) or _told(config, _PROCESSOR_FILE).get("video_processor", {})
    if architecture.model_type == "gemma4":
        return {"max_soft_tokens": int(told.get("max_soft_tokens", _FRAME_TOKENS))}
    own = getattr(processor, "videos_kwargs", {}).get("size", _VIDEO_BOUNDS)
    found = dict(_OF_GLM if architecture.model_type.startswith("glm") else own)
    size = told.get("size") or {}
    for name, other in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if isinstance(value := size.get(name) or told.get(other), int):
            found[name] = value
    return found


def _told(config: ModelSection, name: str) -> dict[str, Any]:
    """What a JSON file beside the model says; empty where there is none."""
    with reading(config):
        file = cached_file(config.path, name, _raise_exceptions_for_missing_entries=False, **location(config))
        found: dict[str, Any] = json.loads(Path(file).read_text()) if file else {}
    return found


def _processor(config: ModelSection, architecture: PreTrainedConfig) -> Any:
    """The family's processor without its parts for videos and sounds, some of which need torchvision."""
    # The part of Qwen-Omni that is trained has its processor under the whole model's name.
    family = _Processors[_Configs[architecture.model_type.removesuffix("_thinker")]]
    whole = type(family.__name__, (family,), {"check_argument_for_proper_class": lambda *_: None})
    parts = dict.fromkeys(family.get_attributes()) | {
        # Pillow's resizing everywhere: torchvision's differs from it in the last bits.
        "image_processor": _ImageProcessors.from_pretrained(config.path, backend="pil", **trusted(config)),
        "tokenizer": _Tokenizers.from_pretrained(config.path, **trusted(config)),
    }
    if "audio" in READS[architecture.model_type] and architecture.audio_config is not None:
        parts["feature_extractor"] = _Extractors.from_pretrained(config.path, **trusted(config))
    told, _ = family.get_processor_dict(config.path, **location(config))
    known = inspect.signature(family.__init__).parameters
    return whole(**{name: value for name, value in told.items() if name in known} | parts)


def copy_processor(config: ModelSection, directory: Path) -> None:
    """Writes what `load_images` reads beside a model."""
    for name in _FILES:
        found = cached_file(
            config.path, name, _raise_exceptions_for_missing_entries=False, **location(config)
        )
        if found:
            shutil.copyfile(found, directory / name)
