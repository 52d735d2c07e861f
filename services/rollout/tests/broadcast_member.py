"""A receiver of one version in a process of its own: ROOT NAME; source, version and manifest in hex come on its input.

Prints how it came as JSON: transport, whether it is whole, and what failed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from headrace.common.v1 import common_pb2
from headrace_modelkit.broadcasting import Broadcasts
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.weights import WeightStore
from headrace_servicekit.weights.transfer import byte_transports, receive_weights

RUN = "runs/broadcast"


async def main(root: str, name: str) -> None:
    store = WeightStore(Path(root), name)
    texts = [bytes.fromhex(line) for line in sys.stdin.read().split()]
    source, version, manifest = (
        kind.FromString(text)
        for kind, text in zip(
            (common_pb2.WeightSource, common_pb2.PolicyVersion, common_pb2.WeightManifest), texts, strict=True
        )
    )
    received = await receive_weights(
        store,
        RUN,
        version,
        manifest,
        [source],
        token=None,
        transports=byte_transports(("collective", "grpc"), groups=Broadcasts()),
    )
    whole = all(
        digest_bytes(received.body[e.offset_bytes : e.offset_bytes + e.size_bytes]) == e.digest
        for e in manifest.entries
    )
    way = common_pb2.WeightTransport.Name(received.transport).rpartition("_")[2]
    print(json.dumps({"way": way, "whole": whole, "failed": received.fallbacks}), flush=True)
    store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
