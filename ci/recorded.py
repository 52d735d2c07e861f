"""Records what a change of the code's form must not change, and checks it: `python -m ci.recorded [--check]`.

Of each example in RUNS, the hash of the weights that a `deterministic: true` run of some steps ends with, by the
exported tensors' names and bytes; of each seed of the simulation, a digest of its events without specs, so that a new
key of the spec changes none. `--events SEED` prints a seed's events, to compare those of two checkouts.

Weights hang on the processor and on torch. On others than the record's, a run is made twice and compared with itself;
to compare with the code before, record that code first: `python -m ci.recorded --file FILE` in a checkout of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from headrace.client import Client
from headrace_servicekit.rpc.addresses import free_port
from headrace_simulation.moves import moving
from headrace_simulation.virtual_time import run_virtual
from headrace_simulation.world import World
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "ci" / "recorded.json"
SEEDS = 400
RUNS = {
    "tiny": ("examples/tiny.yaml", 12),
    "tiny-lora": ("examples/tiny-lora.yaml", 8),
    "cartpole": ("examples/embodied/cartpole.yaml", 4),
}
"""Examples by name: the file, and the steps after which their weights are taken."""
DIGEST = re.compile(r"\b[0-9a-f]{32,64}\b")
"""Digests of what was sent change with its form: numbered as they come, they say what is equal."""
COMMAND_S = 300.0
RUN_S = 600.0


def machine() -> dict[str, str]:
    """What the bytes of weights hang on beside the code."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    fields = dict(re.findall(r"^(\w[\w ]*?)\s*: (.*)$", text, re.MULTILINE))
    named = [fields.get(key, "") for key in ("model name", "cpu family", "model", "stepping")]
    return {
        "processor": " ".join(named) if fields else platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def events_of(seed: int) -> list[str]:
    """The events of a world with faults, as JSON without what no seed decides: specs, folders, the store's name."""
    logging.disable(logging.CRITICAL)
    with moving(seed):
        world = World(seed)
        run_virtual(world.live())
    kept = [msgspec.to_builtins(event) for event in world.store.log]
    lines = [
        json.dumps({k: v for k, v in each.items() if k not in ("spec", "store_id")}, sort_keys=True)
        for each in kept
    ]
    known: dict[str, int] = {}

    def number(digest: re.Match[str]) -> str:
        return f"digest {known.setdefault(digest[0], len(known))}"

    return [DIGEST.sub(number, line.replace(str(world.directory), "")) for line in lines]


def digest_of_seed(seed: int) -> str:
    """A digest of a world's events."""
    return hashlib.sha256("\n".join(events_of(seed)).encode()).hexdigest()[:12]


@contextmanager
def fleet(folder: Path) -> Iterator[Callable[[str], str]]:
    """A fleet of this checkout, as a function that runs an example and returns the hash of its weights."""
    data = folder / "data"
    environment = {key: text for key, text in os.environ.items() if not key.startswith("HEADRACE_")}
    environment |= {"OMP_NUM_THREADS": "1", "HEADRACE_DATA_DIR": str(data)}

    def call(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {(done.stderr or done.stdout)[-2000:]}")
        return str(done.stdout)

    def weights(name: str) -> str:
        file, steps = RUNS[name]
        settings = {"deterministic": "true", "steps": str(steps), "checkpoint.interval_steps": str(steps)}
        if name.startswith("tiny"):
            settings["model.path"] = str(folder / "tiny")
        options = [text for pair in settings.items() for text in ("--set", "=".join(pair))]
        run = json.loads(call("headrace_cli", "run", "submit", file, "--json", *options))["id"]
        ended = client.wait(run, RUN_S)
        if ended.state != "SUCCEEDED":
            raise RuntimeError(f"{file}: {ended.state}, {ended.reason}")
        target = folder / f"{run}-model"
        call("headrace_trainer.export", str(data / "runs" / run), "--to", str(target))
        return hash_of_tensors(target)

    call("headrace_modelkit.presets.tiny", str(folder / "tiny"))
    ready = json.loads(
        call("headrace_cli", "up", "--json", "--port", str(free_port()), "--devices", "cpu:0,cpu:1")
    )
    try:
        with Client(ready["url"], Path(ready["token_file"]).read_text(encoding="ascii").strip()) as client:
            yield weights
    finally:
        call("headrace_cli", "down", "--json")


def hash_of_tensors(directory: Path) -> str:
    """A hash of the names and bytes of all tensors below a directory; not of how files divide them."""
    found: dict[str, bytes] = {}
    for path in sorted(directory.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(name)
                form = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
                found[form] = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).digest()
    if not found:
        raise RuntimeError(f"{directory} holds no tensors")
    return hashlib.sha256(b"".join(form.encode() + found[form] for form in sorted(found))).hexdigest()[:16]


def compare_weights(record: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Makes the runs; a sentence for each whose weights are others than the record's, or than those of a second run."""
    same, problems = record["machine"] == machine(), []
    with tempfile.TemporaryDirectory(prefix="recorded-") as folder, fleet(Path(folder)) as weights:
        for name in names:
            found = weights(name)
            expected = record["weights"].get(name) if same else weights(name)
            if found != expected:
                source = "the record has" if same else "a second run has"
                problems.append(f"{name}: the weights have the hash {found}, {source} {expected}")
    if not same:
        print(
            f"weights: compared with a second run alone; recorded on {record['machine']}, this is {machine()}"
        )
    return problems


def compare_events(record: Mapping[str, Any], seeds: int) -> list[str]:
    """A sentence for each seed whose events are others than the record's."""
    found = zip(record["events"], _digests(min(seeds, len(record["events"]))), strict=False)
    return [
        f"seed {seed}: other events" for seed, (expected, digest) in enumerate(found) if digest != expected
    ]


def _digests(seeds: int) -> list[str]:
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(digest_of_seed, range(seeds), chunksize=5))


def write(file: Path, names: Sequence[str], seeds: int) -> None:
    """Records this code anew; runs that are not named keep what they have on an equal machine."""
    old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    weights = dict(old.get("weights", {})) if old.get("machine") == machine() else {}
    if names:
        with tempfile.TemporaryDirectory(prefix="recorded-") as folder, fleet(Path(folder)) as hash_of:
            weights |= {name: hash_of(name) for name in names}
    events = _digests(seeds) if seeds else old.get("events", [])
    record = {"machine": machine(), "weights": weights, "events": events}
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where something is not as recorded."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.recorded",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=[*RUNS], help="examples; left out: all")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many, from 0 on")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--events", type=int, metavar="SEED", help="print the events of a seed, no more")
    options = parser.parse_args(arguments)
    if options.events is not None:
        print("\n".join(events_of(options.events)))
        return 0
    if not options.check:
        write(options.file, options.runs, options.seeds)
        return 0
    record = json.loads(options.file.read_text(encoding="utf-8"))
    problems = compare_events(record, options.seeds) if options.seeds else []
    problems += compare_weights(record, options.runs) if options.runs else []
    for problem in problems:
        print(problem)
    if problems:
        print(
            "a change that means to change them writes them anew, `python -m ci.recorded`, in a commit that says why"
        )
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
