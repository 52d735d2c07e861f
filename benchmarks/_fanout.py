"""One process of `hosts.py` in a host's network: a trainer's weight store, or one that receives. Speaks JSON lines.

python _fanout.py ADDRESS SHM_DIR
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from headrace.common.v1 import common_pb2, weights_pb2_grpc
from headrace_servicekit.rpc.server import GrpcServer
from headrace_servicekit.weights.receiving import receive_weights
from headrace_servicekit.weights.serving import WeightServicer
from headrace_servicekit.weights.store import WeightStore

RUN, TENSORS, TOKEN = "runs/fanout", 16, "secret"


async def main() -> None:
    """Serves its store until standard input ends, and obeys."""
    address, folder = sys.argv[1:]
    store = WeightStore(Path(folder), uuid.uuid4().hex)
    server = GrpcServer(address, token=TOKEN)
    server.add_service(
        weights_pb2_grpc.add_WeightServiceServicer_to_server,
        WeightServicer(store),
        "headrace.common.v1.WeightService",
    )
    store.address = await server.start()
    _say({"address": store.address, "incarnation": store.incarnation})
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        _say(_publish(store, asked) if "bytes" in asked else await _receive(store, asked))
    await server.drain(0)
    store.close()


def _publish(store: WeightStore, asked: dict[str, Any]) -> dict[str, Any]:
    """A version of random numbers."""
    number, size = asked["number"], asked["bytes"] // TENSORS // 4
    layout = [(f"layer.{n}", common_pb2.DATA_TYPE_FLOAT32, (size,)) for n in range(TENSORS)]
    pending, rng = store.begin(RUN, number, layout), np.random.default_rng(number)
    for name, _, _ in layout:
        with pending.buffer(name) as view:
            view[:] = rng.bytes(len(view))
    version, manifest = pending.seal(0, number)
    store.keep(RUN, {number})
    source = store.source(RUN, number)
    return {"version": _text(version), "manifest": _text(manifest), "source": _text(source)}


async def _receive(store: WeightStore, asked: dict[str, Any]) -> dict[str, Any]:
    version = common_pb2.PolicyVersion.FromString(base64.b64decode(asked["version"]))
    manifest = common_pb2.WeightManifest.FromString(base64.b64decode(asked["manifest"]))
    sources = [common_pb2.WeightSource.FromString(base64.b64decode(text)) for text in asked["sources"]]
    began = time.perf_counter()
    received = await receive_weights(store, RUN, version, manifest, sources, token=TOKEN)
    took_s = time.perf_counter() - began
    store.keep(RUN, {version.number})
    fallbacks = [text for text in received.fallbacks if text.startswith("grpc ")]
    return {"seconds": took_s, "moved": received.bytes_moved, "fallbacks": fallbacks}


def _text(message: Any) -> str:
    return base64.b64encode(message.SerializeToString()).decode()


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
