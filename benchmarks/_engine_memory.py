"""What the built-in engine's cache takes for answers of unlike lengths, for engines.py. Measures no time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _harness import say

SHORT_ROWS = 8
LIMIT_S = 600.0


def kv_bytes_vs_needed(model: Path, dtype: str, *, long: int = 1800, short: int = 76, new: int = 32) -> float:
    """Peak of the cache over the peak of what the running answers' tokens need.

    One answer has `long` tokens and SHORT_ROWS have `short`, prompts included; `new` of each are sampled.
    """
    taken, needed = asyncio.run(_mixed(model, dtype, long, short, new))
    say(f"cache: at most {taken / 2**20:.1f} MiB for at most {needed / 2**20:.1f} MiB of tokens")
    return taken / needed


async def _mixed(model: Path, dtype: str, long: int, short: int, new: int) -> tuple[int, int]:
    from headrace_modelkit.tokenizer import load_tokenizer
    from headrace_rollout.engines import ENGINES as BUILT_IN
    from headrace_rollout.engines.base import EngineConfig, Policy
    from headrace_rollout.engines.samples import Distribution, Group, Sample, SlotKey, Stream
    from headrace_rollout.engines.transformers.engine import TransformersEngine
    from headrace_rollout.runs.policy_files import read_policy
    from headrace_rollout.wire import weights_of
    from headrace_schema.openings import RolloutConfig
    from headrace_schema.sections.generating import ModelSection

    section = ModelSection.model_validate({"path": str(model), "dtype": dtype})
    engine = BUILT_IN.choose("transformers", {}).build(
        EngineConfig(section, load_tokenizer(section), SHORT_ROWS + 1)
    )
    assert isinstance(engine, TransformersEngine)  # No other engine says what its cache takes.
    manifest, body = read_policy(RolloutConfig(model=section), "", "")
    await engine.install(Policy(1, manifest.digest), weights_of(manifest, body))
    lengths = {SlotKey(0, 0): long - new} | {SlotKey(row, 0): short - new for row in range(1, SHORT_ROWS + 1)}
    groups = [Group(key.prompt_ordinal, [1000] * length, [Sample(0, 1)]) for key, length in lengths.items()]
    peak, loop, ended = {"taken": 0, "needed": 0}, asyncio.get_running_loop(), asyncio.Event()

    def sink(outputs: Sequence[Any]) -> None:
        for output in outputs:
            lengths[output.key] += len(output.token_ids)
        peak["taken"] = max(peak["taken"], engine.kv_bytes)
        peak["needed"] = max(peak["needed"], sum(lengths.values()) * engine.kv_token_bytes)
        for output in outputs:
            if output.whole is not None:
                del lengths[output.key]
        if not lengths:
            loop.call_soon_threadsafe(ended.set)

    stream = Stream(1, Distribution(), new, 3, sink, say, chunk_tokens=1)
    await engine.submit(stream, groups)
    async with asyncio.timeout(LIMIT_S):
        await ended.wait()
    await engine.close()
    return peak["taken"], peak["needed"]
