"""The built-in engine's decoding against `generate` of transformers: `python benchmarks/decode.py`.

Both answer the same prompts of SmolLM2's shape with random weights, in this process, with one thread on one core, turn
about, at several numbers of rows. Seconds are those that the process had the core for, so that others who use it stop
neither side. Prints one JSON line: `built_in_vs_transformers_N`, the median over turns of the ratio of tokens/s with N
rows; `packed_vs_plain_N`, the same over an engine that packs its weights at each product and not once a version;
`tokens_per_s_N`, `plain_tokens_per_s_N` and `generate_tokens_per_s_N`, medians; `first_pass_ms`, what packing the
weights of a version adds to its first pass. `--profile` shows where the engine's thread spends its time.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from _engine_bare import CORE, Load, prompts, transformers
from _harness import emit, machine, say, table
from headrace_servicekit.memory.allocator import reuse_freed_memory

ROWS = (4, 16, 64)
GOALS = {4: 1.5, 16: 1.5, 64: 1.2}
LIMIT_S = 600.0
_VERSION = 1


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="rows at once, with commas between")
    parser.add_argument("--turns", type=int, default=5, help="measured turns of each side")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of an answer")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    parser.add_argument("--model", type=Path, help="a model directory; default: SmolLM2's shape at random")
    parser.add_argument("--profile", action="store_true", help="profile the engine's thread and end")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    reuse_freed_memory()  # as services do
    os.sched_setaffinity(0, {CORE})
    say(machine())
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        model = options.model or _random_model(Path(folder))
        rows = [int(each) for each in options.rows.split(",")]
        loads = [Load(str(model), n, options.prompt, options.tokens, options.dtype) for n in rows]
        found = asyncio.run(_measure(loads, options.turns, profile=options.profile))
    say(f"at the end: {machine()}")
    if found:
        emit("decode", found)


async def _measure(loads: Sequence[Load], turns: int, *, profile: bool) -> dict[str, float]:
    engine = await BuiltIn.of(loads[0], max(load.requests for load in loads))
    if profile:
        await engine.profile(loads[0])
        return {}
    plain = await BuiltIn.of(loads[0], max(load.requests for load in loads), packs=False)
    generate, figures, shown = transformers(loads[0]), {}, []
    figures["first_pass_ms"] = await engine.first_pass_ms(loads[0])
    for load in loads:
        rates: dict[str, list[float]] = {"ours": [], "plain": [], "theirs": []}
        for turn in range(-1, turns):
            asked = prompts(load, turn + 1)
            for side in list(rates) if turn % 2 else list(rates)[::-1]:
                started = time.process_time()
                if side == "theirs":
                    tokens = generate(asked)
                else:
                    tokens = await (engine if side == "ours" else plain).answer(asked, load.tokens)
                if turn >= 0:
                    rates[side].append(tokens / (time.process_time() - started))
        ours, before, theirs = rates.values()
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        count = load.requests
        figures |= {
            f"built_in_vs_transformers_{count}": median(ratios),
            f"packed_vs_plain_{count}": median(one / other for one, other in zip(ours, before, strict=True)),
            f"tokens_per_s_{count}": median(ours),
            f"plain_tokens_per_s_{count}": median(before),
            f"generate_tokens_per_s_{count}": median(theirs),
        }
        shown.append(
            (count, f"{median(ours):.1f}", f"{median(theirs):.1f}", f"{median(ratios):.2f}",
             f"{min(ratios):.2f} to {max(ratios):.2f}", GOALS.get(count, ""))
        )  # fmt: skip
        say(f"{count} rows: {median(ratios):.2f}; {machine()}")
    table(("rows", "built in, tokens/s", "generate, tokens/s", "ratio", "turns", "goal"), shown)
    return figures


class BuiltIn:
    """The engine with a version installed."""

    def __init__(self, engine: Any, weights: Any, digest: str) -> None:
        self._engine, self._weights, self._digest = engine, weights, digest
        self._turn = 0

    @classmethod
    async def of(cls, load: Load, rows: int, *, packs: bool = True) -> BuiltIn:
        """The built-in engine, one thread; its weights are packed once a version, or not."""
        from headrace_modelkit import products
        from headrace_modelkit.tokenizer import load_tokenizer
        from headrace_rollout.engines import ENGINES
        from headrace_rollout.engines.base import EngineConfig, Policy
        from headrace_rollout.runs.policy_files import read_policy
        from headrace_rollout.wire import weights_of
        from headrace_schema.openings import RolloutConfig
        from headrace_schema.sections.generating import ModelSection

        section = ModelSection.model_validate({"path": load.model, "dtype": load.dtype})
        config = EngineConfig(section, load_tokenizer(section), rows)
        engine = ENGINES.choose("transformers", {}).build(config)
        await engine.place((), 1)
        manifest, body = read_policy(RolloutConfig(model=section), "", "")
        weights = weights_of(manifest, body)
        with patch.object(products, "can_pack", products.can_pack if packs else lambda: False):
            await engine.install(Policy(_VERSION, manifest.digest), weights)
        return cls(engine, weights, manifest.digest)

    async def answer(self, asked: Sequence[Sequence[int]], tokens: int) -> int:
        """Sampled tokens of these prompts' answers, all at once."""
        from headrace_rollout.engines.samples import Distribution, Group, Sample, Stream

        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        left, sampled = len(asked), 0

        def sink(outputs: Sequence[Any]) -> None:
            nonlocal left, sampled
            for output in outputs:
                left -= output.whole is not None
                sampled += len(output.token_ids)
            if not left:
                loop.call_soon_threadsafe(ended.set)

        self._turn += 1
        stream = Stream(self._engine.policy.number, Distribution(), tokens, self._turn, sink, say)
        groups = [Group(number, list(ids), [Sample(0, 1)]) for number, ids in enumerate(asked)]
        await self._engine.submit(stream, groups)
        async with asyncio.timeout(LIMIT_S):
            await ended.wait()
        return sampled

    async def first_pass_ms(self, load: Load) -> float:
        """Of one token after an install, over one token later."""
        from headrace_rollout.engines.base import Policy

        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(_VERSION + 1, _VERSION + 4):
            weights = self._weights
            await self._engine.install(Policy(number, f"{self._digest}-{number}"), weights)
            for first in (True, False):
                started = time.process_time()
                await self.answer(prompts(load, 0)[:1], 1)
                times[first].append(time.process_time() - started)
        return 1e3 * (median(times[True]) - median(times[False]))

    async def profile(self, load: Load) -> None:
        """Shows what the engine's thread does in an answer."""
        await self.answer(prompts(load, 0), load.tokens)
        profiler = cProfile.Profile()
        await self._engine._call(profiler.enable)
        await self.answer(prompts(load, 1), load.tokens)
        await self._engine._call(profiler.disable)
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(35)


def _random_model(folder: Path) -> Path:
    from prefix import write_model

    return write_model(folder)


if __name__ == "__main__":
    main()
