"""What service and environment child say to each other: 1 byte of kind, then the payload."""

from __future__ import annotations

from enum import IntEnum

from headrace_servicekit.process.worker_pipes import Codec

MEMORY_PART = "HEADRACE_MEMORY_PART"
"""Variable of a child whose lease is of a part of its GPUs' memory: the part that it may use."""


class Kind(IntEnum):
    """What a frame's payload is."""

    CATALOGUE = 1
    """Asked with nothing, answered with JSON [[backend, name], …]."""
    OPEN = 2
    """Asked with JSON (see `headrace_simulator.pools.pool`), answered with an OpenPoolResponse that describes the
    environments."""
    OPERATE = 3
    """A StepRequest that has only operations is answered with StepResponses, whose
    outcomes are in the operations' order."""
    RENDER = 4
    """Asked with JSON {environment: index}, answered with a Tensor."""
    FAULT = 5
    """Answer with JSON {field, message}, where an OPEN, a RENDER or a VIDEO failed."""
    VIDEO = 6
    """Asked with JSON {environment: index}, answered with the MP4 file of the episode that is recorded."""
    THREADS = 7
    """Asked with JSON {threads: number} to compute with from now on, answered with nothing."""


Message = tuple[Kind, bytes]
"""Kind and payload."""


def encode(message: Message) -> bytes:
    """A frame's body."""
    kind, payload = message
    return bytes([kind]) + payload


def decode(body: bytes) -> Message:
    """Kind and payload of a frame's body; ValueError where there is no such kind."""
    return Kind(body[0]), body[1:]


CODEC = Codec(encode, decode)
