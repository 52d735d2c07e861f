"""Frames of a video as a family's processor takes them, in the place of its video processor, which needs torchvision.

Which frames is the run's choice; how large they are is the family's, within the run's bound. Knows no tower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from headrace_schema.clips import Video
from headrace_schema.sections.generating import VideoSection
from transformers import PreTrainedConfig
from transformers.video_utils import VideoMetadata

_OF_ALL_FRAMES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "glm46v")
"""Families whose bounds are on the pixels of all frames of a video, and not on each frame's."""
_WHOLE_POSITIONS = "qwen3_omni_moe_thinker"
"""The family whose class gives fractions for positions in time: times are rounded to what a position lasts."""


class Frames:
    """What a family's processor calls for one video: `found`, whatever it is called with."""

    def __init__(
        self,
        own: Any,
        architecture: PreTrainedConfig,
        wanted: VideoSection,
        bounds: Mapping[str, int],
        video: Video,
    ) -> None:
        """`own` is the family's processor of images, `bounds` are pixels of a frame or of all."""
        self._own, self._wanted, self._bounds = own, wanted, bounds
        self._architecture: Any = architecture
        self.merge_size = getattr(own, "merge_size", 1)
        self.temporal_patch_size = patch = int(getattr(own, "temporal_patch_size", 1))
        count = wanted.frames or round(video.seconds * (wanted.fps or 2.0))
        self.count = max(patch, min(count, wanted.max_frames) // patch * patch)
        shown = video.shown(self.count)
        read = {
            at: self._read(image) for at, image in zip(sorted(set(shown)), video.frames(shown), strict=True)
        }
        self.found: dict[str, Any] = self._joined([read[at] for at in shown])
        # In seconds in place of frames: those of a file need not be even.
        self.found["video_metadata"] = [
            VideoMetadata(
                total_num_frames=video.seconds,  # type: ignore[arg-type]
                fps=1.0,
                frames_indices=[video.times[at] for at in shown],  # type: ignore[misc]
            )
        ]
        self.rate = self._rate(video.seconds)
        """Frames a second, as positions in time have it."""

    def __call__(self, *_: Any, **__: Any) -> dict[str, Any]:
        return dict(self.found)

    def _read(self, image: Any) -> dict[str, torch.Tensor]:
        """One frame, alone: no other is in memory in its full size."""
        if self._architecture.model_type == "internvl":
            return dict(self._own(images=[image], crop_to_patches=False, return_tensors="pt"))
        if self._architecture.model_type == "gemma4":
            tokens = self._bounds["max_soft_tokens"]
            return dict(self._own(images=[image], max_soft_tokens=tokens, return_tensors="pt"))
        image = image.resize(self._size(image), self._own.resample)
        return dict(self._own(images=[image], temporal_patch_size=1, do_resize=False, return_tensors="pt"))

    def _joined(self, read: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
        """As the family's video processor names and lays out what its image processor made of the frames."""
        values = torch.cat([each["pixel_values"] for each in read])
        if "image_position_ids" in read[0]:
            return {
                "pixel_values_videos": values,
                "video_position_ids": torch.cat([each["image_position_ids"] for each in read]),
                "num_frames_per_video": torch.tensor([len(read)]),
                "num_soft_tokens_per_video": [int(read[0]["num_soft_tokens_per_image"][0])],
            }
        if "image_grid_thw" not in read[0]:
            return {"pixel_values_videos": values[None]}
        _, high, wide = read[0]["image_grid_thw"][0].tolist()
        area, patch = self._own.patch_size**2, self.temporal_patch_size
        values = values.view(-1, patch, high * wide, values.shape[1] // area, area)
        return {
            "pixel_values_videos": values.permute(0, 2, 3, 1, 4).flatten(0, 1).flatten(1),
            "video_grid_thw": torch.tensor([[len(read) // patch, high, wide]]),
        }

    def _size(self, image: Any) -> tuple[int, int]:
        """(width, height) of a frame as the family's video processor has it, and no more than is wanted."""
        factor = self._own.patch_size * self._own.merge_size
        low, high = map(float, self._bounds.values())
        width, height = image.size
        if self._architecture.model_type in _OF_ALL_FRAMES:
            low, high = low / self.count, high / self.count
            scale = max(1.0, factor / min(width, height))
            width, height = int(width * scale), int(height * scale)
        most = max(min(high, self._wanted.max_pixels), factor**2)
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize  # needs Pillow

        rows, columns = smart_resize(height, width, factor, min(low, most), most)
        return columns, rows

    def _rate(self, seconds: float) -> float:
        if self._architecture.model_type != _WHOLE_POSITIONS:
            return self.count / seconds
        unit = self._architecture.position_id_per_seconds
        step = max(1, round(unit * seconds * self.temporal_patch_size / self.count))
        return float(self.temporal_patch_size * unit / step)
