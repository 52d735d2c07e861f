"""A version of a small model's weights, published by a store."""

import numpy as np
from headrace.common.v1 import common_pb2

RUN = "runs/r"
LAYOUT = [
    ("embed", common_pb2.DATA_TYPE_BFLOAT16, (1000, 301)),
    ("head", common_pb2.DATA_TYPE_FLOAT32, (700, 1001)),
    ("bias", common_pb2.DATA_TYPE_FLOAT32, ()),
]


def publish(store, number=1, seed=0, parent=0, ordinal=0, run=RUN):
    pending = store.begin(run, number, LAYOUT)
    rng = np.random.default_rng(seed)
    for name, _, _ in LAYOUT:
        view = pending.buffer(name)
        view[:] = rng.bytes(len(view))
    return pending.seal(parent, ordinal)


def step(store, number, *names):
    """The version before, with other bytes in these tensors."""
    before, pending = store.get(RUN, number - 1), store.begin(RUN, number, LAYOUT)
    for entry in before.manifest.entries:
        own = before.body[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
        changed = np.frombuffer(own, np.uint8) ^ np.uint8(entry.name in names)
        pending.buffer(entry.name)[:] = changed.tobytes()
    return pending.seal(number - 1, number - 1)
