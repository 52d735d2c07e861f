"""What a step costs through a session's calls: `python benchmarks/session.py`.

The same work twice on one fleet: rows of copied digits by a supervised run, and by a loop over a session, which sends a
step while another one is computed; both with the model in turns. Prints one JSON line: `step_overhead_vs_run` (median
seconds of the loop's steps over the run's) and both sides. With `--rl` the work is a GRPO step of a run and of
a loop that samples, learns and publishes: `rl_step_overhead_vs_run`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from _harness import emit, machine, say
from headrace.client import Datum, Training
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integration_tests"))

from harness.fleet import Fleet  # noqa: E402
from harness.processes import run_python  # noqa: E402
from harness.specs import small_spec  # noqa: E402

SETTLED, AHEAD, RATE = 5, 2, 1e-3
PROMPTS, GROUP, NEW_TOKENS = 16, 8, 16
SLOW_RATE = 1e-7
CHECKPOINT = {"interval_steps": 1000}
EQUAL_WORK = {
    "optimizer": {"lr": SLOW_RATE},
    "trainer": {"warmup": {"steps": 0}},
    "reward": {"scorers": [{"name": "length", "options": {"target": 1, "limit": NEW_TOKENS + 1}}]},
    "checkpoint": CHECKPOINT,
}
"""With `--rl` the model stays as it is, so that both sides have answers of one length; no group has equal rewards."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="of each side")
    parser.add_argument("--rows", type=int, default=256, help="of a supervised step")
    parser.add_argument("--turns", type=int, default=2, help="runs of each side")
    parser.add_argument("--rl", action="store_true", help="steps that sample, too")
    options = parser.parse_args()
    say(machine())
    sides: dict[str, list[float]] = {name: [] for name in ("run", "loop", "rl_run", "rl_loop")}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        run_python("-m", "headrace_modelkit.presets.tiny", model)
        with Fleet(Path(folder) / "fleet", "--simulator", "0") as fleet:
            for _ in range(options.turns):
                sides["run"] += _run(fleet, model, options.steps, options.rows)
                sides["loop"] += _loop(fleet, model, options.steps, options.rows)
                if options.rl:
                    sides["rl_run"] += _rl_run(fleet, model, options.steps)
                    sides["rl_loop"] += _rl_loop(fleet, model, options.steps)
                say(", ".join(f"{side} {median(found):.4f} s" for side, found in sides.items() if found))
    say(f"at the end: {machine()}")
    figures = {"step_overhead_vs_run": median(sides["loop"]) / median(sides["run"])}
    if options.rl:
        figures["rl_step_overhead_vs_run"] = median(sides["rl_loop"]) / median(sides["rl_run"])
    emit("session", figures | {f"{side}_s": median(found) for side, found in sides.items() if found})


def _section(model: Path) -> dict[str, str]:
    return {"path": str(model), "dtype": "float32"}


def _run(fleet: Fleet, model: Path, steps: int, rows: int) -> list[float]:
    spec = {
        "workflow": "supervised",
        "steps": steps,
        "model": _section(model),
        "data": {"source": "copy_digits", "options": {"digits": 4}, "prompt": {"chat": False}},
        "algorithm": {"prompts_per_step": rows},
        "optimizer": {"lr": RATE},
        "export": False,
    }
    run = fleet.succeed(fleet.submit(spec), timeout_s=900)
    return [float(step.wall_s) for step in fleet.client.metrics(run.id)][SETTLED:]


def _loop(fleet: Fleet, model: Path, steps: int, rows: int) -> list[float]:
    tokenizer, rng = Tokenizer.from_file(str(model / "tokenizer.json")), random.Random(0)
    end, ended = tokenizer.token_to_id("<eos>"), []
    assert end is not None
    with Training(fleet.client, {"model": _section(model), "export": False}) as training:
        sent = []
        for step in range(steps):
            data = []
            for _ in range(rows):
                digits = f"{rng.randrange(10_000):04d}"
                ids = [*tokenizer.encode(f"{digits}={digits}").ids, end]
                weights = [0.0] * 4 + [1.0 / (5 * rows)] * 5
                data.append(Datum(tokens=ids[:-1], targets=ids[1:], weights=weights))
            training.forward_backward(data)
            sent.append(training.optim_step(RATE, grad_clip_norm=1.0))
            while len(sent) > (AHEAD if step < steps - 1 else 0):
                sent.pop(0).result(300)
                ended.append(time.monotonic())
    return [after - before for before, after in pairwise(ended)][SETTLED:]


def _rl_run(fleet: Fleet, model: Path, steps: int) -> list[float]:
    spec = small_spec(
        model,
        steps=steps,
        algorithm={"prompts_per_step": PROMPTS, "group_size": GROUP},
        sampling={"max_new_tokens": NEW_TOKENS},
        rollout={"max_concurrency": PROMPTS * GROUP},
        placement={"mode": "collocated"},
        data__heldout=0,
        **EQUAL_WORK,
    )
    run = fleet.succeed(fleet.submit(spec), timeout_s=900)
    _say_tokens(fleet, run.id)
    return [float(step.wall_s) for step in fleet.client.metrics(run.id)][SETTLED:]


def _say_tokens(fleet: Fleet, run: str) -> None:
    tokens = [step.tokens for step in fleet.client.metrics(run)]
    say(f"{run}: {sum(tokens) / len(tokens):.0f} tokens learned a step")


def _rl_loop(fleet: Fleet, model: Path, steps: int) -> list[float]:
    tokenizer, rng = Tokenizer.from_file(str(model / "tokenizer.json")), random.Random(0)
    rollout = {"max_concurrency": PROMPTS * GROUP}
    spec = {"model": _section(model), "export": False, "rollout": rollout, "checkpoint": CHECKPOINT}
    ended = []
    with Training(fleet.client, spec) as training:
        for _ in range(steps):
            prompts = [tokenizer.encode(f"{rng.randrange(1000):03d}=").ids for _ in range(PROMPTS)]
            calls = [training.sample(each, samples=GROUP, max_tokens=NEW_TOKENS) for each in prompts]
            data = []
            for prompt, call in zip(prompts, calls, strict=True):
                for each in call.result(300).sequences:
                    ids, before = [*prompt, *each.tokens], [0.0] * (len(prompt) - 1)
                    advantages = before + [rng.gauss(0, 1)] * len(each.tokens)
                    weights = before + [1.0 / (PROMPTS * GROUP)] * len(each.tokens)
                    data.append(
                        Datum(
                            tokens=ids[:-1],
                            targets=ids[1:],
                            weights=weights,
                            advantages=advantages,
                            log_probs=before + each.log_probs,
                        )
                    )
            training.forward_backward(data, "importance_sampling")
            training.optim_step(SLOW_RATE, grad_clip_norm=1.0)
            training.publish().result(300)
            ended.append(time.monotonic())
        _say_tokens(fleet, training.session)
    return [after - before for before, after in pairwise(ended)][SETTLED:]


if __name__ == "__main__":
    main()
