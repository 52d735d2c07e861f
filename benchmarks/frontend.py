"""What a token costs between an engine and the wire: `python benchmarks/frontend.py`.

A rollout service, a process of its own, gets its tokens from an engine that computes nothing and hands them out as
vLLM's output processor does (`paced_engine`), a token of each of 256 requests every 25 ms. It is spoken to over gRPC as
the coordinator speaks to it. Prints one JSON line: `frontend_us_per_token`, microseconds of a core that the service's
process takes for a token, less what the engine's own steps take, with streamed chunks of 16 tokens (what
`rollout.chunk_tokens` asks for; the coordinator itself reads whole answers); `whole_us_per_token`, the same with those;
`engine_us_per_token`, what was taken off.

`--engine vllm` does it with the real vLLM and a tiny model, in `.envs/vllm` (`make engines ENGINE=vllm`). Its front end
runs in the service's process, its engine core apart: what is taken off is what a bare `AsyncLLM` of the same arguments
takes in a process of its own, whose reader drops what it gets (`_frontend_bare.py`). The figures have `vllm_` before
their names. `--engine sglang` the same; SGLang's front end has a process of its own, so that nothing is taken off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from _harness import emit, machine, say, table
from engines import install, offline, python_of

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "integration_tests"))
PLUGIN = Path(__file__).with_name("paced_engine")
LEASE = 11
GOAL = 15.0
TURN_S = 300.0
HEARTBEAT_MS = 5000
"""As the coordinator's are."""
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256, help="requests that run at once")
    parser.add_argument("--samples", type=int, default=512, help="answers of a turn")
    parser.add_argument("--tokens", type=int, default=192, help="new tokens of an answer")
    parser.add_argument("--chunk", type=int, default=16, help="tokens of a streamed chunk")
    parser.add_argument("--stop", action="store_true", help="look for two stop strings, which never come")
    parser.add_argument("--turns", type=int, default=3, help="measured turns of each kind")
    parser.add_argument("--step-ms", type=float, default=25.0, help="milliseconds of the engine's step")
    parser.add_argument(
        "--engine", default="paced", choices=("paced", "vllm", "sglang"), help="what makes the tokens"
    )
    options = parser.parse_args()
    say(machine())
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder, ExitStack() as stack:
        model = Path(folder) / "model"
        write_model(model, options.engine)
        service = Service(stack, Path(folder), model, options)
        bare = stack.enter_context(Bare(model, options)) if options.engine == "vllm" else None
        kinds = {"frontend": options.chunk, "whole": 0}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for turn in range(-1, options.turns):
            for name, chunk in kinds.items():
                whole, own = service.turn(turn + 2, chunk)
                own = own if bare is None else bare.turn()
                say(f"chunks of {chunk}: {whole:.1f} us a token, {own:.1f} of them the engine's; {machine()}")
                if turn >= 0:
                    found[name].append((whole - own, own))
    say(f"at the end: {machine()}")
    figures = {f"{name}_us_per_token": median(cost for cost, _ in costs) for name, costs in found.items()}
    if options.engine != "sglang":
        figures["engine_us_per_token"] = median(own for costs in found.values() for _, own in costs)
    rows = [
        (name, figures[f"{name}_us_per_token"], " ".join(f"{cost:.1f}" for cost, _ in costs))
        for name, costs in found.items()
    ]
    table(("kind", "us a token", "turns"), rows)
    before = "" if options.engine == "paced" else f"{options.engine}_"
    emit("frontend", {before + name: value for name, value in figures.items()})


def write_model(directory: Path, engine: str) -> None:
    """A tiny model; for vLLM with heads that its CPU build takes, and with so many ids that few answers end early."""
    from headrace_modelkit.presets.tiny import write_tiny

    sizes: dict[str, Any] = {} if engine == "paced" else {"head_dim": 32, "vocab_size": 4096}
    write_tiny(directory, **sizes)


class Bare:
    """vLLM's front end in a process of its own, with requests like the service's."""

    def __init__(self, model: Path, options: argparse.Namespace) -> None:
        load = (options.streams, options.samples, options.tokens, min(16, options.chunk))
        self._process = subprocess.Popen(
            [python_of("vllm"), Path(__file__).with_name("_frontend_bare.py"), model, *map(str, load)],
            env={**os.environ, **offline(None), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=TURN_S)

    def turn(self) -> float:
        """Microseconds that its process takes for a token."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        return 1e6 * float(found["cpu_s"]) / int(found["tokens"])


class Service:
    """A rollout service with an engine that computes nothing, with vLLM, or with SGLang."""

    def __init__(self, stack: ExitStack, folder: Path, model: Path, options: argparse.Namespace) -> None:
        from harness.services import alone
        from harness.services.by_hand import Engine, header
        from harness.services.fake_fleet import FakeFleet
        from headrace.rollout.v1 import rollout_pb2

        self._options, self._costs = options, folder / "costs"
        fleet = stack.enter_context(FakeFleet(heartbeat_ms=HEARTBEAT_MS))
        devices = "cpu:0" if options.engine == "paced" else "cpu:0,cpu:1"
        flags = ("--coordinator", fleet.address, "--name", "rollout-0", "--devices", devices)
        paced = options.engine == "paced"
        plugin = {"PYTHONPATH": os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH"))))}
        process = alone.Service(
            "rollout",
            folder / "rollout",
            *flags,
            python=sys.executable if paced else python_of(options.engine),
            **(plugin if paced else offline(None)),
        )
        stack.enter_context(process)
        fleet.grant("rollout-0", LEASE)
        self._pid = process.process.pid
        self._engine = Engine(stack.enter_context(alone.channel_to(process.address)), LEASE)
        rollout = {"engine": options.engine, "max_concurrency": options.streams}
        if paced:
            rollout["engine_options"] = {"step_s": options.step_ms / 1e3, "costs": str(self._costs)}
        elif options.engine == "sglang":
            rollout["engine_options"] = {"kv_cache_tokens": 1 << 16}
        config = {"model": {"path": str(model), "dtype": "float32"}, "rollout": rollout, "seed": 3}
        asked = rollout_pb2.OpenRunRequest(header=header(), config_json=json.dumps(config))
        self._engine.stub.OpenRun(asked, timeout=alone.CALL_S)
        self._engine.wake()
        install(self._engine, 1, "")

    def turn(self, turn: int, chunk: int) -> tuple[float, float]:
        """Microseconds of a token: the service's process, and what the paced engine's steps take of them."""
        before, own, started = self._cpu_s(), self._own_s(), time.perf_counter()
        tokens = sum(self._received(turn, chunk))
        used, own = self._cpu_s() - before, self._own_s() - own
        say(f"{tokens / (time.perf_counter() - started):.0f} tokens/s")
        return 1e6 * used / tokens, 1e6 * own / tokens

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def _own_s(self) -> float:
        return float(self._costs.read_text() or 0) if self._costs.exists() else 0.0

    def _received(self, turn: int, chunk: int) -> Iterator[int]:
        from harness.services.by_hand import DISTRIBUTION, header
        from headrace.rollout.v1 import rollout_pb2 as rollout

        opening = rollout.GenerateOpen(
            header=header(LEASE),
            policy_number=1,
            distribution=DISTRIBUTION,
            max_new_tokens=self._options.tokens,
            seed=turn,
            chunk_tokens=chunk,
            stop=["++++", "===="] if self._options.stop else [],
            evaluation=True,  # nobody trains on it: nothing is retained
        )
        prompt = rollout.Prompt(token_ids=rollout.TokenIds(values=range(3, 19)))
        one = [rollout.SampleAssignment(sample_index=0, attempt=1)]
        groups = [
            rollout.GroupAssignment(prompt_ordinal=ordinal, prompt=prompt, samples=one)
            for ordinal in range(self._options.samples)
        ]
        asked = [
            rollout.GenerateRequest(open=opening),
            rollout.GenerateRequest(assign=rollout.AssignGroups(groups=groups)),
        ]
        from headrace_servicekit.rpc.trajectories import segments_of

        responses: Any = self._engine.stub.Generate(iter(asked), timeout=TURN_S)
        for response in responses:
            for each in response.chunks:
                segments = segments_of(each.finished)
                yield sum(len(part.tokens.log_probs) for part in segments if part.policy_number)


if __name__ == "__main__":
    main()
