"""What streaming saves: `python benchmarks/streaming.py`.

A real fleet (`headrace up`) runs the same spec twice: with `grpo`, whose groups are learned from while others are
still generated, and with the same algorithm behind a batch barrier (`waiting_plugin`), which waits for the last
answer. Rollout and trainer hold one core each; seeds, prompts and answers are the same, the learning rate is too
small to move a weight. Answers end by themselves: an untrained model draws its end token about once in as many
tokens as its vocabulary has, so lengths spread from 1 to the limit of 96.

Prints one JSON line with `overlap_share` = (T_wait - T_stream) / (T_wait - T_ideal), the median over the measured
steps, with its spread over the repetitions (`overlap_share_least`, `_most`: of a fleet's median). T_ideal is the
pipeline's bound from the waiting step's stage times, fill, drain and commit included, on cores that slow each other
down (`_pipeline.ideal_wall`): a third run waits for its batch while the core of the side that has nothing to do does
that side's work at the lowest priority (`_beside.py`); its stages over those of the run alone are `generate_beside`
and `learn_beside`. `overlap_share_alone`: against the bound of cores that do not. Further `gradient_difference_fp32`
and `_bf16`, the relative L2 distance of the pre-clip gradients of streamed and batched accumulation, and the medians
that the share comes from.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from _beside import beside
from _harness import CoreUse, Fleet, emit, machine, say, table
from _pipeline import ALONE, Contention, StepTimes, ideal_wall, overlap_share, read_steps

WAITING, STREAMED = "grpo_waiting", "grpo"
PLUGIN = Path(__file__).with_name("waiting_plugin")
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=.,:;?!"
VOCABULARY = len(CHARACTERS) + 3
GROUPS, GROUP_SIZE, LONGEST, PROMPT = 16, 4, 96, 12
RUN_S, LOOK_S = 600.0, 0.3
WARM_UP_STEPS = 1  # torch's first forward and backward in a process


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--turns", type=int, default=3, help="fleets to start, each for a waiting and a streamed run"
    )
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a run")
    parser.add_argument("--together", type=int, default=16, help="answers decoded together")
    parser.add_argument("--width", type=int, default=384, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=6, help="layers of the model")
    options = parser.parse_args()
    say(machine())
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        model, prompts = Path(folder) / "model", Path(folder) / "prompts.jsonl"
        write_model(model, options.width, options.layers)
        write_prompts(prompts, GROUPS * (options.steps + WARM_UP_STEPS))
        differences = {name: difference(model, dtype) for name, dtype in DTYPES.items()}
        spec = make_spec(model, prompts, options.steps + WARM_UP_STEPS, options.together)
        turns = [measure(spec, model, flipped=index % 2 == 1) for index in range(options.turns)]
    figures = summarise(turns)
    say(f"at the end: {machine()}")
    emit("streaming", {"overlap_share": figures.pop("overlap_share"), **differences, **figures})


DTYPES = {"gradient_difference_fp32": "float32", "gradient_difference_bf16": "bfloat16"}
Steps = tuple[StepTimes, StepTimes, StepTimes]
"""One step of the run that waits, of the same while the other core works too, and of the streamed one."""


def difference(model: Path, dtype: str) -> float:
    """Relative difference of the gradients of a streamed and a batched step, at the workload's sizes."""
    # Not at the top: --help must not wait for torch.
    import torch
    from _gradient import gradient_difference

    torch.set_num_threads(1)
    found = gradient_difference(model, VOCABULARY, dtype, groups=GROUPS, size=GROUP_SIZE, longest=LONGEST)
    say(f"gradient, streamed against one batch, {dtype}: relative L2 {found:.2e}")
    return found


def write_model(directory: Path, width: int, layers: int) -> None:
    """The tiny preset's Qwen3, wide enough that compute dominates, with random weights."""
    from headrace_modelkit.loading import save_model
    from headrace_modelkit.presets.tiny import character_tokenizer

    save_model(wide_model(VOCABULARY, width, layers), character_tokenizer(CHARACTERS), directory)


def wide_model(vocabulary: int, width: int, layers: int, key_heads: int | None = None) -> Any:
    """The tiny preset's Qwen3 of this width, with heads of 64 and as many of keys unless said; says its size."""
    from headrace_modelkit.presets.tiny import tiny_model

    model = tiny_model(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=key_heads or width // 64,
        head_dim=64,
    )
    say(f"model: {sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} million parameters, fp32")
    return model


def write_prompts(path: Path, count: int, length: int = PROMPT) -> None:
    """Random prompts of so many tokens, a group each."""
    rng = random.Random(0)
    rows = [{"question": "".join(rng.choices(CHARACTERS, k=length)), "answer": ""} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_spec(model: Path, prompts: Path, steps: int, together: int) -> dict[str, Any]:
    """The run; only `algorithm.name` differs between the two."""
    return {
        "steps": steps,
        "seed": 7,
        "export": False,
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"source": "jsonl", "options": {"path": str(prompts)}, "prompt": {"chat": False}},
        "sampling": {"max_new_tokens": LONGEST},
        "algorithm": {"group_size": GROUP_SIZE, "prompts_per_step": GROUPS},
        "optimizer": {"lr": 1e-12},
        "trainer": {"micro_batch_tokens": 1024},
        "rollout": {"max_concurrency": together},
        # Any reward that differs inside a group will do: equal rewards carry no gradient.
        "reward": {"scorers": [{"name": "length", "options": {"target": 0, "limit": LONGEST + 1}}]},
        "placement": {"mode": "disaggregated", "rollout": ["cpu:0"], "trainer": ["cpu:1"]},
        "checkpoint": {"enabled": False},
    }


def measure(spec: dict[str, Any], model: Path, *, flipped: bool) -> list[Steps]:
    """One fleet, one run of each kind; the measured steps."""
    with Fleet("--devices", "cpu:0,cpu:1", "--simulator", "0", environment=with_plugin()) as fleet:

        def made(name: str) -> list[StepTimes]:
            return run(fleet, {**spec, "algorithm": {**spec["algorithm"], "name": name}})

        def busy() -> list[StepTimes]:
            with beside(model, {"generate": 0, "learn": 1}):
                return made(WAITING)

        kinds: list[Callable[[], list[StepTimes]]] = [lambda: made(WAITING), busy, lambda: made(STREAMED)]
        order = (2, 1, 0) if flipped else (0, 1, 2)
        found = {index: kinds[index]() for index in order}
    steps = list(zip(found[0], found[1], found[2], strict=True))[WARM_UP_STEPS:]
    for waiting, contended, streamed in steps:
        check_same_work(waiting, contended)
        check_same_work(waiting, streamed)
    return steps


def with_plugin() -> dict[str, str]:
    """The environment in which services find the waiting algorithm by its entry point."""
    path = [str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


def run(fleet: Fleet, spec: dict[str, Any]) -> list[StepTimes]:
    """The steps of a finished run."""
    from headrace.client import Client

    used = {kind: CoreUse(fleet.process(kind)) for kind in ("rollout", "trainer", "coordinator", "reward")}
    deadline = time.monotonic() + RUN_S
    with Client(fleet.url, fleet.token) as client:
        done = client.submit(spec)
        while not done.ended and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            for process in used.values():
                process.look()
            done = client.get(done.id)
    show(spec["algorithm"]["name"], used)
    if done.state != "SUCCEEDED":
        raise RuntimeError(f"{done.name} is {done.state}: {done.reason}")
    steps = read_steps(event for event in asyncio.run(events(fleet.store_url)) if event.get("run") == done.id)
    if len(steps) != spec["steps"]:
        raise RuntimeError(
            f"the event log tells of {len(steps)} of {spec['steps']} steps; ask for fewer a run"
        )
    return steps


def show(name: str, used: dict[str, CoreUse]) -> None:
    """Says who ran, and who had to wait for a core: streaming keeps all cores busy, so others disturb it most."""
    rows = [(kind, *use.seconds) for kind, use in used.items()]
    say(
        f"{name}: "
        + ", ".join(f"{kind} ran {ran:.1f} s (waited {waited:.1f} s)" for kind, ran, waited in rows)
    )


async def events(store_url: str) -> list[dict[str, Any]]:
    """The coordinator's event log since its last snapshot; the times of slots and groups are nowhere else."""
    from headrace_coordinator.store.redis_store import RedisStore

    store = RedisStore(store_url)
    try:
        return [json.loads(payload) for _, payload in (await store.load()).events]
    finally:
        await store.close()


def check_same_work(waiting: StepTimes, streamed: StepTimes) -> None:
    """RuntimeError unless both made the same answers; rounding may end one or two elsewhere."""
    differ = sum(streamed.lengths.get(slot) != length for slot, length in waiting.lengths.items())
    if differ > len(waiting.lengths) * 0.05:
        raise RuntimeError(
            f"step {waiting.step}: {differ} answers differ in length, so the times do not compare"
        )


def summarise(turns: list[list[Steps]]) -> dict[str, float]:
    """Medians over the steps; each step goes to the reader."""
    commit_s = median(streamed.commit for turn in turns for _, _, streamed in turn)
    turns = [[(w.waited(commit_s), b.waited(commit_s), s) for w, b, s in turn] for turn in turns]
    steps = [each for turn in turns for each in turn]
    contention = Contention.of([waiting for waiting, _, _ in steps], [busy for _, busy, _ in steps])
    rows = [list(row(waiting, streamed, contention)) for waiting, _, streamed in steps]
    lengths = sorted(length for waiting, _, _ in steps for length in waiting.lengths.values())
    say(f"answers: {lengths[0]} to {lengths[-1]} tokens, mean {sum(lengths) / len(lengths):.1f}")
    say(
        f"beside the other stage's work generating takes {contention.generate:.2f} times as long, learning "
        f"{contention.learn:.2f} times"
    )
    table(COLUMNS, rows)
    columns = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    names = {"overlap_share": "share", "wait_s": "wait", "stream_s": "stream", "ideal_s": "ideal"}
    figures = {name: median(columns[column]) for name, column in names.items()}
    by_turn = [median(share(w, s, contention) for w, _, s in turn) for turn in turns]
    return {
        **figures,
        "overlap_share_least": min(by_turn),
        "overlap_share_most": max(by_turn),
        "overlap_share_alone": median(share(w, s, ALONE) for w, _, s in steps),
        "generate_beside": contention.generate,
        "learn_beside": contention.learn,
    }


def share(waiting: StepTimes, streamed: StepTimes, contention: Contention) -> float:
    """Of one step."""
    return overlap_share(waiting.wall, streamed.wall, ideal_wall(waiting, contention))


COLUMNS = (
    "wait",
    "generate",
    "learn",
    "commit",
    "stream",
    "its generate",
    "its drain",
    "its commit",
    "ideal",
    "share",
    "alone",
)


def row(waiting: StepTimes, streamed: StepTimes, contention: Contention) -> Iterator[float]:
    """The cells of a row under COLUMNS: seconds, and one share."""
    yield from (waiting.wall, waiting.generate, waiting.drain, waiting.commit)
    yield from (streamed.wall, streamed.generate, streamed.drain, streamed.commit)
    yield from (
        ideal_wall(waiting, contention),
        share(waiting, streamed, contention),
        share(waiting, streamed, ALONE),
    )


if __name__ == "__main__":
    main()
