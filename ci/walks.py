"""Measures how far it is to read from a request to its effect, by running: `python ci/walks.py [--root CHECKOUT]`.

Starts a fleet of the checkout under a tracer, runs the tiny model for a step and prints, as JSON:

- `submission`: the functions, and the files they are in, that are called from `POST /v1/runs` to the run's RUNNING;
- `admission`: those of its beginning, from `POST /v1/runs` to the answer;
- `answer`: those from the first finished answer on the Generate stream to the event that the step is committed;
- `learn`: the frames from the handler of the Learn RPC to the call that computes gradients. Where the way changes
  the task or the thread, the frames of each side follow one another as a segment.

What an idle fleet calls as well (heartbeats, renewals, sweeps) is left out, and so is what only some of the runs call.
`coordinator_only` counts what the coordinator's process calls, without the instances' side. `--list` adds the names.
It knows events and RPCs by their names and no module, so that two checkouts can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace_servicekit.rpc.addresses import free_port

Function = tuple[str, str]
"""(file, function), the file as package/path."""
HERE = Path(__file__).resolve().parent
COMMAND_S = 300.0
RUN_S = 180.0
IDLE_S = 8.0
RUNS = 3
WRITTEN_S = 1.0
"""Longer than the tracer takes to write what it has seen."""
HANDLER = "Learn"


@dataclass
class Process:
    """What one process called."""

    kind: str = ""
    functions: dict[int, Function] = field(default_factory=dict)
    calls: list[tuple[int, int]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    stacks: list[dict[str, Any]] = field(default_factory=list)

    def called(self, begin: float, end: float) -> set[Function]:
        """Functions that were called between two times in milliseconds."""
        return {self.functions[number] for number, at in self.calls if begin <= at <= end}


def read_process(lines: Iterable[str]) -> Process:
    """A process from its tracer's lines."""
    process = Process()
    for line in lines:
        item = json.loads(line)
        if "kind" in item:
            process.kind = item["kind"]
        elif "function" in item:
            process.functions[item["function"]] = item["file"], item["name"]
        elif "finished" in item:
            process.finished.append(item["finished"])
        elif "stack" in item:
            item["frames"] = [tuple(frame) for frame in item["frames"]]
            process.stacks.append(item)
        else:
            process.calls += [(number, at) for number, at in item["calls"]]
    return process


def walk(
    processes: Sequence[Process], windows: Sequence[tuple[float, float]], idle: tuple[float, float]
) -> set[Function]:
    """Functions that are called in each of the windows and not while the fleet is idle."""
    in_each = [set().union(*(process.called(*window) for process in processes)) for window in windows]
    quiet = set().union(*(process.called(*idle) for process in processes))
    return set.intersection(*in_each) - quiet


def learn_segments(stacks: Sequence[dict[str, Any]]) -> list[list[Function]]:
    """The longest way from the handler of Learn to the gradients, in the order in which it is walked."""
    found: list[list[list[Function]]] = []
    for index, stack in enumerate(stacks):
        if stack["stack"] == "backward":
            pool = stack["thread"].rpartition("_")[0]
            before = [each for each in stacks[:index] if each["stack"] == "submit" and each["thread"] == pool]
            sides = [before[-1]["frames"]] if before else []
            found += _from_handler(stacks, [*sides, stack["frames"]], set())
    return max(found, key=lambda segments: sum(map(len, segments)), default=[])


def _from_handler(
    stacks: Sequence[dict[str, Any]], segments: list[list[Function]], seen: set[Function]
) -> Iterator[list[list[Function]]]:
    """`segments`, and before them those of the tasks that started them, back to the handler."""
    first = segments[0]
    names = [name.rpartition(".")[2] for _, name in first]
    if HANDLER in names:
        yield [first[names.index(HANDLER) :], *segments[1:]]
    elif first and first[0] not in seen:
        for stack in stacks:
            if stack["stack"] == "task" and tuple(stack["task"]) == first[0]:
                yield from _from_handler(stacks, [stack["frames"], *segments], seen | {first[0]})


def count(functions: Iterable[Function], names: bool) -> dict[str, Any]:
    """How many functions and files there are, in all and by package; their names too on request."""
    found = sorted(set(functions))
    counted: dict[str, Any] = _sizes(found)
    packages = sorted({file.partition("/")[0] for file, _ in found})
    counted["by_package"] = {
        package: _sizes([each for each in found if each[0].startswith(f"{package}/")]) for package in packages
    }
    if names:
        counted["names"] = {
            file: [name for other, name in found if other == file]
            for file in sorted({file for file, _ in found})
        }
    return counted


def _sizes(functions: Sequence[Function]) -> dict[str, int]:
    return {"functions": len(functions), "files": len({file for file, _ in functions})}


class TracedFleet:
    """A fleet of a checkout whose processes are traced."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._data = folder / "data"
        self.traces = folder / "traces"
        self.traces.mkdir()
        shutil.copyfile(HERE / "walk_tracer.py", folder / "sitecustomize.py")
        sources = [str(path) for path in (*root.glob("*/src"), *root.glob("*/*/src"))]
        self._plain = {**os.environ, "PYTHONPATH": os.pathsep.join(sources)}
        self._traced = {
            **self._plain,
            "PYTHONPATH": os.pathsep.join((str(folder), *sources)),
            "HEADRACE_WALKS": str(self.traces),
            "HEADRACE_TEMPLATE": "0",  # a forked process has no thread that writes
        }
        self.model = folder / "model"
        self._call("-m", "headrace_modelkit.presets.tiny", str(self.model))

    def __enter__(self) -> TracedFleet:
        arguments = ("--data-dir", str(self._data), "--port", str(free_port()), "--simulator", "0")
        answer = self._call("-m", "headrace_cli", "up", "--json", *arguments, env=self._traced)
        self.ready = json.loads(answer)
        return self

    def __exit__(self, *error: object) -> None:
        self._call("-m", "headrace_cli", "down", "--json", "--data-dir", str(self._data))

    def run(self, spec: dict[str, Any]) -> list[dict[str, Any]]:
        """Submits a run and follows it to its end; its events, and before them when it was submitted."""
        token = Path(self.ready["token_file"]).read_text(encoding="ascii").strip()
        asked = json.dumps({"url": self.ready["url"], "token": token, "spec": spec})
        return [json.loads(line) for line in self._call("-c", FOLLOW, asked).splitlines()]

    def processes(self) -> list[Process]:
        """What has been traced so far."""
        time.sleep(WRITTEN_S)
        found = []
        for path in sorted(self.traces.glob("*.jsonl")):
            whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
            found.append(read_process(whole.splitlines()))
        return found

    def _call(self, *arguments: str, env: dict[str, str] | None = None) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, env=env or self._plain, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments[:3])} failed: {(done.stderr or done.stdout)[-2000:]}")
        return done.stdout


FOLLOW = f"""
import json, sys, time
from headrace.client import Client
asked = json.loads(sys.argv[1])
with Client(asked["url"], asked["token"]) as client:
    began = time.time()
    run = client.submit(asked["spec"])
    print(json.dumps(dict(type="submitted", time=began)))
    print(json.dumps(dict(type="answered", time=time.time())))
    for event in client.events(run.id):
        print(json.dumps(dict(type=event.type, time=event.time, data=event.data)))
    run = client.wait(run.id, timeout={RUN_S})
    assert run.state == "SUCCEEDED", run
"""


def small_spec(model: Path) -> dict[str, Any]:
    """A run of one step of eight answers, whose rewards differ."""
    return {
        "name": "walk",
        "steps": 1,
        "seed": 7,
        "model": {"path": str(model), "dtype": "float32"},
        "data": {
            "source": "copy_digits",
            "options": {"digits": 3},
            "heldout": 0,
            "prompt": {"template": "{question}", "chat": False},
        },
        "sampling": {"max_new_tokens": 4},
        "algorithm": {"prompts_per_step": 2, "group_size": 4},
        "trainer": {"warmup": {"steps": 2, "lr": 2.0e-3, "batch": 16}},
        "placement": {"mode": "collocated"},
        "reward": {"scorers": [{"name": "exact"}, {"name": "length", "options": {"target": 1, "limit": 4}}]},
    }


def windows(events: Sequence[dict[str, Any]], finished: Sequence[int]) -> tuple[tuple[float, float], ...]:
    """Begin and end, in milliseconds, of a run's submission, of its admission and of its first step's answer."""
    submitted = _time(events, "submitted")
    running = _time(events, "runstatechanged", "RUNNING")
    committed = _time(events, "stepcommitted")
    first = min(at for at in finished if running <= at <= committed)
    return (submitted, running), (submitted, _time(events, "answered")), (first, committed)


def _time(events: Sequence[dict[str, Any]], kind: str, state: str = "") -> float:
    for event in events:
        if event["type"].replace("_", "").lower() == kind and (
            not state or state in event.get("data", {}).values()
        ):
            return float(event["time"] * 1000)
    raise RuntimeError(f"no event {kind} {state} among {sorted({event['type'] for event in events})}")


def measure(root: Path, runs: int, names: bool) -> dict[str, Any]:
    """The three walks of a checkout."""
    with tempfile.TemporaryDirectory(prefix="headrace-walks-") as folder:
        with TracedFleet(root, Path(folder)) as fleet:
            spec = small_spec(fleet.model)
            fleet.run(spec)  # what is done once in a process's life is no part of a walk
            began = time.time()
            time.sleep(IDLE_S)
            idle = began * 1000 + 1000, time.time() * 1000
            followed = [fleet.run(spec) for _ in range(runs)]
            processes = fleet.processes()
    finished = sorted(at for process in processes for at in process.finished)
    times_of = zip(*(windows(events, finished) for events in followed), strict=True)
    coordinator = [process for process in processes if process.kind == "coordinator"]
    walks: dict[str, Any] = {}
    for name, times in zip(("submission", "admission", "answer"), times_of, strict=True):
        walks[name] = count(walk(processes, times, idle), names)
        walks[name]["coordinator_only"] = count(walk(coordinator, times, idle), False)
    ways = [learn_segments(process.stacks) for process in processes]
    segments = max(ways, key=lambda way: sum(map(len, way)), default=[])
    walks["learn"] = _sizes([frame for segment in segments for frame in segment])
    walks["learn"] = {"frames": walks["learn"]["functions"], "files": walks["learn"]["files"]}
    walks["learn"]["segments"] = [[f"{file} {name}" for file, name in segment] for segment in segments]
    return walks


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=HERE.parent, help="the checkout to measure")
    parser.add_argument("--runs", type=int, default=RUNS, help="runs to take the same functions of")
    parser.add_argument("--list", action="store_true", help="add the names of functions by file")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.root.resolve(), arguments.runs, arguments.list), indent=2))


if __name__ == "__main__":
    main()
