"""What the tiny model learns under each algorithm, over seeds: `python benchmarks/algorithms.py --seeds 0 1 2`.

Runs `examples/algorithms/NAME.yaml` (two passes of two minibatches) by `headrace debug`, all services in one process,
one run after the other, and reads rewards, clip fractions and held-out scores off its events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "algorithms"
LIMIT_S = 1800
LAST = 10
"""Steps at the end, and at the beginning, whose rewards are averaged."""
TOKEN_FIGURES = ("clip_fraction", "approx_kl", "entropy", "reference_kl")
TEACHER_STEPS = 300
"""Supervised steps that make the teacher of `distill`."""


def run(name: str, seed: int, steps: int, model: Path, teacher: Path) -> dict[str, float]:
    """Figures of one run; raises subprocess.CalledProcessError when it failed."""
    command = [sys.executable, "-m", "headrace_cli", "debug", str(EXAMPLES / f"{name}.yaml"), "--json"]
    overrides = [f"seed={seed}", f"steps={steps}", f"model.path={model}", "checkpoint.enabled=false"]
    if name == "distill":
        overrides.append(f"trainer.reference.path={teacher}")
    for override in overrides:
        command += ["--set", override]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
    return figures(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def teach(model: Path, teacher: Path) -> None:
    """Writes a tiny model that has learned the task of the examples from reference answers."""
    import torch
    from headrace_modelkit.loading import load_model, save_model
    from headrace_modelkit.tokenizer import load_tokenizer
    from headrace_schema.generating import ModelSection

    torch.manual_seed(0)
    section = ModelSection(path=str(model), dtype="float32")
    policy: Any = load_model(section)
    codec = load_tokenizer(section)
    prompts = [codec.encode_prompt(None, f"{number:03}=", "") for number in range(1000)]
    answers = [codec.encode_answer(f"{number:03}") for number in range(1000)]
    rows = torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    labels = rows.clone()
    labels[:, : len(prompts[0])] = -100
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    for _ in range(TEACHER_STEPS):
        chosen = torch.randint(0, len(rows), (64,))
        policy(input_ids=rows[chosen], labels=labels[chosen]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_model(policy, codec, teacher)


def figures(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """What a run's events say: rewards of the first and the last steps, clip fraction, held-out scores."""
    seen = list(events)
    steps = [event["view"]["figures"] for event in seen if event["type"] == "step_committed"]
    scores = [event["view"]["score"] for event in seen if event["type"] == "evaluated"]
    rewards = [step["reward_mean"] for step in steps]
    return {
        "steps": float(len(steps)),
        "reward_first": statistics.fmean(rewards[:LAST]),
        "reward_last": statistics.fmean(rewards[-LAST:]),
        "heldout_before": scores[0],
        "heldout_after": scores[-1],
        **_ends(steps, "reference_kl"),
        "optimizer_steps": sum(step["optimizer_steps"] for step in steps),
        **{name: statistics.fmean(own) for name in TOKEN_FIGURES if (own := _own(steps, name))},
    }


def _ends(steps: list[dict[str, float]], name: str) -> dict[str, float]:
    """A figure of the first and the last step that have it."""
    own = _own(steps, name)
    return {f"{name}_first": own[0], f"{name}_last": own[-1]} if own else {}


def _own(steps: list[dict[str, float]], name: str) -> list[float]:
    """A figure of the steps that have it: a loss without a clip, or a step without a gradient, has none."""
    return [step[name] for step in steps if name in step]


def main() -> None:
    """Command line."""
    known = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", nargs="+", choices=known, default=known)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        model, teacher = Path(directory) / "tiny", Path(directory) / "teacher"
        subprocess.run([sys.executable, "-m", "headrace_modelkit.presets.tiny", str(model)], check=True)
        if "distill" in arguments.algorithms:
            teach(model, teacher)
        for name in arguments.algorithms:
            for seed in arguments.seeds:
                line = run(name, seed, arguments.steps, model, teacher)
                print(f"{name}, seed {seed}: {json.dumps(line)}", file=sys.stderr, flush=True)
                found |= {f"{name}_{key}_seed_{seed}": value for key, value in line.items()}
    print(json.dumps({"benchmark": "algorithms", "figures": found}))


if __name__ == "__main__":
    main()
