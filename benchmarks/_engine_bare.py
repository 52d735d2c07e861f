"""An engine by itself, for engines.py: `_engine_bare.py ENGINE MODEL REQUESTS PROMPT TOKENS DTYPE GPU`.

Loads the model and says {"start_s": …}; then each line on standard input is a turn, whose end it tells in one line
of JSON, {"tokens": sampled, "seconds": …}. What an engine prints goes to standard error. Knows nothing of Headrace,
since it runs in the engine's own environment.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CORE = 0
"""Both sides compute on this one."""
HALF = 0.4
"""Of a GPU's memory that each side takes for its engine: they share it."""
Generate = Callable[[list[list[int]]], int]
"""Answers prompts and returns how many tokens were sampled."""


@dataclass(frozen=True)
class Load:
    """What a turn generates."""

    model: str
    requests: int
    prompt: int
    tokens: int
    dtype: str
    gpu: int | None = None

    @property
    def device(self) -> str:
        """What a service is told to lease."""
        return f"cpu:{CORE}" if self.gpu is None else f"gpu:{self.gpu}"


def prompts(load: Load, turn: int) -> list[list[int]]:
    """Token ids of a turn's prompts: words of any kind, none special."""
    draw = random.Random(turn)
    return [[draw.randint(1000, 40000) for _ in range(load.prompt)] for _ in range(load.requests)]


def transformers(load: Load) -> Generate:
    """`generate` of the model, one batch."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model: Any = AutoModelForCausalLM.from_pretrained(load.model, dtype=getattr(torch, load.dtype))
    where = "cpu" if load.gpu is None else f"cuda:{load.gpu}"
    model.to(where).eval()
    # The model's own settings would cut the distribution, and stop at its end of text as the service does.
    ends = model.generation_config.eos_token_id
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}

    def answer(ids: list[list[int]]) -> int:
        given = torch.tensor(ids, device=where)
        with torch.inference_mode():
            found = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=load.tokens, **settings
            )
        return sum(_until_end(row, ends) for row in found[:, given.shape[1] :].tolist())

    return answer


def vllm(load: Load) -> Generate:
    """vLLM's `LLM`, with the settings of the service's engine."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=load.model,
        dtype=load.dtype,
        max_num_seqs=load.requests,
        max_model_len=load.prompt + load.tokens,
        enforce_eager=True,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        **({} if load.gpu is None else {"gpu_memory_utilization": HALF}),
    )
    settings = SamplingParams(temperature=1.0, max_tokens=load.tokens, logprobs=0, detokenize=False)

    def answer(ids: list[list[int]]) -> int:
        asked = [{"prompt_token_ids": each} for each in ids]
        return sum(
            len(each.outputs[0].token_ids) for each in engine.generate(asked, settings, use_tqdm=False)
        )

    return answer


ENGINES: dict[str, Callable[[Load], Generate]] = {"transformers": transformers, "vllm": vllm}


def main() -> None:
    """Command line."""
    name, model, requests, prompt, tokens, dtype, gpu = sys.argv[1:]
    number = None if gpu == "None" else int(gpu)
    load = Load(model, int(requests), int(prompt), int(tokens), dtype, number)
    if load.gpu is None:
        os.sched_setaffinity(0, {CORE})
    # Engines print what they like; the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**fields: float) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    started = time.perf_counter()
    generate = ENGINES[name](load)
    tell(start_s=time.perf_counter() - started)
    for turn, _ in enumerate(sys.stdin):
        asked = prompts(load, turn)
        started = time.perf_counter()
        sampled = generate(asked)
        tell(tokens=sampled, seconds=time.perf_counter() - started)


def _until_end(ids: list[int], ends: int | list[int] | None) -> int:
    """Tokens up to the first end of text; what follows is padding."""
    stops = {ends} if isinstance(ends, int) else set(ends or ())
    return next((at + 1 for at, token in enumerate(ids) if token in stops), len(ids))


if __name__ == "__main__":
    main()
