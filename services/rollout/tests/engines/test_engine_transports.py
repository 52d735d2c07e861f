"""Every engine takes versions that came by every transport, from disk or as adapters, and serves them to the bit."""

from __future__ import annotations

import asyncio
import copy
import gc
import tempfile
from pathlib import Path

import pytest
import torch
from headrace.common.v1 import common_pb2, weights_pb2_grpc
from headrace_modelkit.broadcasting import Broadcasts
from headrace_modelkit.device_memory import Cuda, DeviceCopies, DeviceMaps, Handle, sums_of
from headrace_modelkit.lora import merged_weight
from headrace_modelkit.weights import copy_out, state_tensors, weight_layout
from headrace_rollout.engines.base import Policy, Refused, WeightView, device_of
from headrace_rollout.engines.merging import adapted, merged_parts
from headrace_rollout.engines.weight_memory import ParameterMemory
from headrace_rollout.runs.policy_files import CHECKPOINT_WEIGHTS, read_policy
from headrace_rollout.wire import weights_of
from headrace_schema.openings import RolloutConfig
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.server import GrpcServer
from headrace_servicekit.weights.receiving import receive_weights, ways_of
from headrace_servicekit.weights.serving import WeightServicer
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.ways import Links
from model_weights import weights_of_model, weights_of_tensors
from rig import START_S, make_model
from safetensors.torch import save_file

pytestmark = pytest.mark.timeout(START_S)

RUN = "runs/transports"
KINDS = {
    "shm": common_pb2.WEIGHT_TRANSPORT_SHM,
    "delta": common_pb2.WEIGHT_TRANSPORT_DELTA,
    "grpc": common_pb2.WEIGHT_TRANSPORT_GRPC,
    "collective": common_pb2.WEIGHT_TRANSPORT_COLLECTIVE,
    "collective_delta": common_pb2.WEIGHT_TRANSPORT_COLLECTIVE,
    "cuda_ipc": common_pb2.WEIGHT_TRANSPORT_CUDA_IPC,
}
USED = {
    "collective": ("collective", "grpc"),
    "collective_delta": ("collective", "delta", "grpc"),
    "cuda_ipc": ("cuda_ipc", "grpc"),
    "shm": ("shm", "grpc"),
    "delta": ("delta", "grpc"),
    "grpc": ("grpc",),
}
CPU = torch.device("cpu")


class SharedHost(Cuda):
    """Files that are mapped in the place of a GPU's memory, handed over by the same messages."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()

    def name(self, device):
        return "GPU-host"

    def free_bytes(self, device):
        return 1 << 40

    def share(self, flat):
        file = Path(self._folder.name, f"{flat.data_ptr():x}")
        flat.numpy().tofile(file)
        return Handle("GPU-host", str(file).encode(), flat.numel())

    def open(self, handle, device):
        return torch.from_file(
            handle.handle.decode(), shared=True, size=handle.storage_bytes, dtype=torch.uint8
        )


class Trainer:
    """A store that is served, into which models are published."""

    def __init__(self, store):
        self.store, self.number = store, 0
        self.copies = DeviceCopies(lambda: CPU, SharedHost())

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
        source = self.store.source(RUN, self.number)
        source.receivers = 1
        return source


@pytest.fixture
async def trainer(tmp_path):
    store = WeightStore(tmp_path / "trainer", "trainer")
    made = Trainer(store)
    server = GrpcServer("127.0.0.1:0", token=None)
    add = weights_pb2_grpc.add_WeightServiceServicer_to_server
    server.add_service(
        add, WeightServicer(store, Broadcasts(), made.copies), "headrace.common.v1.WeightService"
    )
    store.address = await server.start()
    yield made
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
    maps = DeviceMaps(lambda: CPU, SharedHost())
    transports = ways_of(USED[name], Links(always=True), Broadcasts(), maps)
    model = rig.model_b
    for step in (1, 2):
        version, manifest = trainer.publish(model)
        received = await receive_weights(
            store, RUN, version, manifest, [trainer.source()], token=None, ways=transports
        )
        assert not received.fallbacks
        assert bytes(received.body) == bytes(trainer.store.get(RUN, step).body)
        rig.number += 1
        lent = store.lent.get((RUN, step))
        weights = weights_of(manifest, received.body, received.path, lent)
        await rig.engine.install(Policy(rig.number, version.digest), weights)
        await rig.serves(model)
        store.keep(RUN, {step})
        model = stepped(model, step)
    assert received.transport == KINDS[name]
    whole = manifest.size_bytes
    changes = 1, whole / 2
    moved = {"delta": changes, "collective_delta": changes, "shm": (0, 0), "cuda_ipc": (0, 0)}
    least, most = moved.get(name, (0.9 * whole, whole))  # a small tensor may be the one that is held
    assert least <= received.bytes_moved <= most


async def test_an_engine_serves_on_where_every_transport_fails(rig, trainer, store):
    await rig.install(rig.model_b)
    version, manifest = trainer.publish(rig.model_a)
    source = trainer.source()
    source.shm_nonce, source.address = "of another host", "127.0.0.1:1"
    with pytest.raises(ServiceError, match=r"shm from trainer.*grpc from trainer"):
        await receive_weights(store, RUN, version, manifest, [source], token=None)
    assert store.find(RUN, 1) is None
    await rig.serves(rig.model_b)


async def test_weights_from_disk_become_a_version_as_those_of_a_trainer(rig, tmp_path):
    """As an evaluation installs (`PolicyFiles`): a checkpoint's masters, and the model's own weights."""
    masters = {name: tensor.detach().clone() for name, tensor in state_tensors(rig.model_b)}
    save_file(masters, tmp_path / CHECKPOINT_WEIGHTS)
    config = RolloutConfig(model=rig.model)
    for checkpoint, model in ((str(tmp_path), rig.model_b), ("", rig.model_a)):
        manifest, body = read_policy(config, checkpoint, "")
        rig.number += 1
        await rig.engine.install(Policy(rig.number, manifest.digest), weights_of(manifest, body))
        await rig.serves(model)


async def test_adapters_on_their_base_are_served_as_the_merged_weights(rig):
    """To the bits of the trainer's merge: what is scored is what Hugging Face scores with those."""
    weights = weights_of_model(rig.model_a)
    targets = [entry for entry in weights.entries if entry.name.endswith("proj.weight")]
    pairs = {}
    for entry in targets:
        outputs, inputs = entry.shape
        pairs[f"{entry.name}.lora_A"] = torch.randn(4, inputs)
        pairs[f"{entry.name}.lora_B"] = torch.randn(outputs, 4) * 0.1
    merged = copy.deepcopy(rig.model_a)
    for entry in targets:
        weight = merged.get_parameter(entry.name)
        pair = (pairs[f"{entry.name}.{part}"] for part in ("lora_A", "lora_B"))
        weight.data = merged_weight(weight.data, *pair, 2.0)
    whole = adapted(weights, weights_of_tensors(pairs), {"": 2.0}).of("")
    rig.number += 1
    await rig.engine.install(Policy(rig.number, "of adapters"), whole)
    await rig.serves(merged)
    bits = {part.name: bytes(part.data) for part in merged_parts(whole)}
    assert bits == {part.name: bytes(part.data) for part in weights_of_model(merged).parts()}

    with pytest.raises(ValueError, match=r"not of this base.*strange"):
        adapted(weights, weights_of_tensors({"strange.weight.lora_A": torch.randn(4, 4)}), {"": 2.0})
    rig.number += 1
    other = weights_of_model(rig.model_b)
    await rig.engine.install(Policy(rig.number, "whole again"), other)
    await rig.serves(rig.model_b)


class Withdrawn:
    """Memory whose owner ends as it is read: other bytes. Processes of an engine's own get a handle of nothing."""

    sums, held = (), True

    def __init__(self, size):
        self.size = size

    @property
    def memory(self):
        self.held = False
        return torch.zeros(self.size, dtype=torch.uint8)

    @property
    def handle(self):
        self.held = False
        return {}


async def test_memory_that_was_withdrawn_while_it_was_read_is_not_trusted(rig, trainer):
    await rig.install(rig.model_b)
    version, manifest = trainer.publish(rig.model_a)
    body = trainer.store.get(RUN, 1).body
    weights = weights_of(manifest, body, None, Withdrawn(len(body)))
    rig.number += 1
    if device_of(rig.engine) is not None or rig.name == "sglang":  # SGLang reads the host's bytes alone
        await rig.engine.install(Policy(rig.number, version.digest), weights)
        await rig.serves(rig.model_a)
    else:
        with pytest.raises(Refused, match=r"was withdrawn while it was read; version .* serves on"):
            await rig.engine.install(Policy(rig.number, version.digest), weights)
        await rig.serves(rig.model_b)


async def borrowed(trainer, store, maps=None):
    version, manifest = trainer.version
    maps = maps or DeviceMaps(lambda: CPU, SharedHost())
    transports = ways_of(("cuda_ipc", "grpc"), mapper=maps)
    return await receive_weights(
        store, RUN, version, manifest, [trainer.source()], token=None, ways=transports
    )


async def settled(holds):
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to hold")


class TestLentMemory:
    @pytest.fixture(autouse=True)
    def published(self, trainer):
        trainer.version = trainer.publish(make_model(2))

    async def test_it_is_given_back_when_the_version_goes(self, trainer, store):
        received = await borrowed(trainer, store)
        assert received.transport == KINDS["cuda_ipc"] and not received.fallbacks
        flat = store.lent[RUN, 1].memory
        assert flat.numpy().tobytes()[: len(received.body)] == bytes(received.body)
        assert len(trainer.copies._copies) == 1
        store.keep(RUN, set())
        await settled(lambda: not trainer.copies._copies)

    async def test_a_source_without_its_gpu_withdraws_it(self, trainer, store):
        await borrowed(trainer, store)
        lent = store.lent[RUN, 1]
        trainer.copies.drop()
        await settled(lambda: lent.memory is None)

    async def test_bytes_that_changed_on_the_gpu_are_named(self, trainer, store):
        class Spoilt(SharedHost):
            def open(self, handle, device):
                flat = super().open(handle, device).clone()
                flat[5] ^= 1
                return flat

        received = await borrowed(trainer, store, DeviceMaps(lambda: CPU, Spoilt()))
        first = trainer.version[1].entries[0].name
        assert received.transport == KINDS["grpc"]
        assert received.fallbacks == [
            f"cuda_ipc from trainer: tensor {first}: the bytes on the GPU are not the source's"
        ]
        await settled(lambda: not trainer.copies._copies)

    @pytest.mark.parametrize("side", ["source", "engine"])
    async def test_a_side_without_a_gpu_is_named(self, trainer, store, side):
        maps = DeviceMaps(lambda: CPU, SharedHost())
        if side == "source":
            trainer.copies._layer = Cuda()
        else:
            maps = DeviceMaps(lambda: CPU)
        received = await borrowed(trainer, store, maps)
        why = {
            "source": "the source computes on no GPU now",
            "engine": "the engine maps no memory of a GPU here",
        }
        assert received.transport == KINDS["grpc"]
        assert received.fallbacks == [f"cuda_ipc from trainer: {why[side]}"]

    async def test_a_gpu_without_room_is_named(self, trainer, store, monkeypatch):
        monkeypatch.setattr(SharedHost, "free_bytes", lambda *_: 1000)
        received = await borrowed(trainer, store)
        assert "the GPU has 1000 bytes free" in received.fallbacks[0]
        assert received.transport == KINDS["grpc"]


def test_a_sum_finds_what_changed_and_what_moved():
    flat = torch.arange(64, dtype=torch.uint8)
    (whole,) = sums_of(flat, [(3, 50)])
    for change in (lambda t: t[3:4].add_(1), lambda t: t[11:27].copy_(t[11:27].roll(8))):
        other = flat.clone()
        change(other)
        assert sums_of(other, [(3, 50)]) != [whole]
    assert sums_of(flat.clone(), [(3, 50)]) == [whole]


def test_lent_memory_is_copied_and_comes_before_the_hosts():
    model, other = make_model(1), make_model(2)
    views = []
    for name, tensor in state_tensors(other):
        flat = tensor.detach().clone().reshape(-1).view(torch.uint8)
        shape, of_host = tuple(tensor.shape), memoryview(bytes(len(flat)))
        views.append(WeightView(name, "float32", shape, of_host, flat))
    ParameterMemory(model).load(views, CPU)
    for view in views:
        view.on_device.zero_()
    wanted = dict(state_tensors(other))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in state_tensors(model))
