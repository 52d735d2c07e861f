"""What tests of broadcasts share; and, as a process, a receiver of one version: ROOT; source, version and
manifest in hex come on its input. Or an engine's worker with an imaginary GPU: `worker GPU`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import torch
from headrace.common.v1 import common_pb2, weights_pb2_grpc
from headrace_modelkit.broadcasting import GLOO, Broadcasts, Group
from headrace_rollout.engines.hosted.relaying import listen
from headrace_servicekit.rpc.server import GrpcServer
from headrace_servicekit.weights.receiving import receive_weights, ways_of
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.ways import Links

RUN = "runs/broadcast"
WHOLE, CHANGES = ("collective", "grpc"), ("collective", "delta", "grpc")


def take(store, described, told, groups=None, names=WHOLE):
    ways = ways_of(names, Links(always=True), groups or Broadcasts())
    return asyncio.create_task(receive_weights(store, RUN, *described, [told], token=None, ways=ways))


async def serve(store, servicer):
    server = GrpcServer("127.0.0.1:0", token=None)
    add = weights_pb2_grpc.add_WeightServiceServicer_to_server
    server.add_service(add, servicer, "headrace.common.v1.WeightService")
    store.address = await server.start()
    return server


def published(store, run, number, layout, body):
    pending = store.begin(run, number, layout)
    with pending.whole() as view:
        view[:] = body
    return pending.seal(number - 1, number - 1)


class Held(Broadcasts):
    """A source that stops before its third bucket until `go_on` is set."""

    def __init__(self):
        super().__init__()
        self.there, self.go_on = threading.Event(), threading.Event()

    def join(self, *where):
        group = super().join(*where)
        send = group.send

        def held(pieces):
            def asked():
                for index, piece in enumerate(pieces):
                    if index == 2:
                        self.there.set()
                        self.go_on.wait(30)
                    yield piece

            send(asked())

        group.send = held
        return group


class Standing:
    """Groups that connect nobody, and stand before the third bucket until `go_on` is set."""

    bucket = 8 << 20

    def __init__(self, device=""):
        self.device, self.asked = device, 0
        self.there, self.go_on = threading.Event(), threading.Event()

    def device_id(self):
        return self.device

    def serve(self, host):
        return 1, None

    def join(self, *where):
        return self

    def send(self, pieces):
        for self.asked, _ in enumerate(pieces, 1):
            if self.asked == 3:
                self.there.set()
                self.go_on.wait(30)

    def receive(self):
        self.go_on.wait(30)
        yield from ()


class OverGloo:
    """What a broadcast asks of NCCL's group, over Gloo; `calls` are the names of what it was asked."""

    def __init__(self, group, calls):
        self._group, self._calls = group, calls

    def broadcast(self, tensors, options):
        self._calls.append("broadcast")
        return self._group.broadcast(tensors, options)

    def allreduce(self, tensors):
        self._calls.append("allreduce")
        return self._group.allreduce(tensors)

    def shutdown(self):
        self._calls.append("shutdown")

    def abort(self):
        self._calls.append("abort")


class Imaginary(Broadcasts):
    """A process with a GPU of this name, where NCCL is Gloo and the GPU is the CPU."""

    def __init__(self, name):
        super().__init__()
        self.name, self.calls = name, []

    def device_id(self):
        return self.name

    def join(self, host, port, key, rank, size, backend, own_host):
        self.calls.append(backend)
        made = super().join(host, port, key, rank, size, GLOO, own_host)
        if backend == GLOO:
            return made
        return Group(OverGloo(made._group, self.calls), rank, size, torch.device("cpu"))


async def main(root: str) -> None:
    store = WeightStore(Path(root), "child")
    texts = [bytes.fromhex(line) for line in sys.stdin.read().split()]
    source, version, manifest = (
        kind.FromString(text)
        for kind, text in zip(
            (common_pb2.WeightSource, common_pb2.PolicyVersion, common_pb2.WeightManifest), texts, strict=True
        )
    )
    await take(store, (version, manifest), source)
    store.close()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        listen(Imaginary(sys.argv[2]))
        print("listens", flush=True)
        threading.Event().wait()
    asyncio.run(main(*sys.argv[1:]))
