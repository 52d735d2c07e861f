"""Reinforcement learning by a loop of one's own: samples, rewards that it computes itself, gradients, the next version.

    python -m headrace_modelkit.presets.tiny .headrace/models/tiny
    headrace up && python examples/own_loop/rl.py

The tiny model learns to copy three digits from the share that it got right. `--checkpoint own-sft-1a2b3c/sft` begins
from what `sft.py` has saved.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from headrace.client import Client, Datum, Training
from headrace_schema.sessions import SampledSequence
from tokenizers import Tokenizer

PROMPTS, GROUP = 32, 8


def datum(prompt: list[int], sampled: SampledSequence, advantage: float) -> Datum:
    """A sample with its advantage; the prompt's tokens do not count."""
    ids, before, count = [*prompt, *sampled.tokens], len(prompt) - 1, len(sampled.tokens)
    return Datum(
        tokens=ids[:-1],
        targets=ids[1:],
        weights=[0.0] * before + [1.0 / PROMPTS / GROUP] * count,
        advantages=[0.0] * before + [advantage] * count,
        log_probs=[0.0] * before + sampled.log_probs,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8470", help="of the coordinator")
    parser.add_argument("--model", type=Path, default=Path(".headrace/models/tiny"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", default="", help="SESSION/NAME to begin from")
    options = parser.parse_args()
    model = options.model.resolve()
    tokenizer, rng = Tokenizer.from_file(str(model / "tokenizer.json")), random.Random(0)
    spec = {"name": "own-rl", "model": {"path": str(model), "dtype": "float32"}}
    with Client(options.url) as client, Training(client, spec) as training:
        print(f"session {training.session}")
        if options.checkpoint:
            training.load(options.checkpoint, optimizer=False).result()
        for step in range(1, options.steps + 1):
            training.publish().result()
            asked = [f"{rng.randrange(1000):03d}" for _ in range(PROMPTS)]
            prompts = [tokenizer.encode(f"{digits}=").ids for digits in asked]
            calls = [training.sample(prompt, samples=GROUP, max_tokens=4) for prompt in prompts]
            data, total = [], 0.0
            for digits, prompt, call in zip(asked, prompts, calls, strict=True):
                found = call.result().sequences
                texts = [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in found]
                rewards = [sum(a == b for a, b in zip(text, digits, strict=False)) / 3 for text in texts]
                mean = sum(rewards) / GROUP
                total += mean
                data += [
                    datum(prompt, each, reward - mean)
                    for each, reward in zip(found, rewards, strict=True)
                    if each.tokens
                ]
            gradient = training.forward_backward(data, "importance_sampling")
            applied = training.optim_step(5e-3, grad_clip_norm=1.0)
            if step % 5 == 0 or step == 1:
                version = applied.result().version
                loss = gradient.result().metrics["loss:sum"]
                print(
                    f"step {step}: reward {total / PROMPTS:.3f}, loss {loss:+.4f}, version {version}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
