"""What the rollout service costs over an engine by itself, and what the built-in one's cache takes.

`python benchmarks/engines.py [--engines transformers,vllm] [--turns N]`. A rollout service, a process of its own that
is spoken to over gRPC as the coordinator speaks to it, and the bare engine, another process, generate the same 64
prompts of 64 tokens with 64 new tokens each, turn about, with one thread each on the same core. Bare are `generate` of
transformers and `LLM` of vLLM; both vllm sides run in `.envs/vllm`, which `make engines ENGINE=vllm` makes, without
torch's compiler.

Prints one JSON line: for each engine `service_vs_bare_ENGINE`, the ratio of the median tokens/s; both medians with
their quartiles; `start_s_ENGINE` (the process until its first version is in), `install_s_ENGINE` (the engine takes
another version, which the service has read), `pause_s_ENGINE` (until what runs has come back), `memory_mib_ENGINE` (of
the service and its engine's processes after the turns; pages that processes share count once); and
`kv_bytes_vs_needed`, the most memory that the built-in engine's cache takes for one answer of 1,800 tokens beside
eight of 76, over what their tokens need.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from _engine_bare import ENGINES, HALF, Load, prompts
from _engine_memory import kv_bytes_vs_needed
from _harness import emit, machine, say, table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "integration_tests"))

LEASE = 11
GOAL, KV_GOAL = 0.95, 1.3
TURN_S = 600.0


@dataclass
class Side:
    """Tokens/s of the turns of one side."""

    rates: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.rates)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third; of one turn that turn."""
        if len(self.rates) < 2:
            return self.rates[0], self.rates[0]
        low, _, high = quantiles(self.rates, n=4, method="inclusive")
        return low, high


@dataclass
class Found:
    """What was measured of one engine."""

    service: Side = field(default_factory=Side)
    bare: Side = field(default_factory=Side)
    start_s: float = 0.0
    install_s: float = 0.0
    pause_s: float = 0.0
    memory_mib: float = 0.0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", default="transformers,vllm", help="which, with commas between")
    parser.add_argument("--turns", type=int, default=7, help="measured turns of each side")
    parser.add_argument("--requests", type=int, default=64, help="prompts of a turn")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of an answer")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    parser.add_argument("--model", type=Path, help="a model directory; default: SmolLM2's shape at random")
    parser.add_argument("--gpu", type=int, help="number of the GPU that both sides share; default: a core")
    options = parser.parse_args()
    names = options.engines.split(",")
    if unknown := sorted(set(names) - set(ENGINES)):
        parser.error(f"--engines: {', '.join(unknown)} cannot be measured; choose of {', '.join(ENGINES)}")
    if missing := [name for name in names if not python_of(name).exists()]:
        parser.exit(3, f"{missing[0]}: .envs/{missing[0]} is not there: `make engines ENGINE={missing[0]}`\n")
    say(machine())
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        model = options.model or _random_model(Path(folder))
        load = Load(str(model), options.requests, options.prompt, options.tokens, options.dtype, options.gpu)
        found = {name: measure(name, load, Path(folder), options.turns) for name in names}
        on_cpu = options.gpu is None
        kv = kv_bytes_vs_needed(model, options.dtype) if "transformers" in names and on_cpu else None
    say(f"at the end: {machine()}")
    show(found, kv)
    emit("engines", figures(found, kv))


def python_of(name: str) -> Path:
    """The interpreter of an engine's environment."""
    return Path(sys.executable) if name == "transformers" else ROOT / ".envs" / name / "bin" / "python"


def measure(name: str, load: Load, folder: Path, turns: int) -> Found:
    """Alternating turns after one of each that is not counted."""
    found = Found()
    with ExitStack() as stack:
        bare = stack.enter_context(Bare(name, load))
        service = stack.enter_context(Service.of(name, load, folder, found))
        for turn in range(-1, turns):
            sides: list[tuple[Service | Bare, Side]] = [(service, found.service), (bare, found.bare)]
            for source, side in sides if turn % 2 else reversed(sides):
                rate = source.turn(turn + 1)
                if turn >= 0:
                    side.rates.append(rate)
            if turn >= 0:
                ratio = found.service.rates[-1] / found.bare.rates[-1]
                rates = f"service {found.service.rates[-1]:.1f}, bare {found.bare.rates[-1]:.1f} tokens/s"
                say(f"{name} turn {turn + 1} of {turns}: {rates}, ratio {ratio:.3f}; {machine()}")
        found.memory_mib = service.memory_mib()
        found.pause_s = service.pause(turns + 1)
    return found


class Bare:
    """The engine's own process."""

    def __init__(self, name: str, load: Load) -> None:
        from harness.processes import clean_environment

        script = str(Path(__file__).with_name("_engine_bare.py"))
        shape = map(str, (load.requests, load.prompt, load.tokens))
        self._process = subprocess.Popen(
            [str(python_of(name)), script, name, load.model, *shape, load.dtype, str(load.gpu)],
            env=clean_environment(**offline(load.gpu)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # vLLM's processes outlive the one that began them
        )

    def __enter__(self) -> Bare:
        self._answer()
        return self

    def __exit__(self, *exception: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def turn(self, turn: int) -> float:
        """Tokens/s."""
        assert self._process.stdin is not None
        print(turn, file=self._process.stdin, flush=True)
        answer = self._answer()
        return answer["tokens"] / answer["seconds"]

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        watch = threading.Timer(TURN_S, self._process.kill)
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            raise RuntimeError("the bare engine ended, or did not answer in time; its words are above")
        found: dict[str, float] = json.loads(line)
        return found


class Service:
    """A rollout service that holds a lease and has the model installed."""

    def __init__(self, engine: Any, load: Load, pid: int) -> None:
        self._engine, self._load, self._pid = engine, load, pid

    @classmethod
    @contextmanager
    def of(cls, name: str, load: Load, folder: Path, found: Found) -> Iterator[Service]:
        """Starts it; writes the times of start and install into `found`."""
        from harness.services import alone
        from harness.services.by_hand import Engine, header
        from harness.services.fake_fleet import FakeFleet
        from headrace.rollout.v1 import rollout_pb2

        with ExitStack() as stack:
            fleet = stack.enter_context(FakeFleet())
            flags = ("--coordinator", fleet.address, "--name", "rollout-0", "--devices", load.device)
            started = time.perf_counter()
            process = alone.Service(
                "rollout", folder / f"rollout-{name}", *flags, python=python_of(name), **offline(load.gpu)
            )
            stack.enter_context(process)
            fleet.grant("rollout-0", LEASE)
            engine = Engine(stack.enter_context(alone.channel_to(process.address)), LEASE)
            config = json.dumps(make_config(name, load))
            asked = rollout_pb2.OpenRunRequest(header=header(), config_json=config)
            engine.stub.OpenRun(asked, timeout=alone.CALL_S)
            engine.wake()
            install(engine, 1, "")
            found.start_s = time.perf_counter() - started
            found.install_s = install(engine, 2, str(_other_version(Path(load.model), folder)))
            yield cls(engine, load, process.process.pid)

    def turn(self, turn: int) -> float:
        """Tokens/s."""
        started = time.perf_counter()
        return sum(self._sampled(turn)) / (time.perf_counter() - started)

    def memory_mib(self) -> float:
        """Of the service's process and all below it, each shared page by its share."""
        pids, kib = [self._pid], 0
        for pid in pids:  # grows while it is walked
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += [int(child) for child in (task / "children").read_text().split()]
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            kib += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return kib / 1024

    def pause(self, turn: int) -> float:
        """Seconds of a Pause after the first tokens of a turn."""
        from harness.services.by_hand import header
        from headrace.rollout.v1 import rollout_pb2

        answers = self._responses(turn, chunk_tokens=1)
        next(answers)
        started = time.perf_counter()
        self._engine.stub.Pause(rollout_pb2.PauseRequest(header=header(LEASE)), timeout=TURN_S)
        seconds = time.perf_counter() - started
        for _ in answers:  # until all partial outputs are out
            continue
        return seconds

    def _sampled(self, turn: int) -> Iterator[int]:
        from headrace_servicekit.rpc.trajectories import segments_of

        for response in self._responses(turn):
            for chunk in response.chunks:
                yield sum(
                    len(segment.tokens.log_probs)
                    for segment in segments_of(chunk.finished)
                    if segment.policy_number
                )

    def _responses(self, turn: int, chunk_tokens: int = 0) -> Iterator[Any]:
        from harness.services.by_hand import DISTRIBUTION, header
        from headrace.rollout.v1 import rollout_pb2 as rollout

        opening = rollout.GenerateOpen(
            header=header(LEASE),
            policy_number=2,
            distribution=DISTRIBUTION,
            max_new_tokens=self._load.tokens,
            seed=turn,
            chunk_tokens=chunk_tokens,
            evaluation=True,  # nobody trains on it: nothing is retained
        )
        groups = [
            rollout.GroupAssignment(
                prompt_ordinal=ordinal,
                prompt=rollout.Prompt(token_ids=rollout.TokenIds(values=ids)),
                samples=[rollout.SampleAssignment(sample_index=0, attempt=1)],
            )
            for ordinal, ids in enumerate(prompts(self._load, turn))
        ]
        asked = [
            rollout.GenerateRequest(open=opening),
            rollout.GenerateRequest(assign=rollout.AssignGroups(groups=groups)),
        ]
        found: Iterator[Any] = self._engine.stub.Generate(iter(asked), timeout=TURN_S)
        return found


def make_config(name: str, load: Load) -> dict[str, Any]:
    """What the service is opened with."""
    rollout: dict[str, Any] = {"engine": name, "max_concurrency": load.requests}
    if load.gpu is not None and name == "vllm":
        rollout["engine_options"] = {"gpu_memory_utilization": HALF, "enforce_eager": True}
    return {"model": {"path": load.model, "dtype": load.dtype}, "rollout": rollout, "seed": 3}


def install(engine: Any, number: int, checkpoint: str) -> float:
    """A version from a directory, or the model's own; returns the seconds without what the service read before."""
    from harness.services import alone
    from harness.services.by_hand import header
    from headrace.common.v1 import common_pb2
    from headrace.rollout.v1 import rollout_pb2

    asked = rollout_pb2.InstallPolicyRequest(
        header=header(LEASE),
        version=common_pb2.PolicyVersion(number=number),
        files=rollout_pb2.PolicyFiles(checkpoint=checkpoint),
    )
    answer = engine.stub.InstallPolicy(asked, timeout=alone.CALL_S)
    return float(answer.pause_time.ToTimedelta().total_seconds())


def _other_version(model: Path, folder: Path) -> Path:
    """A checkpoint of the model with other weights."""
    from headrace_modelkit.loading import load_model
    from headrace_modelkit.weights import state_tensors
    from headrace_schema.sections.generating import ModelSection
    from safetensors.torch import save_file

    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        checkpoint.mkdir()
        loaded = load_model(ModelSection(path=str(model), dtype="float32"))
        masters = {name: tensor.detach() * 1.01 for name, tensor in state_tensors(loaded)}
        save_file(masters, checkpoint / "weights.safetensors")
    return checkpoint


def figures(found: dict[str, Found], kv: float | None) -> dict[str, float]:
    """The figures that the module's docstring names."""
    flat: dict[str, float] = {}
    for name, of in found.items():
        flat[f"service_vs_bare_{name}"] = of.service.median / of.bare.median
        for which, side in (("service", of.service), ("bare", of.bare)):
            flat[f"{which}_tokens_per_s_{name}"] = side.median
            flat[f"{which}_q1_{name}"], flat[f"{which}_q3_{name}"] = side.quartiles
        flat |= {
            f"start_s_{name}": of.start_s,
            f"install_s_{name}": of.install_s,
            f"pause_s_{name}": of.pause_s,
            f"memory_mib_{name}": of.memory_mib,
        }
    return flat if kv is None else {**flat, "kv_bytes_vs_needed": kv}


def show(found: dict[str, Found], kv: float | None) -> None:
    """The table, and which goals are missed."""
    header = (
        "engine",
        "service tok/s",
        "q1",
        "q3",
        "bare tok/s",
        "q1",
        "q3",
        "ratio",
        "start",
        "install",
        "pause",
        "MiB",
    )
    rows = [
        (
            *(name, of.service.median, *of.service.quartiles, of.bare.median, *of.bare.quartiles),
            *(of.service.median / of.bare.median, of.start_s, of.install_s, of.pause_s),
            of.memory_mib,
        )
        for name, of in found.items()
    ]
    table(header, rows)
    missed = [name for name, of in found.items() if of.service.median < GOAL * of.bare.median]
    missed += ["kv_bytes_vs_needed"] if kv is not None and kv > KV_GOAL else []
    say(f"missed: {', '.join(missed)}" if missed else "all goals are met")


def offline(gpu: int | None) -> dict[str, str]:
    """Settings under which engines start without a network, and this process's path, for what is not installed."""
    path = os.environ.get("PYTHONPATH", "")
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if gpu is None:  # as the service's vLLM on a CPU
        quiet |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "TORCHDYNAMO_DISABLE": "1"}
    return {**quiet, **({"PYTHONPATH": path} if path else {})}


def _random_model(folder: Path) -> Path:
    from prefix import write_model

    return write_model(folder)


if __name__ == "__main__":
    main()
