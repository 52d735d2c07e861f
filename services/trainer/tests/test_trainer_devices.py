"""The trainer's tensors lie on the leased device and on no other.

fully_shard takes the thread's current GPU, which no build without CUDA has; so a whole backend cannot run on a
make-believe one. Three parts stand in for it, and one forgotten `device=`, `.to(device)` or `current` fails one:
a function mode notes factory calls without a device while a backend lives through everything on the CPU; what moves
tensors is called on its own under FakeTensorMode with a leased cuda:1; and the trainer's rounds, with a GPU that
only says that it is the current one.
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from headrace_modelkit.pinned import Rooms
from headrace_modelkit.tensor_files import slices
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.learning import OptimizerSection
from headrace_trainer import backends, trainer
from headrace_trainer.backends.fsdp import backend
from headrace_trainer.backends.shared import figures
from headrace_trainer.backends.shared import model as shared_model
from headrace_trainer.backends.shared.optimizer import MOMENTS, ShardedAdamW
from headrace_trainer.errors import Refusal
from headrace_trainer.group import group
from headrace_trainer.ranks import device
from headrace_trainer.ranks.messages import AbortRound
from headrace_trainer.ranks.rank import Rank
from headrace_trainer.trainer import Trainer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

LEASED = torch.device("cuda", 1)
OURS = str(Path(backends.__file__).parent)
FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.tensor, torch.arange, torch.rand}


class EveryFactorySaysWhere(TorchFunctionMode):
    """Notes factory calls in the backends that name no device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.silent: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        caller = sys._getframe(1)
        if func in FACTORIES and caller.f_code.co_filename.startswith(OURS):
            place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno} {func.__name__}"
            (self.seen if (kwargs or {}).get("device") is not None else self.silent).add(place)
        return func(*args, **(kwargs or {}))


class Reader:
    """A checkpoint of a backend, in memory."""

    def __init__(self, source) -> None:
        self._weights = {name: value.clone() for name, value in source.weights()}
        self._moments = {part.name: part.value.clone() for part in source.moment_parts()}
        self.optimizer_steps = source.optimizer_steps

    def weight(self, name, box):
        return self._weights[name][slices(box)]

    def moment(self, kind, name, box):
        return self._moments[f"{kind}/{name}"][slices(box)]


def test_every_tensor_of_a_backend_says_where_it_lies(make_backend, accumulate, sequences):
    with EveryFactorySaysWhere() as watch:
        backend = make_backend()
        accumulate(backend, [sequences(1)], 48)
        assert backend.gradient_is_finite()
        backend.commit(7.0, 1e-3)
        backend.infer([[sequences(2)[0]]], ["old_log_probs"])
        backend.load_state(Reader(backend))
        backend._sharded.scatter(next(iter(backend._sharded.parameters)), None)
        accumulate(backend, [sequences(3)], 48)
        backend.commit(7.0, 1e-3)
    assert len(watch.seen) >= 6 and not watch.silent


@pytest.fixture
def on_leased(make_backend, monkeypatch):
    """A backend whose trainer group says that it computes on the leased device."""
    backend = make_backend()
    monkeypatch.setattr(backend._ranks, "device", LEASED)
    return backend


def test_a_micro_batch_goes_to_the_leased_device(on_leased, sequences, monkeypatch):
    packed = backend.pack([sequences(1)], shared=True)
    monkeypatch.setattr(backend, "pack", lambda rows, **_: packed)
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = on_leased._pack([sequences(1)])
        values = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        assert len(tensors) > 5 and {tensor.device for tensor in tensors} == {LEASED}


def test_a_checkpoint_s_tensors_go_to_the_leased_device(on_leased, monkeypatch):
    found = []

    def distribute(value, *_, **__):
        found.append(value.device)
        return SimpleNamespace(to_local=lambda: value)

    monkeypatch.setattr("headrace_trainer.backends.fsdp.gathering.distribute_tensor", distribute)
    name, parameter = next(iter(on_leased._sharded.parameters.items()))
    shape = tuple(parameter.shape)
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_leased._sharded.scatter(name, torch.zeros(shape, dtype=torch.bfloat16))
        on_leased._sharded.scatter(name, None)
    assert found == [LEASED, LEASED]


def test_the_optimizer_s_state_lies_with_its_shards():
    with FakeTensorMode():
        shards = {name: torch.zeros(4, 4, device=LEASED) for name in ("a", "b")}
        optimizer = ShardedAdamW(OptimizerSection(), shards, decays={"a"})
        moments = {kind: {name: torch.zeros(4, 4) for name in shards} for kind in MOMENTS}
        optimizer.load(moments, 3)
        states = [value for state in optimizer._adamw.state.values() for value in state.values()]
        states += [optimizer.moment(kind, name) for kind in MOMENTS for name in shards]
        assert len(states) == 10 and {value.device for value in states} == {LEASED}


def test_suspend_moves_to_the_host_and_wake_to_the_leased_device(on_leased, monkeypatch):
    moved = []
    monkeypatch.setattr(shared_model, "used_bytes", lambda device: 10 - len(moved))
    monkeypatch.setattr(shared_model, "rooms_of", lambda device: Rooms(device, used=False))
    with FakeTensorMode():
        there, here = torch.zeros(2, device=LEASED), torch.zeros(2)
        monkeypatch.setattr(on_leased, "move", lambda move: moved.append([move(there), move(here)]))
        assert on_leased.suspend() == 1
        on_leased.wake()
        devices = [{tensor.device for tensor in both} for both in moved]
    assert devices == [{torch.device("cpu")}, {LEASED}]


@pytest.fixture
def current_gpus(monkeypatch):
    """Which GPU is the thread's current one, innermost last."""
    entered: list[torch.device] = []

    @contextmanager
    def device(leased):
        entered.append(leased)
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda leased: "a GPU")
    return entered


def test_whatever_fully_shard_does_has_the_leased_gpu_for_the_current_one(
    current_gpus, make_config, monkeypatch
):
    """Joining, rounds, suspend, wake and release: each on the thread's current device, which is the leased one."""
    seen, joined = [], []

    def look(what):
        return lambda *_: seen.append((what, *current_gpus)) or 0

    def join(generation, rank, world_size, rendezvous, timeout_s, device, **_):
        look("join")()
        joined.append(device)
        return SimpleNamespace(
            device=device, leads=True, world_size=1, leave=lambda **_: None, rank=0, lost=""
        )

    monkeypatch.setattr(trainer, "join_trainer_group", join)
    subject = Trainer(lambda: None, lambda: True)
    subject.device.use((LEASED,), 1)
    subject.join(1, 0, 1, "", 1.0)
    assert joined == [LEASED]
    subject._rank = rank = Rank(TrainerConfig.model_validate(make_config()), subject._ranks, subject.device)
    parts = {"suspend": "suspend", "wake": "wake", "zero": "execute", "release": "release"}
    rank._backends = {"": SimpleNamespace(**{name: look(what) for name, what in parts.items()})}
    subject._rounds = SimpleNamespace(between=contextmanager(lambda: (yield))(), memory_released=False)
    monkeypatch.setattr(subject.device, "memory", lambda _: None)
    subject.suspend()
    subject._rounds.between = contextmanager(lambda: (yield))()
    subject.wake()
    rank.execute(AbortRound())
    rank.release()
    assert seen == [(what, LEASED) for what in ("join", "suspend", "wake", "execute", "release")]


def test_a_trainer_group_s_mesh_is_of_the_leased_kind_of_device(monkeypatch):
    meshes = []
    monkeypatch.setattr(group, "init_device_mesh", lambda kind, shape: meshes.append((kind, shape)))
    monkeypatch.setattr(group.dist, "new_group", lambda **_: None)
    assert group.TrainerGroup(1, 0, 2, LEASED).device == LEASED
    assert meshes == [("cuda", (2,))]


def test_what_is_measured_is_the_leased_device(monkeypatch):
    asked = []
    for name in ("free_bytes", "used_bytes"):
        monkeypatch.setattr(device, name, lambda device, name=name: asked.append((name, device)))
    subject = device.LeasedDevice()
    subject.use((LEASED,), 1)
    subject.memory()
    assert asked == [("free_bytes", LEASED), ("used_bytes", LEASED)]


def test_a_deterministic_run_needs_workspaces_with_which_cublas_sums_in_one_order(monkeypatch):
    """torch says so at the first product on a GPU alone, by when a run has long begun."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    try:
        for given, words in ((":0:0", "is ':0:0' where this trainer runs"), (None, "is ''")):
            monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
            if given is not None:
                monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
            with pytest.raises(
                Refusal, match=f"deterministic: CUBLAS_WORKSPACE_CONFIG {words}.*makes it :4096:8"
            ):
                figures.fix_sums(True)
        figures.fix_sums(False)
        assert not torch.are_deterministic_algorithms_enabled()
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        figures.fix_sums(True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
