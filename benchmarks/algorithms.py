"""What the tiny model learns under each algorithm, over seeds: `python benchmarks/algorithms.py --seeds 0 1 2`.

Runs the examples of `examples/algorithms` (two passes of two minibatches) by `headrace debug`, all services in one
process, one run after the other, and reads rewards, clip fractions and held-out scores off its events. A run that made
one optimizer step a version, or whose clip never had work, ends the script: at ratio 1 most algorithms are the same.

`--record FILE` adds each run to a JSON file as it ends and skips those that the file has, so that an interrupted
measurement goes on; `--draw FILE` writes the curves of all recorded runs as an SVG, and the table of `docs/results.md`
to standard error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from _curves import draw
from _harness import emit, machine, say

sys.path.insert(0, str(Path(__file__).parents[1] / "integration_tests"))
from harness.examples import algorithm_examples

EXAMPLES = algorithm_examples()
LIMIT_S = 3600
LAST = 10
"""Steps at the end, and at the beginning, whose rewards are averaged."""
TOKEN_FIGURES = ("clip_fraction", "approx_kl", "entropy", "reference_kl", "value_loss", "explained_variance")
TEACHER_STEPS = 300
"""Supervised steps that make the teacher of `distill`."""
TITLED = ("ppo", "grpo", "dapo", "reinforce_pp", "rloo", "gspo")
"""What is drawn first; others follow."""
Found = dict[str, Any]
"""Figures of one run, and `rewards`: the mean reward of each step."""


def run(name: str, seed: int, steps: int, model: Path, more: Sequence[str] = ()) -> Found:
    """One run; raises subprocess.CalledProcessError when it failed."""
    file, changes = EXAMPLES[name]
    command = [sys.executable, "-m", "headrace_cli", "debug", str(file), "--json"]
    for override in (*changes, *overrides(seed, steps, model), *more):
        command += ["--set", override]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
    return figures(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def overrides(seed: int, steps: int, model: Path) -> list[str]:
    """What every run has in place of the example's."""
    return [f"seed={seed}", f"steps={steps}", f"model.path={model}", "checkpoint.enabled=false"]


def teach(model: Path, teacher: Path) -> None:
    """Writes a tiny model that has learned the task of the examples from reference answers."""
    import torch
    from headrace_modelkit.loading import load_model, save_model
    from headrace_modelkit.tokenizer import load_tokenizer
    from headrace_schema.sections.generating import ModelSection

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


def figures(events: Iterable[dict[str, Any]]) -> Found:
    """What a run's events say: rewards, clip fraction, held-out scores."""
    seen = list(events)
    steps = [event["view"]["figures"] for event in seen if event["type"] == "step_committed"]
    scores = [event["view"]["score"] for event in seen if event["type"] == "evaluated"]
    rewards = [step["reward_mean"] for step in steps]
    views = [event["view"] for event in seen if event["type"] == "step_committed"]
    return {
        "steps": float(len(steps)),
        "reward_first": statistics.fmean(rewards[:LAST]),
        "reward_last": statistics.fmean(rewards[-LAST:]),
        "heldout_before": scores[0],
        "heldout_after": scores[-1],
        "tokens_a_slot_first": _tokens(views[:LAST]),
        "tokens_a_slot_last": _tokens(views[-LAST:]),
        "filtered_slots": sum(view["filtered"] for view in views),
        "refilled_groups": sum(view["refilled"] for view in views),
        **_ends(steps, "reference_kl"),
        "optimizer_steps": sum(step["optimizer_steps"] for step in steps),
        **{name: statistics.fmean(own) for name in TOKEN_FIGURES if (own := _own(steps, name))},
        "rewards": rewards,
    }


def _tokens(views: list[dict[str, Any]]) -> float:
    return float(sum(view["tokens"] for view in views) / max(sum(view["trained"] for view in views), 1))


def _ends(steps: list[dict[str, float]], name: str) -> dict[str, float]:
    """A figure of the first and the last step that have it."""
    own = _own(steps, name)
    return {f"{name}_first": own[0], f"{name}_last": own[-1]} if own else {}


def _own(steps: list[dict[str, float]], name: str) -> list[float]:
    """A figure of the steps that have it: a loss without a clip, or a step without a gradient, has none."""
    return [step[name] for step in steps if name in step]


def check(name: str, found: Found) -> None:
    """Raises RuntimeError for a run in which the ratio to the old policy could not matter."""
    if found["optimizer_steps"] <= found["steps"]:
        raise RuntimeError(
            f"{name} made {found['optimizer_steps']:g} optimizer steps in {found['steps']:g} steps: "
            "set epochs and minibatches to 2 or more"
        )
    if "clip_fraction" in found and not found["clip_fraction"] > 0:
        raise RuntimeError(f"{name} clipped nothing: raise optimizer.lr, or narrow its clip")


def table(runs: dict[str, dict[str, Found]]) -> Iterable[str]:
    """The runs as rows of Markdown."""
    yield "| algorithm | seed | reward, first ten steps | last ten | held-out before | after | clip fraction |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, seeds in runs.items():
        for seed, found in sorted(seeds.items()):
            keys = ("reward_first", "reward_last", "heldout_before", "heldout_after")
            clip = f"{found['clip_fraction']:.3f}" if "clip_fraction" in found else "none"
            yield f"| `{name}` | {seed} | {' | '.join(f'{found[key]:.3f}' for key in keys)} | {clip} |"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; those of the command line where `arguments` is None."""
    known = sorted(EXAMPLES)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", nargs="*", choices=known, default=known)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every run's spec")
    parser.add_argument("--record", type=Path, help="JSON file that runs are added to, and not repeated")
    parser.add_argument("--draw", type=Path, help="SVG file for the curves")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, make_run: Callable[..., Found] = run) -> None:
    """Command line."""
    options = parse(arguments)
    runs: dict[str, dict[str, Found]] = {}
    if options.record is not None and options.record.exists():
        runs = json.loads(options.record.read_text(encoding="utf-8"))
    wanted = [(name, seed) for seed in options.seeds for name in options.algorithms]
    with tempfile.TemporaryDirectory() as directory:
        model, teacher = Path(directory) / "tiny", Path(directory) / "teacher"
        subprocess.run([sys.executable, "-m", "headrace_modelkit.presets.tiny", str(model)], check=True)
        if "distill" in options.algorithms:
            teach(model, teacher)
        for name, seed in wanted:
            if str(seed) in runs.get(name, {}):
                continue
            say(f"{name}, seed {seed}: {machine()}")
            taught = [f"trainer.reference.path={teacher}"] if name == "distill" else []
            found = make_run(name, seed, options.steps, model, [*taught, *options.set])
            check(name, found)
            runs.setdefault(name, {})[str(seed)] = found
            if options.record is not None:
                options.record.write_text(json.dumps(runs) + "\n", encoding="utf-8")
    runs = {name: runs[name] for name in (*TITLED, *sorted(set(runs) - set(TITLED))) if name in runs}
    if options.draw is not None:
        curves = {
            name: {int(seed): found["rewards"] for seed, found in seeds.items()}
            for name, seeds in runs.items()
        }
        options.draw.write_text(draw(curves), encoding="utf-8")
    say("\n".join(table(runs)))
    flat = {
        f"{name}_{key}_seed_{seed}": value
        for name, seeds in runs.items()
        for seed, found in seeds.items()
        for key, value in found.items()
        if key != "rewards"
    }
    emit("algorithms", flat)


if __name__ == "__main__":
    main()
