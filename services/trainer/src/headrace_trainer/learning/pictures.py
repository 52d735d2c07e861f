"""Images of packed micro-batches: which nodes of the prefix trees stand for them, and the positions of all nodes.

In a sequence a number below 0, made of an image's digest, stands for each of its tokens: so sequences have a node in
common only where they have the image in common. Shapes as in `packing`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from headrace_modelkit.vision import ImageReader, Pictures, Pixels, Span, rope_positions

from headrace_trainer.learning.samples import Image, Sequence

DIGITS = 15
"""Hexadecimal ones of a digest that a number is made of: it fits into 64 bits with its sign."""


def place_id(image: Image) -> int:
    """The number below 0 that stands for each token of an image."""
    return -1 - int(image.digest[:DIGITS], 16)


def place_images(prompt: Many[int], images: Many[Image], reader: ImageReader) -> list[int]:
    """A prompt with these numbers in place of its image tokens. Raises ValueError where they are not the images'."""
    placed = list(prompt)
    for span, image in zip(
        reader.spans(prompt, [reader.read(image.data) for image in images]), images, strict=True
    ):
        placed[span.start : span.start + span.image.tokens] = [place_id(image)] * span.image.tokens
    return placed


def lay_out(
    sequences: Many[Sequence],
    paths: Many[tuple[int, np.ndarray]],
    starts: Many[int],
    shape: tuple[int, int],
    reader: ImageReader,
) -> Pictures:
    """The images of a micro-batch of `shape` (R, L).

    `paths` are (tree, nodes in it) of each sequence, `starts` each tree's first node among R * L.
    """
    positions_3N = np.zeros((3, shape[0] * shape[1]), np.int64)
    found: dict[int, tuple[np.ndarray, Pixels]] = {}
    for (tree, path), sequence in zip(paths, sequences, strict=True):
        if not len(path):
            continue
        nodes = starts[tree] + np.asarray(path, np.int64)
        spans = _spans(sequence, reader)
        positions_3N[:, nodes] = rope_positions(len(nodes), spans)
        for span in spans:
            own = nodes[span.start : span.start + span.image.tokens]
            found.setdefault(int(own[0]), (own, span.image))
    return Pictures.of(found.values(), positions_3N.reshape(3, *shape), reader.blank())


def _spans(sequence: Sequence, reader: ImageReader) -> list[Span]:
    places = np.flatnonzero(np.asarray(sequence.tokens, np.int64) < 0)
    spans, at = [], 0
    for image in sequence.images:
        pixels = reader.read(image.data)
        spans.append(Span(int(places[at]), pixels))
        at += pixels.tokens
    return spans
