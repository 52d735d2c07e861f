"""Images in prompts: how a text says where one stands, which models read them, and how large they may be."""

from __future__ import annotations

from typing import Any

VISION_FAMILIES = (
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "gemma3",
    "gemma4",
    "internvl",
    "glm4v",
    "glm4v_moe",
    "glm46v",
)
"""model_type of vision-language models whose prompts may have images."""
IMAGE_MARK = "<image>"
"""Stands in a prompt with images where one of them belongs; in a prompt without images it is plain text."""
MOST_IMAGES = 32
"""Of one prompt, or one conversation."""
MOST_IMAGE_BYTES = 8 << 20
"""Of one image file."""
MOST_PROMPT_IMAGE_BYTES = 16 << 20
"""Of all image files of a prompt, or of a conversation, which travel in one message."""
MOST_GROUP_IMAGE_BYTES = 48 << 20
"""Of all image files of a group's conversations, which travel in one message to the trainer."""
MOST_IMAGE_PIXELS = 64_000_000
"""Width times height of one image: what is decoded before a processor makes it smaller."""
MOST_IMAGE_RATIO = 200
"""Longer side over shorter side."""
IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""Of image files, by Pillow's names: what is read. Others reach for programs of the machine (EPS: Ghostscript)."""
_PLAIN_MODES = ("1", "L", "P", "RGB")
"""Of Pillow: what becomes RGB without a choice, where nothing is transparent; others have more bits, or an alpha."""
_ON_WHITE = (
    'Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")'
)


def why_not_rgb(image: Any) -> tuple[str, str] | None:
    """Why an image of Pillow does not say what it looks like in RGB, and what to do; None where it does.

    What is transparent may be an alpha channel, a colour, or colours of a palette.
    """
    if image.has_transparency_data:
        if image.convert("RGBA").getextrema()[3] == (255, 255):
            return None
        reason = f"of mode {image.mode} with transparent parts, which does not say what is behind them"
        return reason, f"put it on a background: {_ON_WHITE}"
    if image.mode in _PLAIN_MODES:
        return None
    return (
        f"of mode {image.mode}, which does not say what it looks like in RGB",
        'convert it: image.convert("RGB")',
    )
