"""Images in prompts: how a text says where one stands, which models read them, and how large they may be."""

from __future__ import annotations

VISION_FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""model_type of vision-language models whose placeholders and positions are known."""
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
