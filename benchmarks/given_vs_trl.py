"""Supervised and DPO steps against TRL's: `python benchmarks/given_vs_trl.py`.

Headrace runs SmolLM2-135M through its services, a fleet that `headrace up` starts; TRL 1.16's `SFTTrainer` and
`DPOTrainer` run the same rows in one process, in an environment of its own (`.headrace/peers`). Same initial weights in
fp32, rows in the same order, batch, optimizer and learning rate, two CPUs for each, no evaluation, no checkpoint. The
rows are of random words: prompts of about 60 tokens, answers of 10 to 70, so that padding costs what it does in
practice. A pair's two answers have one prompt.

The sides take turns, who begins changes, and a ratio is of one turn of each, so that other work on the machine hits
both. A step's time is from one end of step to the next; each turn's first step is left out. Prints one JSON line:
tokens/s of Headrace over TRL (`sft_vs_trl`, `dpo_vs_trl`: the median of the turns), both sides' tokens/s, and the
largest difference of their losses in a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from _environments import PEERS, environment
from _harness import Fleet, emit, machine, say
from end_to_end_vs_trl import DEVICES, TURN_S, finished, make_model

PEER = Path(__file__).parent / "peers" / "trl_given.py"
WORKFLOWS = {"supervised": "sft", "preference": "dpo"}
WORDS = [
    "time",
    "people",
    "way",
    "water",
    "day",
    "part",
    "place",
    "number",
    "work",
    "name",
    "form",
    "line",
    "sea",
    "air",
    "land",
    "house",
    "hand",
    "school",
    "light",
    "night",
    "city",
    "tree",
    "farm",
    "story",
    "life",
    "river",
    "group",
    "music",
    "color",
    "paper",
    "mountain",
    "ship",
    "horse",
    "wood",
    "fire",
    "body",
    "family",
    "door",
    "road",
    "rule",
    "king",
]
ROWS = {"supervised": 16, "preference": 8}
"""Of a step: as many answers either way."""


@dataclass
class Side:
    """When each step ended, in seconds, and its loss."""

    ends: list[float]
    losses: list[float]

    @property
    def step_s(self) -> float:
        """Of the median step after the first."""
        return median(end - start for start, end in zip(self.ends, self.ends[1:], strict=False))

    def apart(self, other: Side) -> float:
        """The largest difference of the losses of a step."""
        return max(abs(own - their) for own, their in zip(self.losses, other.losses, strict=True))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workflow", choices=[*WORKFLOWS], nargs="+", default=[*WORKFLOWS])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--turns", type=int, default=2, help="of each side")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences or pairs of TRL's forward")
    parser.add_argument("--micro-batch-tokens", type=int, default=512, help="tokens of Headrace's forward")
    options = parser.parse_args()
    python, model = environment("trl", PEERS), make_model("smollm2")
    figures: dict[str, float | None] = {}
    for workflow in options.workflow:
        with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
            spec = make_spec(workflow, options.steps, model, Path(folder))
            spec["trainer"] = {"micro_batch_tokens": options.micro_batch_tokens}
            rows, tokens = rows_of(spec)
            say(f"{workflow}: {tokens / options.steps:.0f} tokens a step; {machine()}")
            task = {
                "workflow": workflow,
                "model": str(model),
                "steps": options.steps,
                "threads": 2,
                "micro_batch": options.micro_batch,
                "rows_per_step": ROWS[workflow],
                "lr": spec["optimizer"]["lr"],
                "rows": rows,
            }
            pairs = [
                turn(spec, task, python, Path(folder), first=number % 2) for number in range(options.turns)
            ]
        name = WORKFLOWS[workflow]
        a_step = tokens / options.steps
        figures |= {
            f"{name}_vs_trl": median(theirs.step_s / ours.step_s for ours, theirs in pairs),
            f"{name}_tokens_per_s": a_step / median(ours.step_s for ours, _ in pairs),
            f"{name}_trl_tokens_per_s": a_step / median(theirs.step_s for _, theirs in pairs),
            f"{name}_loss_apart": max(ours.apart(theirs) for ours, theirs in pairs),
        }
    emit("given_vs_trl", figures)


def turn(
    spec: dict[str, Any], task: dict[str, Any], python: Path, folder: Path, *, first: int
) -> tuple[Side, Side]:
    """One run of each side, TRL's first where `first` is 1."""
    makes = [lambda: headrace_side(spec), lambda: trl_side(task, python, folder)]
    found = {place: makes[place]() for place in (first, 1 - first)}
    ours, theirs = found[0], found[1]
    say(f"  a step: {ours.step_s:.2f} s, TRL {theirs.step_s:.2f} s; {machine()}")
    say(f"  losses: {ours.losses} and {theirs.losses}")
    return ours, theirs


def make_spec(workflow: str, steps: int, model: Path, folder: Path) -> dict[str, Any]:
    """A run over rows of its own."""
    made = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(made.choice(WORDS) for _ in range(made.randint(least, most)))

    count, file = steps * ROWS[workflow], folder / "rows.jsonl"
    rows = []
    for _ in range(count):
        prompt = f"{words(50, 70)}\nAnswer:"
        answers = (
            {"completion": f" {words(10, 70)}"}
            if workflow == "supervised"
            else {"chosen": f" {words(10, 70)}", "rejected": f" {words(10, 70)}"}
        )
        rows.append({"prompt": prompt, **answers})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "name": workflow,
        "workflow": workflow,
        "steps": steps,
        "model": {"path": str(model), "dtype": "float32"},
        "data": {
            "source": "jsonl",
            "options": {"path": str(file), "form": "trl"},
            "prompt": {"chat": False},
        },
        "algorithm": {"prompts_per_step": ROWS[workflow]},
        "optimizer": {"lr": 1e-5},
        "export": False,
        "checkpoint": {"enabled": False},
    }


def rows_of(spec: dict[str, Any]) -> tuple[list[dict[str, str]], int]:
    """The rows in the run's order, and the tokens of all that they ask to be read: each answer behind its prompt.

    Raises ValueError for a row that TRL would tokenize otherwise.
    """
    from headrace_coordinator.data.dataset import Dataset
    from headrace_coordinator.data.given import GivenForm
    from headrace_modelkit.tokenizer import load_tokenizer
    from headrace_schema.spec import RunSpec

    run = RunSpec.model_validate(spec)
    form = GivenForm.of(run)
    assert form is not None
    data, codec = Dataset.open(run.data, run.seed, given=form), load_tokenizer(run.model)
    keys = ("completion",) if run.workflow == "supervised" else ("chosen", "rejected")
    found, tokens = [], 0
    for ordinal in range(run.steps * run.algorithm.prompts_per_step):
        item = data.train_item(ordinal)
        answers = [text for text, _ in form.answers(item, item)]
        for answer in answers:
            ids = [*codec.encode_prompt(None, item.question), *codec.encode_answer(answer)]
            if codec.tokenizer(f"{item.question}{answer}{codec.tokenizer.eos_token}").input_ids != ids:
                raise ValueError(f"row {ordinal} would be other tokens in TRL: {item.question!r}")
            tokens += len(ids)
        found.append({"prompt": item.question, **dict(zip(keys, answers, strict=True))})
    return found, tokens


def headrace_side(spec: dict[str, Any]) -> Side:
    """One run on a fleet of its own."""
    from headrace.client import Client

    with Fleet("--devices", DEVICES, "--simulator", "0", "--rollout", "0", "--reward", "0") as fleet:
        run = finished(fleet, spec)
        with Client(fleet.url, fleet.token) as client:
            events = [event.time for event in client.events(run.id) if event.type == "step_committed"]
            steps = client.metrics(run.id)
    return Side(events, [step.figures["loss"] for step in steps])


def trl_side(task: dict[str, Any], python: Path, folder: Path) -> Side:
    """One run of the peer."""
    file = folder / "task.json"
    file.write_text(json.dumps(task), encoding="utf-8")
    environ = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(task["threads"]),
        "OMP_WAIT_POLICY": "passive",  # a spinning thread of its pool takes the core from its own other one
    }
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
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    steps = [line for line in told if "at" in line]
    return Side([line["at"] for line in steps], [line["loss"] for line in steps])


if __name__ == "__main__":
    main()
