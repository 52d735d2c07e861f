"""The built-in engine with a head that drafts against itself without: `python benchmarks/drafts.py`.

A policy of twelve small layers with random weights, which is sure of its words (logits times 30); a new head learns
from its answers, and both engines then answer the same prompts, turn about, with one thread. Seconds are those that the
process had the core for. Prints one JSON line: `speedup_N`, the median over turns of the ratio of tokens/s with N rows;
`tokens_per_s_N` and `plain_tokens_per_s_N`; `tokens_per_pass_N`, tokens of a row for each pass of the policy (1 without
drafts); `acceptance_N`, accepted of drafted tokens. `--steps 0` leaves the head as it was drawn; with `--states` three
of four layers have states in place of keys, as Qwen3.5's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from _engine_bare import CORE
from _harness import emit, machine, say, table

SURE = 30.0
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 256,
    "intermediate_size": 768,
    "head_dim": 64,
}
UNROLLED, BATCH = 3, 16


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,4", help="rows at once, with commas between")
    parser.add_argument("--turns", type=int, default=3, help="measured turns of each side")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of an answer")
    parser.add_argument("--drafted", type=int, default=3, help="tokens that are drafted at once")
    parser.add_argument("--states", action="store_true", help="layers as Qwen3.5's")
    parser.add_argument("--steps", type=int, default=30, help="steps in which the head learns")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {CORE})
    say(machine())
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        figures = asyncio.run(_measure(Path(folder), options))
    say(f"at the end: {machine()}")
    emit("drafts", figures)


async def _measure(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    import torch
    from headrace_modelkit.families.draft_files import add_draft, drawn
    from headrace_modelkit.loading import load_model
    from headrace_modelkit.presets.families import write_family
    from headrace_modelkit.presets.tiny import write_tiny
    from headrace_schema.sections.generating import ModelSection
    from headrace_schema.sections.learning import DraftSection

    torch.set_num_threads(1)
    if options.states:
        kinds = [*["linear_attention"] * 3, "full_attention"] * (SHAPE["num_hidden_layers"] // 4)
        # Weights so small that rounding stays below the bound of the trial at load.
        own: dict[str, Any] = {
            "max_position_embeddings": 256,
            "initializer_range": 0.05,
            "layer_types": kinds,
        }
        write_family(folder, "qwen3_5_text", **SHAPE, **own)
    else:
        write_tiny(folder, **SHAPE)
    section, draft = ModelSection(path=str(folder), dtype="float32"), DraftSection()
    model: Any = load_model(section)
    with torch.no_grad():
        model.lm_head.weight.mul_(SURE)
    plain = await _engine(section, model, None, 0, options.rows)
    head: Any = add_draft(model, draft, section)
    head.load_state_dict(drawn(head, 0))
    _learn(model, options.steps, options.tokens)
    drafts = await _engine(section, model, draft, options.drafted, options.rows)
    figures: dict[str, float] = {}
    shown = []
    for count in map(int, options.rows.split(",")):
        rates: dict[bool, list[float]] = {True: [], False: []}
        before = vars(drafts.figures).copy()
        for turn in range(-1, options.turns):
            for drafting in (True, False) if turn % 2 else (False, True):
                started = time.process_time()
                tokens = await _answer(drafts if drafting else plain, count, options.tokens, turn + 2)
                if turn >= 0:
                    rates[drafting].append(tokens / (time.process_time() - started))
        now = vars(drafts.figures)
        new = {name: now[name] - before[name] for name in now}
        passes = (new["sampled_tokens"] - new["samples"]) / new["decode_rows"]
        ratio = median(one / other for one, other in zip(rates[True], rates[False], strict=True))
        figures |= {
            f"speedup_{count}": ratio,
            f"tokens_per_s_{count}": median(rates[True]),
            f"plain_tokens_per_s_{count}": median(rates[False]),
            f"tokens_per_pass_{count}": passes,
            f"acceptance_{count}": new["accepted_tokens"] / max(1, new["drafted_tokens"]),
        }
        shown.append((count, f"{ratio:.2f}", f"{passes:.2f}", f"{figures[f'acceptance_{count}']:.2f}"))
    table(("rows", "with drafts over without", "tokens a pass", "acceptance"), shown)
    await plain.close()
    await drafts.close()
    return figures


async def _engine(section: Any, model: Any, draft: Any, drafted: int, rows: str) -> Any:
    import torch
    from headrace_modelkit.tokenizer import load_tokenizer
    from headrace_rollout.engines import ENGINES
    from headrace_rollout.engines.base import EngineConfig, Policy
    from headrace_rollout.runs.policy_files import published_body
    from headrace_rollout.wire import weights_of

    config = EngineConfig(section, load_tokenizer(section), max(map(int, rows.split(","))), draft=draft)
    engine = ENGINES.choose("transformers", {"speculative_tokens": drafted}).build(config)
    await engine.place((), 1)
    manifest, body = published_body(model, torch.float32)
    await engine.install(Policy(1, manifest.digest), weights_of(manifest, body))
    return engine


def _learn(model: Any, steps: int, tokens: int) -> None:
    """The head alone, on answers of the policy, as a trainer does."""
    import torch
    from headrace_modelkit.families.drafts import Features
    from headrace_modelkit.logprobs import Head

    optimizer = torch.optim.AdamW(model.draft.parameters(), lr=2e-3)
    ids = torch.tensor([_prompt(number) for number in range(BATCH)])
    with torch.no_grad():
        for _ in range(tokens if steps else 0):
            ids = torch.cat([ids, torch.multinomial(model(ids).logits[:, -1].softmax(-1), 1)], 1)
        with Features(model.model, model.draft.layers) as features:
            wanted = model(ids).logits.softmax(-1)
        read, embeds = features.taken(), model.get_input_embeddings()(ids)
    for _ in range(steps):
        loss = torch.zeros(())
        for step, hidden in enumerate(model.draft.unrolled(read[:, :-1], embeds[:, 1:], UNROLLED)):
            own = model.draft.scores(hidden[:, : -1 - step].flatten(0, 1), Head.of(model)).log_softmax(-1)
            loss = loss - (wanted[:, 1 + step : -1].flatten(0, 1) * own).sum(-1).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


def _prompt(number: int) -> list[int]:
    return [3 + (number * 7 + place * 5) % 25 for place in range(8)]


async def _answer(engine: Any, rows: int, tokens: int, seed: int) -> int:
    """Sampled tokens of so many prompts' answers, all at once."""
    from headrace_rollout.engines.samples import Distribution, Group, Sample, Stream

    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    left, sampled = rows, 0

    def sink(outputs: Sequence[Any]) -> None:
        nonlocal left, sampled
        for output in outputs:
            left -= output.whole is not None
            sampled += len(output.token_ids)
        if not left:
            loop.call_soon_threadsafe(ended.set)

    stream = Stream(1, Distribution(), tokens, seed, sink, say)
    await engine.submit(stream, [Group(at, _prompt(at + BATCH * seed), [Sample(0, 1)]) for at in range(rows)])
    async with asyncio.timeout(600):
        await ended.wait()
    return sampled


if __name__ == "__main__":
    main()
