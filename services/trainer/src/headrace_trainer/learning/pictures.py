"""Images of packed micro-batches: which nodes of the prefix trees stand for them, and the positions of all nodes.

In a sequence a number below 0, made of an image's digest, stands for each of its tokens: so sequences have a node in
common only where they have the image in common. Shapes as in `packing`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from headrace_modelkit.pictures import ImageReader, Span, place_number
from headrace_modelkit.vision import Pictures, Placed, rope_positions
from torch import Tensor

from headrace_trainer.learning.samples import Image, Sample


def place_images(
    tokens: Many[int], images: Many[Image], reader: ImageReader, starts: Many[int] | None = None
) -> list[int]:
    """Tokens with these numbers in place of the images', which begin at `starts`; None: of a prompt, all are images'.

    Raises ValueError where they are not the images'.
    """
    if starts is None:
        starts = reader.starts(tokens, [reader.read(image.data) for image in images])
    placed = list(tokens)
    for start, image in zip(starts, images, strict=True):
        span = reader.span(placed, start, image.data)
        placed[start : start + span.image.tokens] = [place_number(image.digest)] * span.image.tokens
    return placed


def lay_out(
    sequences: Many[Sample],
    paths: Many[tuple[int, np.ndarray]],
    starts: Many[int],
    tokens_RL: Tensor,
    reader: ImageReader,
) -> Pictures:
    """The images of a micro-batch, whose tokens get their ids in `tokens_RL`: a model knows no numbers below 0.

    `paths` are (tree, nodes in it) of each sequence, `starts` each tree's first node among R * L.
    """
    shape, tokens_N = tuple(tokens_RL.shape), tokens_RL.view(-1).numpy()
    positions_3N = np.zeros((3, len(tokens_N)), np.int64)
    found: dict[int, Placed] = {}
    for (tree, path), sequence in zip(paths, sequences, strict=True):
        if not len(path):
            continue
        nodes = starts[tree] + np.asarray(path, np.int64)
        spans = _spans(sequence, len(path), reader)
        positions_3N[:, nodes] = rope_positions(len(nodes), spans)
        for span in spans:
            own = nodes[span.start : span.start + span.image.tokens]
            found.setdefault(int(own[0]), (own, span.image))
            tokens_N[own] = span.image.ids
    return Pictures.of(found.values(), positions_3N.reshape(3, *shape), reader)


def _spans(sequence: Sample, length: int, reader: ImageReader) -> list[Span]:
    """The images among the first tokens; those behind the last token that is learned from are not read."""
    tokens_L = np.asarray(sequence.tokens[:length], np.int64)
    files = {place_number(image.digest): image.data for image in sequence.images}
    spans, at, places = [], 0, np.flatnonzero(tokens_L < 0)
    while at < len(places):
        first = int(places[at])
        spans.append(Span(first, reader.read(files[int(tokens_L[first])])))
        at += spans[-1].image.tokens
    return spans
