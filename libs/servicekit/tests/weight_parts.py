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
