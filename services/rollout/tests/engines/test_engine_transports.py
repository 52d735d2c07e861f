"""Every engine takes versions that came by every transport, and serves them to the bit."""

from __future__ import annotations

import gc

import pytest
import torch
from headrace.common.v1 import common_pb2, weights_pb2_grpc
from headrace_modelkit.weights import copy_out, weight_layout
from headrace_rollout.engines.base import Policy
from headrace_rollout.wire import weights_of
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.server import GrpcServer
from headrace_servicekit.weights import WeightServicer, WeightStore
from headrace_servicekit.weights.transfer import byte_transports, receive_weights
from headrace_servicekit.weights.transports import Links
from rig import START_S, make_model

pytestmark = pytest.mark.timeout(START_S)

RUN = "runs/transports"
KINDS = {
    "shm": common_pb2.WEIGHT_TRANSPORT_SHM,
    "delta": common_pb2.WEIGHT_TRANSPORT_DELTA,
    "grpc": common_pb2.WEIGHT_TRANSPORT_GRPC,
}
USED = {"shm": ("shm", "grpc"), "delta": ("delta", "grpc"), "grpc": ("grpc",)}


class Trainer:
    """A store that is served, into which models are published."""

    def __init__(self, store):
        self.store, self.number = store, 0

    def publish(self, model):
        self.number += 1
        layout = weight_layout(model, torch.float32)
        kinds = [(name, common_pb2.DATA_TYPE_FLOAT32, shape) for name, _, shape in layout]
        pending = self.store.begin(RUN, self.number, kinds)
        for name, _, _ in layout:
            copy_out(model, name, pending.buffer(name), torch.float32)
        gc.collect()
        return pending.seal(self.number - 1, self.number - 1)

    def source(self):
        return self.store.source(RUN, self.number)


@pytest.fixture
async def trainer(tmp_path):
    store = WeightStore(tmp_path / "trainer", "trainer")
    server = GrpcServer("127.0.0.1:0", token=None)
    add = weights_pb2_grpc.add_WeightServiceServicer_to_server
    server.add_service(add, WeightServicer(store), "headrace.common.v1.WeightService")
    store.address = await server.start()
    yield Trainer(store)
    await server.drain(0)
    store.close()


@pytest.fixture
def store(tmp_path):
    made = WeightStore(tmp_path / "rollout", "rollout")
    yield made
    made.close()


def stepped(model, seed):
    """The model with a thirtieth of its elements moved, as a step of training would."""
    torch.manual_seed(seed)
    found = make_model(1)
    with torch.no_grad():
        for own, other in zip(found.parameters(), model.parameters(), strict=True):
            own.copy_(torch.where(torch.rand_like(other) < 1 / 30, other * 1.5, other))
    return found


@pytest.mark.parametrize("name", KINDS)
async def test_an_engine_serves_what_came_by_a_transport(rig, trainer, store, name):
    transports, model = byte_transports(USED[name], Links(always=True)), rig.model_b
    for step in (1, 2):
        version, manifest = trainer.publish(model)
        received = await receive_weights(
            store, RUN, version, manifest, [trainer.source()], token=None, transports=transports
        )
        assert not received.fallbacks
        assert bytes(received.body) == bytes(trainer.store.get(RUN, step).body)
        rig.number += 1
        weights = weights_of(manifest, received.body, received.path)
        await rig.engine.install(Policy(rig.number, version.digest), weights)
        await rig.serves(model)
        store.keep(RUN, {step})
        model = stepped(model, step)
    assert received.transport == KINDS[name]
    whole = manifest.size_bytes
    assert {"shm": received.bytes_moved == 0, "grpc": received.bytes_moved == whole}.get(
        name, 0 < received.bytes_moved < whole / 2
    )


async def test_an_engine_serves_on_where_every_transport_fails(rig, trainer, store):
    await rig.install(rig.model_b)
    version, manifest = trainer.publish(rig.model_a)
    source = trainer.source()
    source.shm_nonce, source.address = "of another host", "127.0.0.1:1"
    with pytest.raises(ServiceError, match=r"shm from trainer.*grpc from trainer"):
        await receive_weights(store, RUN, version, manifest, [source], token=None)
    assert store.find(RUN, 1) is None
    await rig.serves(rig.model_b)
