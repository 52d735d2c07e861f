"""A receiver of one version in a process of its own: ROOT; source, version and manifest in hex come on its input."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from headrace.common.v1 import common_pb2
from headrace_modelkit.broadcasting import Broadcasts
from headrace_servicekit.weights import WeightStore, receive_weights, ways_of

RUN = "runs/broadcast"


async def main(root: str) -> None:
    store = WeightStore(Path(root), "child")
    texts = [bytes.fromhex(line) for line in sys.stdin.read().split()]
    source, version, manifest = (
        kind.FromString(text)
        for kind, text in zip(
            (common_pb2.WeightSource, common_pb2.PolicyVersion, common_pb2.WeightManifest), texts, strict=True
        )
    )
    ways = ways_of(("collective", "grpc"), groups=Broadcasts())
    await receive_weights(store, RUN, version, manifest, [source], token=None, ways=ways)
    store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
