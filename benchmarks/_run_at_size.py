"""One run of a model of a published shape on a fleet of its own, and what its processes took. Judges nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from _harness import Fleet

RUN_S, LOOK_S, MEMORY_LOOK_S = 1800.0, 0.5, 0.25
STARTED = re.compile(r"EngineCore pid=(\d+)")


@dataclass(frozen=True)
class Size:
    """A run: the shape and the step. `gpus`: of the fleet; 0 runs on two CPU slots."""

    shape: str
    engine: str = "transformers"
    steps: int = 3
    groups: int = 2
    samples: int = 4
    tokens: int = 16
    context: int = 256
    micro_batch_tokens: int = 256
    gpus: int = 0
    ranks: int = 1
    mode: str = "collocated"
    backend: str = "fsdp"
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of the spec, such as {"trainer.lora": {"rank": 16}}."""

    @property
    def devices(self) -> str:
        """What the fleet leases."""
        count = self.gpus or 2
        return ",".join(f"{'gpu' if self.gpus else 'cpu'}:{index}" for index in range(count))

    @property
    def pattern(self) -> str:
        """Characters that about half of all answers hold, so that groups of a model that knows nothing differ."""
        from headrace_modelkit.presets.shapes import FIRST, SHAPES

        share = 1 - 0.5 ** (1 / self.tokens)
        last = ord(FIRST) + int(share * SHAPES[self.shape][1]["vocab_size"])
        return f"[{FIRST}-{chr(last)}]"

    def spec(self, model: Path) -> dict[str, Any]:
        """The run's spec: bf16 forward over fp32 masters, strict on-policy GRPO on strings of digits."""
        options = dict(self.engine_options)
        if self.engine == "vllm" and not self.gpus:
            options = {"enforce_eager": True, "kv_cache_gib": 0.25, **options}
        spec: dict[str, Any] = {
            "name": "at-size",
            "steps": self.steps,
            "seed": 0,
            "model": {"path": str(model), "dtype": "bfloat16", "max_context": self.context},
            "data": {
                "source": "copy_digits",
                "options": {"digits": 3},
                "heldout": 0,
                "prompt": {"template": "{question}", "chat": False},
            },
            "sampling": {"max_new_tokens": self.tokens},
            "algorithm": {"name": "grpo", "prompts_per_step": self.groups, "group_size": self.samples},
            "optimizer": {"lr": 1e-6},
            "trainer": {
                "micro_batch_tokens": self.micro_batch_tokens,
                "ranks": self.ranks,
                "backend": self.backend,
                "backend_options": dict(self.backend_options),
            },
            "rollout": {
                "engine": self.engine,
                "engine_options": options,
                "max_concurrency": self.groups * self.samples,
            },
            "placement": {"mode": self.mode},
            "reward": {"scorers": [{"name": "regex", "options": {"pattern": self.pattern}}]},
            "export": False,
        }
        for key, value in self.more.items():
            *sections, last = key.split(".")
            place = spec
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
        return spec


def write_model(shape: str, directory: Path, *, device: str = "cpu", tokenizer: str = "characters") -> Path:
    """A model of a shape with random weights in bf16, made once, in a process of its own."""
    command = [sys.executable, "-m", "headrace_modelkit.presets.shapes", shape, str(directory)]
    command += ["--device", device, "--tokenizer", tokenizer]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=RUN_S)
    return directory


def run(size: Size, model: Path, during: Callable[[Fleet, Any], None] | None = None) -> dict[str, float]:
    """The run's figures. `during(fleet, client)` is called once the run has begun, in this thread.

    RuntimeError with the run's own words where it does not succeed.
    """
    from headrace.client import Client

    extras = ["--engine", size.engine] if size.engine != "transformers" else []
    extras += ["--backend", size.backend] if size.backend != "fsdp" else []
    extras += ["--trainer", str(size.ranks)] if size.ranks > 1 else []
    with Fleet("--devices", size.devices, "--simulator", "0", *extras) as fleet:
        with Client(fleet.url, fleet.token) as client, Watch(fleet, on_gpus=bool(size.gpus)) as watch:
            began = time.perf_counter()
            found = client.submit(size.spec(model))
            if during is not None:
                during(fleet, (client, found.id))
            deadline = time.monotonic() + RUN_S
            while not found.ended and time.monotonic() < deadline:
                time.sleep(LOOK_S)
                found = client.get(found.id)
            whole_s = time.perf_counter() - began
            if found.state != "SUCCEEDED":
                raise RuntimeError(f"{found.id} is {found.state}: {found.reason}\n{logs(fleet)}")
            steps = client.metrics(found.id)
        log = (fleet.data_dir / "logs" / "rollout-0.log").read_text(errors="replace")
    starts = len(set(STARTED.findall(log)))
    return {
        "run_s": whole_s,
        **({"engine_starts": float(starts)} if starts else {}),
        **figures(steps, size),
        **watch.figures(),
    }


def figures(steps: Sequence[Any], size: Size) -> dict[str, float]:
    """Of a run's steps: seconds by stage of the last one, tokens/s, and what the engine said against the trainer."""
    last = steps[-1]
    found = {f"{stage}_s": seconds for stage, seconds in last.stage_s.items()}
    found |= {
        "steps": float(len(steps)),
        "first_step_s": steps[0].wall_s,
        "last_step_s": last.wall_s,
        "trained": float(sum(step.trained for step in steps)),
        "generated_tokens_per_s": last.tokens / max(last.stage_s.get("generate", 0.0), 1e-9),
        "learned_tokens_per_s": last.tokens / max(last.stage_s.get("learn", 0.0), 1e-9),
        "worst_mismatch_kl": max(step.figures.get("log_prob_mismatch_kl", 0.0) for step in steps),
        "steps_with_gradient": float(sum(bool(step.figures.get("grad_norm")) for step in steps)),
        "grad_norm": float(last.figures.get("grad_norm", 0.0)),
        **{f"grad_norm_{n}": float(step.figures.get("grad_norm", 0.0)) for n, step in enumerate(steps, 1)},
    }
    return found


class Watch:
    """Memory of a fleet's processes while it runs: peaks of the host's, and of a GPU's by process."""

    def __init__(self, fleet: Fleet, *, on_gpus: bool) -> None:
        self._fleet, self._on_gpus = fleet, on_gpus
        self._peaks: dict[str, int] = {}
        self._asleep: int | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look_often, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join()

    def figures(self) -> dict[str, float]:
        """`host_peak_*` in bytes by kind of process; on GPUs `device_peak_*`, and `engine_asleep_bytes`.

        The last is the least that the rollout's processes had there while the trainer had more than its half of its
        peak: a collocated engine's residue.
        """
        found = {name: float(size) for name, size in self._peaks.items()}
        return found if self._asleep is None else {**found, "engine_asleep_bytes": float(self._asleep)}

    def _look_often(self) -> None:
        while not self._end.wait(MEMORY_LOOK_S):
            try:
                self._look()
            except (
                OSError,
                ValueError,
                KeyError,
                StopIteration,
            ):  # a process of the fleet is not there, or ended
                continue

    def _look(self) -> None:
        on_device: dict[str, int] = {}
        for kind in ("rollout", "trainer", "coordinator"):
            pids = family(self._fleet.process(kind))
            self._note(f"host_peak_{kind}_bytes", sum(map(resident, pids)))
            if self._on_gpus:
                on_device[kind] = device_bytes(pids)
                self._note(f"device_peak_{kind}_bytes", on_device[kind])
        if self._on_gpus and 2 * on_device["trainer"] > self._peaks["device_peak_trainer_bytes"] > 0:
            engine = on_device["rollout"]
            self._asleep = engine if self._asleep is None else min(self._asleep, engine)

    def _note(self, name: str, size: int) -> None:
        self._peaks[name] = max(size, self._peaks.get(name, 0))


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for each in found:  # grows while it is walked
        for task in Path(f"/proc/{each}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def resident(pid: int) -> int:
    """Bytes that a process has in memory and no other one: shared pages (a version of the weights) count where they
    are, and here by their share."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def device_bytes(pids: Sequence[int]) -> int:
    """Bytes that processes use on all NVIDIA GPUs, as the driver counts them by process."""
    from headrace_modelkit.devices import Nvml

    return sum(Nvml.open().used_by(pids).values())


def logs(fleet: Fleet, lines: int = 8) -> str:
    """The ends of a fleet's logs."""
    parts = []
    for file in sorted((fleet.data_dir / "logs").glob("*.log")):
        parts += [f"--- {file.name}", *file.read_text(errors="replace").splitlines()[-lines:]]
    return "\n".join(parts)
