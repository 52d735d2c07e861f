"""What a message costs on its way through the coordinator: `python benchmarks/chunk_stream.py`.

Headrace: a producer with a rollout's contract, the coordinator's event_log, store, dispatch and streams, and a
consumer with a trainer's contract, a process each, over gRPC with a token, beside the embedded store and its
append-only file. A message is one chunk that ends a trajectory. It begins when the producer starts to make it and
ends when the consumer's acknowledgement is durable: its digest was verified by coordinator and consumer, both its
acceptance and its acknowledgement are events in the log.

Peers: RLinf 0.3.0's `Channel` and `ray.util.queue` between two RLinf workers. Theirs begins when the producer calls
`put`, and ends when the put is acknowledged and the consumer has the object; nothing of it is durable or verified.

Two access patterns, the same for all. *One outstanding*: the producer may send once it hears, on a socket of its own
that is not part of the figure, that the message before has ended; the figure is the median. *Pipelined*: a window of
messages is under way (64 of 1 KB, 8 of 1 MB); the figure is messages over the time from the first to the last.

Prints one JSON line: `messages_vs_rlinf` for 1 KB, `bytes_inline_vs_rlinf` for 1 MB bodies in the message and
`bytes_reference_vs_rlinf` for 1 MB bodies that stay with the producer and are read by the consumer, each the worse of
both patterns. Every figure is the best of the rounds, which take turns.

`--answers`: answers of 192 tokens with their text, in groups of 8, 256 of them under way, to Headrace alone. Prints
`coordinator_us_per_answer` and `coordinator_us_per_token`, microseconds of a core that the coordinator's process takes
from the rollout's message to the durable acknowledgement of the trainer, the median of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from _environments import environment
from _harness import emit, machine, say, table

MESSAGE, INLINE, REFERENCE, ANSWER = "message", "inline", "reference", "answer"
ONE, PIPELINED = "one", "pipelined"
PATTERNS = (ONE, PIPELINED)
SIZES = {MESSAGE: 1024, INLINE: 1024 * 1024, REFERENCE: 1024 * 1024}
GOALS = {MESSAGE: 5.0, INLINE: 3.0, REFERENCE: 8.0}
NAMES = {MESSAGE: "messages", INLINE: "bytes_inline", REFERENCE: "bytes_reference"}
WINDOWS = {MESSAGE: 64, INLINE: 8, REFERENCE: 8}
BURSTS = {MESSAGE: 512, INLINE: 64, REFERENCE: 64}
"""Messages of a step."""
STEPS = 6  # and one that warms up
STREAMS, ANSWERS, GROUP, ANSWER_TOKENS = 256, 2048, 8, 192
RAY = [
    ["torch==2.13.0"],
    ["ray==2.60.0", "hydra-core", "omegaconf", "sortedcontainers", "datasets", "torchdata", "accelerate"],
    ["transformers", "einops", "pynvml"],
    ["--no-deps", "rlinf==0.3.0"],
]
HERE = Path(__file__).parent
PEER_S = 240.0
Rates = dict[tuple[str, str], float]
"""Messages a second by (kind, pattern); of one outstanding, the inverse of the median."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="times that each system is measured")
    parser.add_argument("--seconds", type=float, default=1.5, help="about this long a pattern of a peer")
    parser.add_argument("--alone", action="store_true", help="without peers, for work on Headrace itself")
    parser.add_argument("--answers", action="store_true", help="what the coordinator takes for an answer")
    options = parser.parse_args()
    if options.answers:
        with services() as coordinator:
            emit("chunk_stream", answers(coordinator))
        return
    python = None if options.alone else environment("ray", RAY)
    say(machine())
    rounds: list[dict[str, Rates]] = []
    for _ in range(options.rounds):
        with services() as coordinator:
            found = {"headrace": headrace(coordinator)}
        if python is not None:
            found |= {name: peer(python, name, options.seconds) for name in ("rlinf", "queue")}
        rounds.append(found)
        say(machine())
    best = best_of(rounds)
    show(best)
    if python is not None:
        emit("chunk_stream", figures(best))


# --- Headrace


def headrace(
    coordinator: subprocess.Popen[str], bursts: Mapping[str, int] = BURSTS, steps: int = STEPS
) -> Rates:
    """Every kind and pattern; `bursts` are the messages of a step by kind."""
    found = {
        (kind, pattern): ask(coordinator, kind, pattern, bursts[kind], steps, WINDOWS[kind])
        for kind in SIZES
        for pattern in PATTERNS
    }
    return {key: rate([times for times, _ in taken], key[1]) for key, taken in found.items()}


def answers(coordinator: subprocess.Popen[str], count: int = ANSWERS, steps: int = STEPS) -> dict[str, float]:
    """What the coordinator's process takes for answers, `count` of them a step."""
    found = ask(coordinator, ANSWER, PIPELINED, count, steps, STREAMS, GROUP)
    each = [1e6 * cpu_s / count for _, cpu_s in found]
    say(f"us an answer by step: {' '.join(f'{one:.0f}' for one in each)}; {machine()}")
    cost = median(each)
    return {"coordinator_us_per_answer": cost, "coordinator_us_per_token": cost / ANSWER_TOKENS}


@contextmanager
def services() -> Iterator[subprocess.Popen[str]]:
    """A store, a producer, a consumer and a coordinator, a process each; the last one is asked."""
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder, ExitStack() as stack:
        directory = Path(folder)
        store = stack.enter_context(embedded_store(directory))
        settings: dict[str, Any] = {
            "directory": folder,
            "store": store,
            "go": str(directory / "go"),
            "shm": stack.enter_context(shared_memory()),
        }
        addresses = {}
        for name, kind in (("producer", "rollout"), ("consumer", "trainer")):
            service = stack.enter_context(process(name, settings))
            addresses[kind] = readline(service)
        yield stack.enter_context(process("coordinator", {**settings, "addresses": addresses}))


@contextmanager
def embedded_store(directory: Path) -> Iterator[str]:
    """URL of the store as `headrace up` starts it."""
    import asyncio

    from headrace_cli.launcher.store import store_command, store_url, wait_for_store

    path = directory / "store.sock"
    command = store_command(directory / "store", path)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as server:
        try:
            asyncio.run(wait_for_store(path))
            yield store_url(path)
        finally:
            server.terminate()


@contextmanager
def shared_memory() -> Iterator[str]:
    """A directory on the tmpfs where there is one."""
    root = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-", dir=root) as folder:
        yield folder


@contextmanager
def process(name: str, settings: Mapping[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """One of `_chunk_services`."""
    command = [sys.executable, str(HERE / "_chunk_services.py"), name, json.dumps(settings)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.terminate()


def readline(started: subprocess.Popen[str]) -> str:
    """A process's next line."""
    assert started.stdout is not None
    line = started.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"{started.args!r} ended: see its words above")
    return line


def ask(
    coordinator: subprocess.Popen[str],
    kind: str,
    pattern: str,
    burst: int,
    steps: int,
    window: int,
    group: int = 1,
) -> list[tuple[list[tuple[float, float]], float]]:
    """(began, ended) of messages of one kind and pattern, `burst` in each of the steps, and the coordinator's CPU
    seconds, by step.
    """
    assert coordinator.stdin is not None
    coordinator.stdin.write(json.dumps([kind, pattern, burst, steps + 1, window, group]) + "\n")
    coordinator.stdin.flush()
    found: list[tuple[list[tuple[float, float]], float]] = json.loads(readline(coordinator))[1:]
    return found


def rate(steps: list[list[tuple[float, float]]], pattern: str) -> float:
    """Messages a second from (began, ended) of each message of each step."""
    if pattern == ONE:
        return 1 / median(ended - began for step in steps for began, ended in step)
    return median(len(step) / (max(e for _, e in step) - min(b for b, _ in step)) for step in steps)


# --- peers


def peer(python: Path, name: str, seconds: float) -> Rates:
    """One of RLinf's and ray's; both sizes of body are tensors there, so inline and by reference are the same."""
    script = HERE / "peers" / "ray_channels.py"
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        done = subprocess.run(
            [python, script, name, str(seconds)],
            env={
                **os.environ,
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_TMPDIR": folder,
                "PYTHONWARNINGS": "ignore",
            },
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PEER_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{script.name} {name} ended with {done.returncode}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    rates = {}
    for kind, size in SIZES.items():
        rates[kind, ONE] = 1 / median(found[ONE][str(size)])
        rates[kind, PIPELINED] = found[PIPELINED][str(size)][0]
    return rates


# --- figures


def best_of(rounds: list[dict[str, Rates]]) -> dict[str, Rates]:
    """Each system's best of each kind and pattern."""
    return {
        name: {key: max(found[name][key] for found in rounds) for key in rates}
        for name, rates in rounds[0].items()
    }


def figures(best: Mapping[str, Rates]) -> dict[str, float]:
    """The worse of both patterns, against each peer."""
    found = {}
    for against in ("rlinf", "queue"):
        for kind, name in NAMES.items():
            ratios = [best["headrace"][kind, pattern] / best[against][kind, pattern] for pattern in PATTERNS]
            found[f"{name}_vs_{against if against == 'rlinf' else 'ray_queue'}"] = min(ratios)
    return found


def show(best: Mapping[str, Rates]) -> None:
    """The table, and which goals are missed."""
    rows = []
    for kind, size in SIZES.items():
        for pattern in PATTERNS:
            cells = [
                f"{1e3 / rates[kind, pattern]:.2f} ms" if pattern == ONE else f"{rates[kind, pattern]:.0f} /s"
                for rates in best.values()
            ]
            speed = [f"{rates[kind, pattern] * size / 1e6:.1f} MB/s" for rates in best.values()]
            rows.append((kind, pattern, *(f"{a}, {b}" for a, b in zip(cells, speed, strict=True))))
    table(("body", "pattern", *best), rows)
    if "rlinf" in best:
        found = figures(best)
        missed = [name for kind, name in NAMES.items() if found[f"{name}_vs_rlinf"] < GOALS[kind]]
        say(f"missed: {', '.join(missed)}" if missed else "all goals are met")


if __name__ == "__main__":
    main()
