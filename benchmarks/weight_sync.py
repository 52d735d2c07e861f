"""How long new weights take from the optimizer into an engine: `python benchmarks/weight_sync.py`.

A trainer and five rollouts, processes with one core each and a model of 135 million parameters in bf16 (270 MB),
spoken to over gRPC as the coordinator speaks to them. Each step is a real one of AdamW at 1e-6: BeginStep, Learn,
CommitStep, RecordStep, PublishPolicy, InstallPolicy. What is timed begins when the optimizer is done: cast to bf16
into the weight store with its digests, PublishPolicy, InstallPolicy until its reply, which says that every tensor's
digest was verified and the engine holds the version. One rollout takes it from shared memory, four that do as if they
were other hosts whole by gRPC, by a Gloo broadcast (of one receiver), by its changes over gRPC, and by a broadcast of
them, in turns.

Prints one JSON line: `shm_vs_bound`, what has to be done at least (a cast of fp32 weights, one hash and one memcpy of
the bf16 ones, one thread, measured in each step too) over the time of the sync by shared memory; `shm_vs_memcpy`,
`grpc_vs_memcpy` and `collective_vs_memcpy`, the memcpy alone over the time of the sync, of the fastest step each;
`delta_bytes_vs_full`, bytes moved for changes over those of the whole, of the largest step; `pause_ms`, the longest
that an engine stood still for a swap, at the median step; `delta_encode_mb_s` and `delta_apply_mb_s`, megabytes of
weights whose changes one thread finds and applies in a second; and the seconds that they come from.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from _harness import emit, machine, say, table
from _thread_rates import thread_rates

sys.path.insert(0, str(Path(__file__).parents[1] / "integration_tests"))

TRAINER_LEASE, FIRST_ROLLOUT_LEASE = 11, 12
SHM, GRPC, DELTA, COLLECTIVE, BOTH = "shm", "grpc", "delta", "collective", "collective_delta"
WAYS = (SHM, GRPC, DELTA, COLLECTIVE, BOTH)
GOALS = {"shm_vs_bound": 0.6, "shm_vs_memcpy": 0.25, "grpc_vs_memcpy": 0.1}
BOUNDS = {"pause_ms": 10.0, "delta_bytes_vs_full": 0.03}
SAMPLES, PROMPT, ANSWER = 4, 8, 4
WARM_UP = 4  # until every file has been used once
MEMCPYS = 3  # of a step


@dataclass(frozen=True)
class Sync:
    """Seconds of one step's way from optimizer to engine."""

    memcpy: float
    bound: float
    """A cast, a hash and a memcpy by themselves."""
    cast: float
    publish: float
    install: dict[str, float]
    transfer: dict[str, float]
    pause: dict[str, float]
    moved: dict[str, int]

    def total(self, transport: str) -> float:
        """From the optimizer's end to the verified install."""
        return self.cast + self.publish + self.install[transport]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="measured steps")
    parser.add_argument("--layers", type=int, default=30, help="layers of the model")
    options = parser.parse_args()
    say(machine())
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder, services(Path(folder)) as made:
        model = Path(folder) / "model"
        size = write_model(model, options.layers)
        syncs = measure(made, model, size, options.steps)
    say(f"at the end: {machine()}")
    found = figures(syncs, size) | delta_rates() | by_threads()
    show(syncs, size, found)
    emit("weight_sync", found)


def write_model(directory: Path, layers: int) -> int:
    """SmolLM2-135M's shape with random weights, in bf16; its bytes."""
    import torch
    from headrace_modelkit.loading import save_model
    from headrace_modelkit.presets.tiny import character_tokenizer, tiny_model

    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": layers, "head_dim": 64}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    model: Any = tiny_model(vocab_size=49152, **shape, **heads)
    model.to(torch.bfloat16)
    save_model(model, character_tokenizer(), directory)
    return sum(2 * int(weight.numel()) for weight in model.parameters())


@contextmanager
def services(folder: Path) -> Iterator[dict[str, Any]]:
    """A trainer and a rollout for each transport, with leases, on one tmpfs; by-hand clients by name."""
    from harness.services.alone import Service, channel_to
    from harness.services.by_hand import Engine, Learner
    from harness.services.fake_fleet import FakeFleet

    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with ExitStack() as stack:
        fleet = stack.enter_context(FakeFleet())
        shm = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-benchmark-", dir=shared))

        def start(kind: str, name: str, device: str, lease: int, host: str) -> Any:
            flags = ("--coordinator", fleet.address, "--shm-dir", host)
            named = ("--name", name, "--devices", device, *flags)
            service = stack.enter_context(Service(kind, folder / name, *named))
            fleet.grant(name, lease)
            return stack.enter_context(channel_to(service.address))

        trainer = start("trainer", "trainer-0", "cpu:0", TRAINER_LEASE, shm)
        made: dict[str, Any] = {"trainer": Learner(trainer, TRAINER_LEASE, folder / "run")}
        for index, transport in enumerate(WAYS):
            lease = FIRST_ROLLOUT_LEASE + index
            host = shm if transport == SHM else str(Path(shm) / f"host-{transport}")
            engine = start("rollout", f"rollout-{transport}", "cpu:1", lease, host)
            made[transport] = Engine(engine, lease)
        yield made


def measure(made: dict[str, Any], model: Path, size: int, steps: int) -> list[Sync]:
    """Opens everything and takes the steps; those that warm up are left out."""
    import numpy as np

    learner = made["trainer"]
    open_trainer(learner, model)
    learner.join(1)
    learner.restore(1)
    published = learner.publish()
    for transport in WAYS:
        open_engine(made[transport], model, transport)
        made[transport].wake()
        made[transport].install(only(published, transport))
    source = np.frombuffer(os.urandom(1 << 20) * (size >> 20), dtype=np.uint8)
    target = source.copy()
    scale = size / source.nbytes

    def bounds() -> tuple[float, float]:
        copied = memcpy(source, target) * scale
        return copied, copied + cast_and_hash(target) * scale

    return [one_step(made, bounds, index) for index in range(steps + WARM_UP)][WARM_UP:]


def memcpy(source: Any, target: Any) -> float:
    """Seconds of a copy onto touched memory: the fastest of a few."""
    import numpy as np

    found = []
    for _ in range(MEMCPYS):
        started = time.perf_counter()
        np.copyto(target, source)
        found.append(time.perf_counter() - started)
    return min(found)


def cast_and_hash(target: Any) -> float:
    """Seconds in which one thread casts fp32 weights into as many bytes of bf16, and hashes these: the fastest."""
    import torch
    from headrace_servicekit.rpc.digests import tensor_digest

    torch.set_num_threads(1)
    weights, out = _fp32(len(target) // 2), torch.from_numpy(target).view(torch.bfloat16)
    found = []
    for _ in range(MEMCPYS):
        started = time.perf_counter()
        out.copy_(weights)
        tensor_digest(memoryview(target))
        found.append(time.perf_counter() - started)
    return min(found)


@cache
def _fp32(count: int) -> Any:
    import torch

    return torch.randn(count) * 0.02


def by_threads() -> dict[str, float]:
    """GB/s of one thread and of as many as there are cores, by leg."""
    cores = len(os.sched_getaffinity(0))
    return {
        f"{leg}_gb_s_{threads}": rate
        for threads in sorted({1, cores})
        for leg, rate in thread_rates(threads).items()
    }


def delta_rates() -> dict[str, float]:
    """Megabytes of weights a second whose changes are found, and applied with their digest, by one thread."""
    import asyncio

    import numpy as np
    import torch
    from headrace.common.v1 import common_pb2, weights_pb2
    from headrace_servicekit.rpc.digests import tensor_digest
    from headrace_servicekit.weights.arrivals import Arrival
    from headrace_servicekit.weights.delta import encode, parts_of
    from headrace_servicekit.weights.versions import StoredWeights

    count = 1 << 25
    before = _fp32(count)
    after = before - 1e-6 * torch.sign(torch.randn(count))
    old, new = (memoryview(w.bfloat16().view(torch.int16).numpy().view(np.uint8)) for w in (before, after))
    entry = common_pb2.WeightEntry(
        name="w", data_type=common_pb2.DATA_TYPE_BFLOAT16, shape=[count], size_bytes=2 * count
    )
    entry.digest = tensor_digest(new)
    manifest = common_pb2.WeightManifest(entries=[entry], size_bytes=2 * count)
    out = memoryview(bytearray(2 * count))
    base = StoredWeights(common_pb2.PolicyVersion(), manifest, old, None, None)  # type: ignore[arg-type]
    rates: dict[str, list[float]] = {"delta_encode_mb_s": [], "delta_apply_mb_s": []}
    for _ in range(MEMCPYS):
        started = time.perf_counter()
        changes = [
            encode(p, new[p.offset : p.offset + p.size], old[p.offset : p.offset + p.size])
            for p in parts_of(manifest)
        ]
        coded = time.perf_counter()
        arrival = Arrival(out, manifest.entries, {})
        arrival.restart(base)
        asyncio.run(arrival.change(weights_pb2.FetchWeightsResponse(changes=changes)))
        applied = time.perf_counter()
        rates["delta_encode_mb_s"].append(2e-6 * count / (coded - started))
        rates["delta_apply_mb_s"].append(2e-6 * count / (applied - coded))
    return {name: max(found) for name, found in rates.items()}


def one_step(made: dict[str, Any], measure_bounds: Any, index: int) -> Sync:
    """One committed step and its installs; which transport goes first changes from step to step."""
    learner = made["trainer"]
    groups = settled(learner.version, learner.version.ordinal)
    number = learner.begin()
    learner.learn(groups)
    committed = learner.commit(groups, number)
    learner.record(committed)
    started = time.perf_counter()
    published = learner.publish()
    publish = time.perf_counter() - started
    # A repetition does nothing, so what it says is the cast at the commit.
    cast = learner.publish().publish_time.ToNanoseconds() / 1e9
    install, transfer, pause, moved = {}, {}, {}, {}
    for transport in WAYS if index % 2 else WAYS[::-1]:
        started = time.perf_counter()
        installed = made[transport].install(only(published, transport))
        install[transport] = time.perf_counter() - started
        if installed.fallbacks or installed.transport != kinds()[transport]:
            raise RuntimeError(f"{transport} was not used: {installed}")
        moved[transport] = installed.bytes_moved
        transfer[transport] = installed.transfer_time.ToNanoseconds() / 1e9
        pause[transport] = installed.pause_time.ToNanoseconds() / 1e9
    copied, bound = measure_bounds()
    return Sync(copied, bound, cast, publish, install, transfer, pause, moved)


def kinds() -> dict[str, Any]:
    """The contract's names of the transports."""
    from headrace.common.v1 import common_pb2

    return {
        SHM: common_pb2.WEIGHT_TRANSPORT_SHM,
        GRPC: common_pb2.WEIGHT_TRANSPORT_GRPC,
        DELTA: common_pb2.WEIGHT_TRANSPORT_DELTA,
        COLLECTIVE: common_pb2.WEIGHT_TRANSPORT_COLLECTIVE,
        BOTH: common_pb2.WEIGHT_TRANSPORT_COLLECTIVE,
    }


def only(published: Any, transport: str) -> Any:
    """A publication whose source offers one transport; changes need the whole for the first version."""
    found = type(published)()
    found.CopyFrom(published)
    del found.source.transports[:]
    found.source.transports.append(kinds()[GRPC if transport == DELTA else transport])
    found.source.receivers = 1
    return found


def settled(version: Any, prompt: int) -> list[Any]:
    """One group of short answers whose rewards differ; nobody generated them."""
    from harness.services.by_hand import DISTRIBUTION
    from headrace.common.v1 import common_pb2
    from headrace.trainer.v1 import trainer_pb2
    from headrace_servicekit.rpc.digests import trajectory_digest

    group = trainer_pb2.SettledGroup(prompt_ordinal=prompt)
    for index in range(SAMPLES):
        body = common_pb2.Trajectory(
            sample=common_pb2.SlotKey(prompt_ordinal=prompt, sample_index=index),
            attempt=prompt * SAMPLES + index + 1,
            finish_reason=common_pb2.FINISH_REASON_EOS,
        )
        branch = body.branches.add()
        branch.segments.add(tokens=common_pb2.TokenSegment(token_ids=range(3, 3 + PROMPT)))
        answer = common_pb2.TokenSegment(
            token_ids=range(10 + index, 10 + index + ANSWER),
            log_probs=[-10.0] * ANSWER,
            distribution=DISTRIBUTION,
        )
        branch.segments.add(policy_number=version.number, tokens=answer)
        body.body_digest = trajectory_digest(body)
        group.members.add(trajectory=body, reward=float(index % 2), oldest_version=version)
    return [group]


def trainer_config(model: Path) -> dict[str, Any]:
    """What the trainer is opened with."""
    return {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "algorithm": {"group_size": SAMPLES, "prompts_per_step": 1},
        "optimizer": {"lr": 1e-6},
        "sampling": {"max_new_tokens": ANSWER},
        "checkpoint": {"enabled": False},
        "seed": 3,
        "steps": 1000,
    }


def rollout_config(model: Path, transport: str) -> dict[str, Any]:
    """What a rollout is opened with."""
    named = {GRPC: [], BOTH: [COLLECTIVE, DELTA]}.get(transport, [transport])
    ways = [*named, GRPC]
    weights = {"transports": ways, "delta": "always", "whole_every": 1000}
    return {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "rollout": {},
        "weights": weights,
        "seed": 3,
    }


def open_trainer(learner: Any, model: Path) -> None:
    """Opens the run."""
    from harness.services.alone import CALL_S
    from harness.services.by_hand import header
    from headrace.trainer.v1 import trainer_pb2

    config = json.dumps(trainer_config(model))
    request = trainer_pb2.OpenRunRequest(
        header=header(), config_json=config, run_directory=str(learner.directory)
    )
    learner.stub.OpenRun(request, timeout=CALL_S)


def open_engine(engine: Any, model: Path, transport: str) -> None:
    """Opens the run."""
    from harness.services.alone import CALL_S
    from harness.services.by_hand import header
    from headrace.rollout.v1 import rollout_pb2

    request = rollout_pb2.OpenRunRequest(
        header=header(), config_json=json.dumps(rollout_config(model, transport))
    )
    engine.stub.OpenRun(request, timeout=CALL_S)


def figures(syncs: Sequence[Sync], size: int) -> dict[str, float]:
    """The figures that the module's docstring names."""
    memcpy_s, bound_s = min(sync.memcpy for sync in syncs), min(sync.bound for sync in syncs)
    fastest = {transport: min(sync.total(transport) for sync in syncs) for transport in WAYS}
    return {
        "shm_vs_bound": bound_s / fastest[SHM],
        **{f"{transport}_vs_memcpy": memcpy_s / fastest[transport] for transport in (SHM, GRPC, COLLECTIVE)},
        "delta_bytes_vs_full": max(sync.moved[DELTA] for sync in syncs) / size,
        "collective_delta_bytes_vs_full": max(sync.moved[BOTH] for sync in syncs) / size,
        "pause_ms": 1e3 * median(max(sync.pause.values()) for sync in syncs),
        "memcpy_s": memcpy_s,
        "bound_s": bound_s,
        **{f"{transport}_s": fastest[transport] for transport in WAYS},
    }


def show(syncs: Sequence[Sync], size: int, found: Mapping[str, float]) -> None:
    """The table, and which goals are missed."""
    say(f"{size / 1e6:.0f} MB, seconds")
    parts = ("install", "transfer", "pause")
    header = ["memcpy", "bound", "cast", "publish", *(f"{t} {part}" for t in WAYS for part in parts)]
    rows = [
        [sync.memcpy, sync.bound, sync.cast, sync.publish]
        + [getattr(sync, part)[transport] for transport in WAYS for part in parts]
        for sync in syncs
    ]
    table(
        [*header, *WAYS],
        [(*row, *map(s.total, WAYS)) for row, s in zip(rows, syncs, strict=True)],
    )
    missed = [name for name, goal in GOALS.items() if found[name] < goal]
    missed += [name for name, bound in BOUNDS.items() if found[name] > bound]
    say(f"missed: {', '.join(missed)}" if missed else "all goals are met")


if __name__ == "__main__":
    main()
