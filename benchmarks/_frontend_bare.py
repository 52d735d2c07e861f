"""vLLM's front end by itself, for frontend.py: `_frontend_bare.py MODEL STREAMS SAMPLES TOKENS INTERVAL`.

Each line on standard input is a turn, whose end it tells in one line of JSON, {"tokens": sampled, "cpu_s": seconds of
this process}. Requests are those of the service's engine, and who reads their tokens counts them. Knows nothing of
Headrace, since it runs in vLLM's own environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any


async def main() -> None:
    """Command line."""
    answers = os.fdopen(os.dup(1), "w")  # vLLM prints what it likes
    os.dup2(2, 1)
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    model, streams, samples, tokens, interval = sys.argv[1], *map(int, sys.argv[2:])
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=streams,
            kv_cache_memory_bytes=2**30,
            enforce_eager=True,
            logprobs_mode="processed_logprobs",
            skip_tokenizer_init=True,
            generation_config="vllm",
            disable_log_stats=True,
            enable_chunked_prefill=False,
            max_num_batched_tokens=4096,
        )
    )
    loop = asyncio.get_running_loop()
    for turn in range(1 << 30):
        if not await loop.run_in_executor(None, sys.stdin.readline):
            break
        before = time.process_time()
        free = asyncio.Semaphore(streams)
        requests = [_answer(engine, free, turn * samples + each, tokens, interval) for each in range(samples)]
        made = sum(await asyncio.gather(*requests))
        print(json.dumps({"tokens": made, "cpu_s": time.process_time() - before}), file=answers, flush=True)
    engine.shutdown()


async def _answer(engine: Any, free: asyncio.Semaphore, number: int, tokens: int, interval: int) -> int:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=tokens,
        logprobs=0,
        ignore_eos=True,
        stop_token_ids=[1],
        flat_logprobs=True,
        seed=number,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    params.stream_interval = interval
    prompt = {"prompt_token_ids": list(range(3, 19)), "cache_salt": "one"}
    async with free:
        made = 0
        async for output in engine.generate(prompt, params, f"bare-{number}"):
            made += len(output.outputs[0].token_ids)
        return made


if __name__ == "__main__":
    asyncio.run(main())
