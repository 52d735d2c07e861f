"""Whole GRPO steps against TRL's: `python benchmarks/end_to_end_vs_trl.py`.

Headrace runs a preset through its services, a fleet that `headrace up` starts; TRL 1.16's `GRPOTrainer` runs the same
task in one process, in an environment of its own that this script makes below `.headrace/peers` and keeps. Same
initial weights, prompts in the same order, reward code, group and batch sizes, lengths, learning rate, loss (token
mean, clipped, no KL), forward type, two CPUs for each; no evaluation and no checkpoint on either side. The two take
turns, so that other work on the machine hits both; one fleet a turn, gone while TRL runs.

A step's time is from one end of step to the next, everything in between included; each turn's first step is left out
(on both sides torch meets new shapes in it). `long` is `smollm2` with other prompts and answers: about 16 tokens of
prompt, and answers whose lengths spread up to 128, so that sharing a group's prompt wins little.

Prints one JSON line: samples/s of Headrace over TRL by workload (`tiny_samples_vs_trl`, `smollm2_samples_vs_trl`,
`long_samples_vs_trl`), both sides' samples/s, and for tiny the seconds from the start of the first step until the mean
reward of ten steps reaches 0.8, as medians over the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from _environments import PEERS, environment
from _harness import Fleet, emit, machine, say, table

REPOSITORY = Path(__file__).parents[1]
MODELS = REPOSITORY / ".headrace" / "models"
PEER = Path(__file__).parent / "peers" / "trl_grpo.py"
DEVICES = "cpu:0,cpu:1"
TURN_S, LOOK_S = 900.0, 1.0
WARM_UP_STEPS = 1


@dataclass(frozen=True)
class Workload:
    """A preset as it is measured. `peer` is what makes TRL fastest here: threads of torch, sequences a micro-batch.

    `name` and `changes` (sections of the spec, key by key) where it is not the preset as it stands.
    """

    preset: str
    steps: int
    turns: int
    peer: dict[str, Any]
    mode: str = "collocated"
    target: float | None = None
    name: str = ""
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What figures are called by."""
        return self.name or self.preset


# ChatML without the template's system message: about 16 tokens.
SHORT_PROMPT = {
    "template": "<|im_start|>user\nWhat is {expression}?<|im_end|>\n<|im_start|>assistant\n",
    "chat": False,
}
LONG: dict[str, dict[str, Any]] = {
    "data": {"prompt": SHORT_PROMPT},
    "sampling": {"temperature": 1.0, "max_new_tokens": 128},
    "trainer": {"micro_batch_tokens": 1024},
}


# Each side's fastest settings of those tried, see docs/performance.md.
WORKLOADS = (
    Workload("tiny", 120, 3, {"threads": 1, "micro_batch": 128}, mode="disaggregated", target=0.8),
    Workload("smollm2", 3, 2, {"threads": 2, "micro_batch": 32}),
    Workload(
        "smollm2", 3, 2, {"threads": 2, "micro_batch": 8}, mode="disaggregated", name="long", changes=LONG
    ),
)
TARGET_STEPS = 10
SCORERS = ("services/reward/src", "libs/servicekit/src")


@dataclass
class Turn:
    """One run of one side: seconds from the start of its first step to the end of each, and their mean rewards."""

    ends: list[float]
    rewards: list[float]
    samples: int

    def step_seconds(self) -> list[float]:
        """Of each step after the first."""
        return [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]

    def seconds_to(self, target: float) -> float | None:
        """Until the mean reward of `TARGET_STEPS` steps reaches `target`; None when it never does."""
        for last in range(TARGET_STEPS, len(self.rewards) + 1):
            if fmean(self.rewards[last - TARGET_STEPS : last]) >= target:
                return self.ends[last - 1]
        return None


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [workload.title for workload in WORKLOADS]
    parser.add_argument("--preset", choices=names, nargs="+", default=names, help="which workloads")
    parser.add_argument("--turns", type=int, help="turns of each side; default: tiny 3, the others 2")
    parser.add_argument("--steps", type=int, help="steps of a turn; default: tiny 120, the others 3")
    parser.add_argument("--mode", choices=("collocated", "disaggregated"), help="default: the faster one")
    parser.add_argument("--peer", type=json.loads, default={}, help="other settings of TRL, as JSON")
    options = parser.parse_args()
    python = environment("trl", PEERS)
    figures: dict[str, float | None] = {}
    for workload in (item for item in WORKLOADS if item.title in options.preset):
        found = list(measure(workload, python, options))
        figures |= summarise(workload, found)
    say(f"at the end: {machine()}")
    emit("end_to_end_vs_trl", dict(sorted(figures.items(), key=lambda item: "_vs_" not in item[0])))


def measure(workload: Workload, python: Path, options: argparse.Namespace) -> Iterator[tuple[Turn, Turn]]:
    """(Headrace, TRL) of each turn; who begins changes."""
    steps = options.steps or workload.steps
    spec = make_spec(workload, steps, options.mode, make_model(workload.preset))
    spec["model"]["path"] = str(initial_weights(spec))
    task = {**make_task(spec), **workload.peer, **options.peer}
    say(f"{workload.title}: {steps} steps a turn, {spec['placement']['mode']}; TRL {task_settings(task)}")
    for turn in range(options.turns or workload.turns):
        first, second = (headrace_turn, trl_turn) if turn % 2 == 0 else (trl_turn, headrace_turn)
        say(f"turn {turn + 1}: {machine()}")
        found = {side: side(spec, task, python) for side in (first, second)}
        yield found[headrace_turn], found[trl_turn]


def make_spec(workload: Workload, steps: int, mode: str | None, model: Path) -> dict[str, Any]:
    """The preset without evaluation, checkpoints and export."""
    import yaml

    text = (REPOSITORY / "examples" / f"{workload.preset}.yaml").read_text(encoding="utf-8")
    spec: dict[str, Any] = yaml.safe_load(text)
    spec.pop("evaluation", None)
    spec |= {"steps": steps, "export": False, "checkpoint": {"enabled": False}}
    spec["data"]["heldout"] = 0
    for section, values in workload.changes.items():
        spec[section] = {**spec[section], **values}
    spec["placement"] = {"mode": mode or workload.mode}
    spec["model"]["path"] = str(model)
    return spec


def make_model(preset: str) -> Path:
    """The preset's model, made as `headrace demo` makes it."""
    directory = MODELS / preset
    subprocess.run(
        [sys.executable, "-m", f"headrace_modelkit.presets.{preset}", str(directory)],
        check=True,
        stdout=sys.stderr,
        timeout=TURN_S,
    )
    return directory


def initial_weights(spec: dict[str, Any]) -> Path:
    """The weights that both sides start from: after the preset's supervised warm-up, where it has one.

    Takes the warm-up out of the spec. It runs once, in a run whose one step is too small to move a weight.
    """
    warmup = spec["trainer"].pop("warmup", None)
    start = Path(spec["model"]["path"])
    if not warmup:
        return start
    warmed = start.with_name(f"{start.name}-warmed-up")
    if not (warmed / "config.json").exists():
        with Fleet("--devices", DEVICES, "--simulator", "0") as fleet:
            trainer = {**spec["trainer"], "warmup": warmup}
            optimizer = {**spec["optimizer"], "lr": 1e-12}
            once = {**spec, "steps": 1, "export": True, "trainer": trainer, "optimizer": optimizer}
            run = finished(fleet, once)
            Path(run.export_path).rename(warmed)
    return warmed


def make_task(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec as the peer's script reads it, with Headrace's own prompts in Headrace's order."""
    from headrace_coordinator.data.dataset import Dataset
    from headrace_modelkit.tokenizer import load_tokenizer
    from headrace_schema.sections.generating import ModelSection
    from headrace_schema.spec import RunSpec
    from headrace_trainer.algorithms.plugins import GrpoOptions

    run = RunSpec.model_validate(spec)
    algorithm, optimizer = run.algorithm, run.optimizer
    loss = GrpoOptions.model_validate(algorithm.options)
    if loss.loss_aggregation != "token-mean" or not loss.normalize_std:
        raise ValueError(
            "the peer's loss is token-mean with rewards normalised by group: keep both in the preset"
        )
    data = Dataset.open(run.data, run.seed)
    codec = load_tokenizer(ModelSection(path=run.model.path))
    rows = []
    for ordinal in range(run.steps * algorithm.prompts_per_step):
        item = data.train_item(ordinal)
        content = data.prompt(item)
        ids = codec.encode_prompt(content.chat, content.text, content.prefill)
        text = codec.decode(ids, skip_special_tokens=False)
        if codec.tokenizer(text).input_ids != ids:
            raise ValueError(f"prompt {ordinal} would be other tokens in TRL: {text!r}")
        rows.append({"prompt": text, "answer": item.answer})
    return {
        "model": run.model.path,
        "dtype": run.model.dtype,
        "rows": rows,
        "scorers": spec["reward"]["scorers"],
        "steps": run.steps,
        "seed": run.seed,
        "prompts_per_step": algorithm.prompts_per_step,
        "group_size": algorithm.group_size,
        "max_new_tokens": run.sampling.max_new_tokens,
        "temperature": run.sampling.temperature,
        "schedule": optimizer.schedule.name,
        **optimizer.model_dump(include={"lr", "beta1", "beta2", "eps", "weight_decay", "grad_clip"}),
    }


def task_settings(task: dict[str, Any]) -> str:
    """What the reader should know of the peer's run."""
    return ", ".join(f"{key} {task[key]}" for key in ("dtype", "threads", "micro_batch"))


def headrace_turn(spec: dict[str, Any], task: dict[str, Any], python: Path) -> Turn:
    """One run on a fleet of its own."""
    from headrace.client import Client

    with Fleet("--devices", DEVICES, "--simulator", "0") as fleet:
        run = finished(fleet, spec)
        with Client(fleet.url, fleet.token) as client:
            events = [
                event for event in client.events(run.id) if event.type in ("step_opened", "step_committed")
            ]
            steps = client.metrics(run.id)
    stages = sorted({stage for step in steps for stage in step.stage_s})
    later = steps[WARM_UP_STEPS:]
    shown = {stage: median(step.stage_s.get(stage, 0.0) for step in later) for stage in stages}
    say("  Headrace, seconds of a step by stage: " + ", ".join(f"{k} {v:.3f}" for k, v in shown.items()))
    say(f"  {bound(shown, median(step.wall_s for step in later), fmean(step.tokens for step in later))}")
    started = next(event.time for event in events if event.type == "step_opened")
    ends = [event.time - started for event in events if event.type == "step_committed"]
    rewards = [step.reward_mean for step in steps if step.reward_mean is not None]
    return Turn(ends, rewards, task["prompts_per_step"] * task["group_size"])


def bound(stages: Mapping[str, float], wall_s: float, tokens: float) -> str:
    """What bounds a step: its longest stage, and the tokens that were sampled."""
    longest = max(stages, key=lambda stage: stages[stage])
    share = stages[longest] / wall_s
    return f"a step of {wall_s:.2f} s with {tokens:.0f} sampled tokens; {longest} is at work for {share:.0%} of it"


def finished(fleet: Fleet, spec: dict[str, Any]) -> Any:
    """The run, once it has succeeded; RuntimeError otherwise."""
    from headrace.client import Client

    deadline = time.monotonic() + TURN_S
    with Client(fleet.url, fleet.token) as client:
        run = client.submit(spec)
        while not run.ended and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            run = client.get(run.id)
    if run.state != "SUCCEEDED":
        raise RuntimeError(f"{run.name} is {run.state}: {run.reason}")
    return run


def trl_turn(spec: dict[str, Any], task: dict[str, Any], python: Path) -> Turn:
    """One run of the peer."""
    environ = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(task["threads"]),
        "OMP_WAIT_POLICY": "passive",  # a spinning thread of its pool takes the core from its own other one
        # The scorers' sources alone, so that both sides reward with the same code.
        "PYTHONPATH": os.pathsep.join(str(REPOSITORY / source) for source in SCORERS),
    }
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        file = Path(folder) / "task.json"
        file.write_text(json.dumps(task), encoding="utf-8")
        done = subprocess.run(
            [str(python), str(PEER), str(file)],
            env=environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TURN_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"TRL ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return read_turn(done.stdout.splitlines())


def read_turn(lines: Sequence[str]) -> Turn:
    """What the peer's script told; TRL prints other lines in between."""
    told = [json.loads(line) for line in lines if line.startswith('{"')]
    started = next(line["started"] for line in told if "started" in line)
    steps = [line for line in told if "at" in line]
    return Turn([s["at"] - started for s in steps], [s["reward"] for s in steps], int(steps[0]["samples"]))


COLUMNS = ("turn", "Headrace s/step", "TRL s/step", "ratio", "Headrace reward", "TRL reward")


def summarise(workload: Workload, pairs: Sequence[tuple[Turn, Turn]]) -> dict[str, float | None]:
    """The workload's figures; each turn goes to the reader."""
    seconds = [(median(ours.step_seconds()), median(theirs.step_seconds())) for ours, theirs in pairs]
    table(
        COLUMNS,
        [
            (index + 1, mine, peer, peer / mine, *(fmean(t.rewards[-TARGET_STEPS:]) for t in pair))
            for index, ((mine, peer), pair) in enumerate(zip(seconds, pairs, strict=True))
        ],
    )
    name, samples = workload.title, pairs[0][0].samples
    ours, theirs = (
        samples / median(second for pair in pairs for second in pair[side].step_seconds()) for side in (0, 1)
    )
    figures: dict[str, float | None] = {
        f"{name}_samples_vs_trl": ours / theirs,
        f"{name}_samples_per_s": ours,
        f"{name}_trl_samples_per_s": theirs,
    }
    if workload.target is not None:
        for side, key in ((0, "seconds_to_reward"), (1, "trl_seconds_to_reward")):
            found = [pair[side].seconds_to(workload.target) for pair in pairs]
            reached = [value for value in found if value is not None]
            figures[f"{name}_{key}"] = median(reached) if len(reached) == len(found) else None
    return figures


if __name__ == "__main__":
    main()
