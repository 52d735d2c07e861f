"""What a container costs, through a broker as a simulator's children have it: `python benchmarks/containers.py`.

Needs a Docker engine that answers, and the image. Prints one JSON line: `start_s` from nothing and `warm_start_s` where
one is ready; `exec_ms`, what a command that does nothing takes where its container has had a moment since the last one,
as a model's turn gives it, and `exec_at_once_ms` without that; `together`, containers at once, each of which runs
commands, with `failed` of them and `commands_per_s`. `--check` fails where a warm start takes more than 1 s, a command
more than 30 ms, or one fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from _harness import emit, machine, say
from headrace_containers.client import RemoteContainer, Source
from headrace_containers.provider import ContainerError, Limits, Spec
from headrace_servicekit.process.worker_pipes import JSON_CODEC, frame, read_frame

START_S, EXEC_MS = 1.0, 30.0
PAUSE_S = 0.3


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--image", default="python:3.11-slim", help="image of the containers")
    parser.add_argument("--together", type=int, default=16, help="containers at once")
    parser.add_argument("--commands", type=int, default=20, help="commands of each, and of a measurement")
    parser.add_argument("--starts", type=int, default=5, help="starts of each kind")
    parser.add_argument("--check", action="store_true", help="fail where a figure is above its limit")
    options = parser.parse_args()
    say(machine())
    spec = Spec(options.image, limits=Limits(cpus=1, memory_mib=128, processes=64, disk_mib=64))
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder, broker(Path(folder)):
        figures = measured(Path(folder), spec, options)
    say(f"at the end: {machine()}")
    emit("containers", figures)
    good = figures["warm_start_s"] <= START_S and figures["exec_ms"] <= EXEC_MS and not figures["failed"]
    if options.check and not good:
        sys.exit(f"above {START_S:g} s, {EXEC_MS:g} ms or 0 failed commands: {figures}")


def measured(folder: Path, spec: Spec, options: argparse.Namespace) -> dict[str, float]:
    """All figures."""
    cold, warm = Source("docker", {}, 0, folder), Source("docker", {}, 2, folder)
    cold.prepare(spec)
    starts = [started(cold, spec)[1] for _ in range(options.starts)]
    say(f"starts from nothing: {[round(each, 3) for each in starts]} s")
    warm.prepare(spec)
    ahead = []
    for _ in range(options.starts):
        time.sleep(2.0)  # an episode takes longer than that
        container, took = started(warm, spec)
        ahead.append(took)
        container.close()
    say(f"starts of ready ones: {[round(each, 3) for each in ahead]} s")
    container, _ = started(cold, spec)
    paused = [timed(container, PAUSE_S) for _ in range(options.commands)]
    at_once = [timed(container, 0.0) for _ in range(options.commands)]
    container.close()
    begun = time.monotonic()
    with ThreadPoolExecutor(options.together) as threads:
        failed = sum(threads.map(lambda _: failures(cold, spec, options.commands), range(options.together)))
    took = time.monotonic() - begun
    return {
        "start_s": median(starts),
        "warm_start_s": max(ahead),
        "exec_ms": 1000 * median(paused),
        "exec_at_once_ms": 1000 * median(at_once),
        "together": options.together,
        "failed": failed,
        "commands_per_s": options.together * options.commands / took,
    }


def started(source: Source, spec: Spec) -> tuple[RemoteContainer, float]:
    """A container, and the seconds until its first command had ended."""
    begun = time.monotonic()
    container = source.start(spec)
    assert container.exec(("echo", "ready")).stdout == b"ready\n"
    return container, time.monotonic() - begun


def timed(container: RemoteContainer, pause_s: float) -> float:
    """Seconds of a command that does nothing."""
    time.sleep(pause_s)
    begun = time.monotonic()
    assert container.exec(("true",)).exit_code == 0
    return time.monotonic() - begun


def failures(source: Source, spec: Spec, commands: int) -> int:
    """Commands of one container that did not say what they should."""
    failed = 0
    try:
        container = source.start(spec)
    except ContainerError as error:
        say(f"a container did not start: {error}")
        return commands
    for number in range(commands):
        try:
            failed += container.exec(("/bin/sh", "-c", f"echo {number}")).stdout != f"{number}\n".encode()
        except ContainerError as error:
            say(f"a command failed: {error}")
            failed += 1
    container.close()
    return failed


@contextmanager
def broker(folder: Path) -> Iterator[None]:
    """A broker that listens in a folder."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "headrace_containers.broker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(frame(JSON_CODEC.encode({"folder": str(folder), "users": [os.getuid()]})))
    process.stdin.flush()
    read_frame(process.stdout)  # type: ignore[arg-type]
    try:
        yield
    finally:
        process.stdin.close()
        process.wait(60)


if __name__ == "__main__":
    main()
