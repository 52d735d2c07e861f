"""Keeps a core busy with one stage's work whenever nothing else wants it: `python _beside.py STAGE MODEL CORE`.

`streaming.py` runs one for each side beside a run that waits for its batch, so that stages are timed while the other
core does the other stage's work. The scheduling class SCHED_IDLE gives the run's own processes their core at once.
Knows no services.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROWS, LONG = 16, 64
"""Answers of a pass, and tokens of each: micro_batch_tokens together."""
STAGES = ("generate", "learn")


@contextmanager
def beside(model: Path, cores: dict[str, int]) -> Iterator[None]:
    """Runs each stage's work of `cores` on its core meanwhile; RuntimeError when one ends by itself."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(_process(stage, model, core)) for stage, core in sorted(cores.items())
        ]
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("what should keep a core busy has ended; its words are above")
        yield
        if any(process.poll() is not None for process in processes):
            raise RuntimeError("what should keep a core busy has ended meanwhile; its words are above")


@contextmanager
def _process(stage: str, model: Path, core: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, stage, str(model), str(core)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Works until it is killed."""
    stage, directory, core = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # Not at the top: who starts this process imports the module too.
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens_BT = torch.randint(1, model.config.vocab_size, (ROWS, LONG))
    work = {"generate": _generate, "learn": _learn}[stage]
    work(model, tokens_BT)
    print("ready", flush=True)
    while True:
        work(model, tokens_BT)


def _generate(model: Any, tokens_BT: Any) -> None:
    import torch

    with torch.no_grad():
        model.generate(tokens_BT[:, :1], max_new_tokens=LONG, do_sample=True, eos_token_id=None)


def _learn(model: Any, tokens_BT: Any) -> None:
    model(input_ids=tokens_BT, labels=tokens_BT).loss.backward()
    model.zero_grad()


if __name__ == "__main__":
    main()
