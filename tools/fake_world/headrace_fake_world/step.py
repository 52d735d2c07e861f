"""What a rank goes through in a run (restore, micro-batches, commit, publication, checkpoint, suspend, wake), measured.

A model of many alike layers is measured with three and with four of them, and the rest is multiplied out: bytes and
collectives of each phase are linear in the layers (`whole=True` measures them all).
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from headrace_robots.trainer.backend.episodes import Chunks, Credits, StepChunks
from headrace_robots.trainer.sizes import WORDS, chunks_of
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends import choose_backend
from headrace_trainer.backends.fsdp.layouts.layout import GPUS_PER_HOST, Layout
from headrace_trainer.backends.fsdp.layouts.planned import choose_layout
from headrace_trainer.backends.fsdp.sharding import ShardedModel
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.checkpoints.parts import copy_state
from headrace_trainer.learning.samples import LentPictures, Rows, Sample
from headrace_trainer.memory import MemoryPlan, check_host, check_rooms
from headrace_trainer.workloads import run_kind
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import set_checkpoint_early_stop

from headrace_fake_world.device import NAME
from headrace_fake_world.models import MODELS, write_model
from headrace_fake_world.robots import ROBOTS, write_robot
from headrace_fake_world.tracker import Phase, Tracker, Watch
from headrace_fake_world.world import FakeTrainerGroup, fake_world, rooms_of

FEW, MORE = 3, 4
"""Layers of the two small models that stand for a large one: with fewer, what is gathered and reduced while a layer
computes is not all there."""


@dataclass(frozen=True)
class Case:
    """One rank of `ranks` that trains `model` with micro-batches of `tokens`, in rows of `row_tokens`.

    `trainer`, `algorithm` and `optimizer` go into the configuration as they would stand in a run spec. `layers`: of a
    model that is cut to so many. `saves_in_place`: where a layout is given.
    """

    model: str
    ranks: int
    tokens: int = 8192
    row_tokens: int = 2048
    dtype: str = "bfloat16"
    layout: Layout | None = None
    layers: int | None = None
    saves_in_place: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)
    algorithm: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)

    @property
    def acts(self) -> bool:
        """Whether the model is a robot policy, which learns from episodes."""
        return self.model in ROBOTS

    def write(self, directory: Path, layers: int | None = None) -> Path:
        """A directory with the model's configuration alone, in `directory`; a robot policy has all of its layers."""
        return (
            write_robot(directory, self.model)
            if self.acts
            else write_model(directory, self.model, layers=layers)
        )

    def config(self, directory: Path) -> TrainerConfig:
        """As OpenRun takes it, of the model in `directory`; with a layout, all its keys are fixed."""
        trainer = {"ranks": self.ranks, "micro_batch_tokens": self.tokens, **self.trainer}
        if (own := self.layout) is not None:
            trainer["gradient_checkpointing"] = own.checkpointing
            trainer["backend_options"] = {
                **trainer.get("backend_options", {}),
                "shard": own.shard,
                "shard_ranks": own.shard_ranks,
                "offload": own.offload,
            }
        return TrainerConfig.model_validate(
            {
                "model": {"path": str(directory), "dtype": self.dtype},
                "algorithm": {
                    "name": "ppo" if self.acts else "grpo",
                    "group_size": 1 if self.acts else 4,
                    "prompts_per_step": 8,
                    **self.algorithm,
                },
                "optimizer": {"lr": 1e-6, **self.optimizer},
                "trainer": trainer,
                "checkpoint": {"keep": 2},
                "seed": 1,
                "steps": 2,
            }
        )

    def rows(self) -> Rows:
        """Rows of an answer each, of which all but the first 32nd is trained: plans assume that most tokens are."""
        length, trained = self.row_tokens, self.row_tokens - self.row_tokens // 32
        columns = dict.fromkeys(
            build_algorithm(self.config(Path("none")).algorithm).columns, [-1.0] * trained
        )
        return [
            [
                Sample(
                    list(range(length)),
                    list(range(length - trained, length)),
                    [-1.0] * trained,
                    advantages=[1.0] * trained,
                    columns=dict(columns),
                )
            ]
            for _ in range(max(1, self.tokens // length))
        ]


@dataclass(frozen=True)
class Measured:
    """What a rank had and moved, by phase; `kept` are the bytes by device and kind between two steps."""

    phases: dict[str, Phase]
    kept: dict[str, dict[str, int]]
    layout: Layout
    seconds: float

    def peak(self, device: str = NAME) -> int:
        """Most bytes on a device in any phase of a step."""
        return max(phase.peak(device) for phase in self.phases.values())

    def at_peak(self, device: str = NAME) -> tuple[str, dict[str, int]]:
        """Where the peak is, and its bytes by kind."""
        name = max(self.phases, key=lambda name: self.phases[name].peak(device))
        return name, self.phases[name].peaks.get(device, {})


def measure(
    case: Case,
    *,
    whole: bool = False,
    device: torch.device | None = None,
    watch: Callable[[], Watch] | None = None,
) -> Measured:
    """Goes through a step on one rank of the case, in its layout or the one that is chosen for the whole model.

    What `watch` makes is told every operation (`Tracker.watch`).

    Raises what the trainer's own code raises, and Refusal where no layout fits.
    """
    started = time.monotonic()
    if case.layout is None:
        layout, plan = planned(case)
        case = replace(case, layout=layout, saves_in_place=plan.saves_in_place)
    layers = 0 if case.acts else case.layers or MODELS[case.model]["num_hidden_layers"]
    with tempfile.TemporaryDirectory() as directory:
        if whole or layers <= MORE:
            return _go(case, case.write(Path(directory), case.layers), device, started, watch)
        few = _go(case, case.write(Path(directory), FEW), device, started, watch)
        more = _go(case, case.write(Path(directory), MORE), device, started, watch)
    times = (layers - FEW) / (MORE - FEW)
    phases = {name: _stretched(few.phases[name], more.phases[name], times) for name in more.phases}
    kept = {name: _linear(few.kept.get(name, {}), own, times) for name, own in more.kept.items()}
    return Measured(phases, kept, more.layout, time.monotonic() - started)


COUNTED = 1, 2
"""Layers of the two small models whose operations are counted: each layer of one kind has the same."""


def counted(
    case: Case, watch: Callable[[], Watch], *, whole: bool = False, compiled: bool = False
) -> Measured:
    """As `measure`, of micro-batches and commits alone: what they compute and move, and no bytes that they keep.

    What is compiled is not computed again in parts: a recomputed layer's last products are, too, which nothing needs.
    """
    started = time.monotonic()
    layers = 0 if case.acts else case.layers or MODELS[case.model]["num_hidden_layers"]
    with tempfile.TemporaryDirectory() as directory, set_checkpoint_early_stop(not compiled):

        def go(layers: int | None) -> Measured:
            return _go(case, case.write(Path(directory), layers), None, started, watch, alone=True)

        if whole or layers <= COUNTED[-1]:
            return go(case.layers)
        few, more = map(go, COUNTED)
    times = (layers - COUNTED[0]) / (COUNTED[1] - COUNTED[0])
    phases = {name: _stretched(few.phases[name], more.phases[name], times) for name in more.phases}
    return Measured(phases, {}, more.layout, time.monotonic() - started)


def published(case: Case) -> tuple[Layout, Phase]:
    """What the leader of the case moves to publish a version, in the layout that the trainer chooses."""
    layout, plan = planned(case)
    case = replace(case, layout=layout, saves_in_place=plan.saves_in_place)

    def go(layers: int) -> Phase:
        with (
            tempfile.TemporaryDirectory() as directory,
            fake_world(case.ranks, None) as (group, tracker),
        ):
            config = case.config(case.write(Path(directory), layers))
            kind = run_kind(config).policies[""]
            backend: Any = kind.backend(kind.algorithm(), group)
            backend._layout, backend.saves_in_place = layout, case.saves_in_place
            backend.load_initial()
            group.leads = True
            with tracker.phase("publish"):
                _exhaust(backend.weights(published=True))
            return tracker.phases["publish"]

    times = (MODELS[case.model]["num_hidden_layers"] - FEW) / (MORE - FEW)
    return layout, _stretched(go(FEW), go(MORE), times)


def planned(case: Case) -> tuple[Layout, MemoryPlan]:
    """What the trainer chooses and plans for a rank of the case, on hosts with eight GPUs of 80 GB.

    Raises Refusal where no layout fits.
    """
    config = case.config(case.write(Path(_models().name), case.layers))
    chosen = choose_backend(config.trainer)
    kind = run_kind(config).policies[""]
    assert isinstance(chosen.options, FsdpOptions)
    ranks_here = min(case.ranks, GPUS_PER_HOST)
    asked = config, kind.algorithm(), chosen.options, case.ranks, ranks_here, rooms_of(), kind.sizes
    layout, plan = choose_layout(*asked)
    if case.layout is None:
        check_host(plan, rooms_of(), ranks_here)
        check_rooms(plan, rooms_of())
    return layout, plan


@cache
def _models() -> tempfile.TemporaryDirectory[str]:
    """One place in a process, so that the sizes of a model are found once."""
    return tempfile.TemporaryDirectory()


def _stretched(few: Phase, more: Phase, times: float) -> Phase:
    moments = {name: _linear(few.moments.get(name, {}), own, times) for name, own in more.moments.items()}
    counts = [(few.calls, more.calls), (few.moved, more.moved), (few.carried, more.carried)]
    counts += [(few.on_host, more.on_host), (few.work, more.work)]
    return Phase(moments, *(Counter(_linear(*both, times)) for both in counts))


def _linear(few: Any, more: Any, times: float) -> dict[str, int]:
    names = [*more, *(name for name in few if name not in more)]
    return {name: round(few.get(name, 0) + (more.get(name, 0) - few.get(name, 0)) * times) for name in names}


def _go(
    case: Case,
    directory: Path,
    device: torch.device | None,
    started: float,
    watch: Callable[[], Watch] | None = None,
    *,
    alone: bool = False,
) -> Measured:
    """With `alone` its micro-batches and commits alone."""
    with fake_world(case.ranks, device) as (group, tracker), _nothing_reserved():
        tracker.watch = watch() if watch is not None else None
        config = case.config(directory)
        kind = run_kind(config).policies[""]
        algorithm = kind.algorithm()
        backend: Any = kind.backend(algorithm, group)
        if case.layout is not None:  # chosen for the whole model: what fits one of few layers says nothing
            backend._layout, backend.saves_in_place = case.layout, case.saves_in_place
        with tracker.phase("restore"):
            backend.load_initial()
            backend.load_reference()
        _label(tracker, backend)
        work = _Episodes(case, backend) if case.acts else _Answers(case, backend, algorithm.columns)
        with tracker.phase("first commit"):  # which moments come with
            backend.commit(10.0, 1e-6)
        _label(tracker, backend)
        copy = None if alone else _beside(backend, group, tracker, work)
        for name in ("first micro-batch", "micro-batch"):
            with tracker.phase(name):
                work.micro()
            _label(tracker, backend)
        if not alone:
            with tracker.phase("suspend"):
                backend.suspend()
            with tracker.phase("asleep"):
                del copy
            with tracker.phase("wake"):
                backend.wake()
            _label(tracker, backend)
        with tracker.phase("commit"):
            backend.commit(10.0, 1e-6)
        _label(tracker, backend)
        kept = {name: tracker.alive(name) for name in (group.device.type, "cpu")}
        return Measured(dict(tracker.phases), kept, backend.layout, time.monotonic() - started)


def _beside(backend: Any, group: FakeTrainerGroup, tracker: Tracker, work: _Answers | _Episodes) -> object:
    """What a step does before its micro-batches; the copy that a checkpoint is written from."""
    with tracker.phase("checkpoint"):
        group.leads = True  # the leader also copies what every rank has whole
        copy = copy_state(
            backend.weight_parts(),
            backend.moment_parts(),
            backend.optimizer_steps,
            in_place=backend.saves_in_place,
            leads=True,
        )
    with tracker.phase("publish"):  # a copy may not be written yet when the next version is published
        _exhaust(backend.weights())
        group.leads = False
    with tracker.phase("publish beside the leader"):
        _exhaust(backend.weights())
    with tracker.phase("infer"):
        work.infer()
    _label(tracker, backend)
    return copy


class _Answers:
    """What a language model does with a micro-batch."""

    def __init__(self, case: Case, backend: Any, columns: Many[str]) -> None:
        self._backend, self._rows, self._columns = backend, case.rows(), columns

    def infer(self) -> None:
        if self._columns:
            self._backend.infer(self._rows, self._columns)

    def micro(self) -> None:
        self._backend.micro(self._rows)


class _Episodes:
    """What a robot policy does with a micro-batch of chunks."""

    def __init__(self, case: Case, backend: Any) -> None:
        policy = backend._policy
        self._backend, self._count = backend, chunks_of(policy, case.tokens)
        shape = self._count, policy.chunk_length, policy.action_size
        valid = torch.ones(shape[:2], dtype=torch.bool)
        seen, sampled = policy.example(self._count, WORDS)
        self._chunks = StepChunks.of([Chunks(seen, sampled, valid)])
        backend._chunks = self._chunks
        backend._credits = Credits(
            *(torch.zeros(shape), torch.zeros(shape), torch.zeros(self._count), torch.zeros(shape[:2])),
            *(valid, torch.ones(self._count), torch.zeros(self._count)),
        )

    def infer(self) -> None:
        with torch.no_grad():
            index = torch.arange(self._count)
            self._backend._evaluate(self._chunks.take(index, self._backend._ranks.device))

    def micro(self) -> None:
        self._backend.learn(list(range(self._count)), LentPictures())


def _exhaust(tensors: Iterator[Any]) -> None:
    for _ in tensors:
        pass


def _label(tracker: Tracker, backend: Any) -> None:
    """Names what the backend holds between its calls."""
    model: ShardedModel = backend._model
    tracker.label("masters", model.learned.values())
    tracker.label("frozen weights", (p for p in model.parameters.values() if not p.requires_grad))
    tracker.label("frozen weights", model.buffers.values())
    for parameter in fsdp_parameters(model.policy):
        tracker.label("gathered weights", parameter.all_gather_outputs)
        whole = getattr(parameter, "_unsharded_param", None)
        tracker.label(
            "gradients", [parameter.unsharded_accumulated_grad, whole.grad if whole is not None else None]
        )
    tracker.label("gradients", (parameter.grad for parameter in model.parameters.values()))
    for state in backend._adamw._adamw.state.values():
        tracker.label("moments", state.values())
    if getattr(backend, "_reference", None) is not None:
        reference: ShardedModel = backend._reference._model
        tracker.label("reference", [*reference.parameters.values(), *reference.buffers.values()])


def fsdp_parameters(root: torch.nn.Module) -> Iterator[Any]:
    """What fully_shard keeps for each parameter."""
    for module in root.modules():
        group: Any = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        yield from group.fsdp_params if group is not None else ()


def _nothing_reserved() -> AbstractContextManager[object]:
    """torch's CUDA allocator knows nothing of this device."""
    return patch("headrace_trainer.backends.shared.model.used_bytes", lambda device: 0)
