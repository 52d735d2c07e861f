"""Supervised learning by a loop of one's own: the tiny model learns to copy three digits, in about a minute.

python -m headrace_modelkit.presets.tiny .headrace/models/tiny
headrace up && python examples/own_loop/sft.py
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from headrace.client import Client, Datum, Training
from tokenizers import Tokenizer

ROWS, AHEAD = 64, 2


def datum(tokenizer: Tokenizer, end: int, digits: str) -> Datum:
    """`123=` → `123`: the answer counts, and so does its end."""
    prompt, answer = tokenizer.encode(f"{digits}=").ids, [*tokenizer.encode(digits).ids, end]
    ids = [*prompt, *answer]
    weights = [0.0] * (len(prompt) - 1) + [1.0 / ROWS / len(answer)] * len(answer)
    return Datum(tokens=ids[:-1], targets=ids[1:], weights=weights)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8470", help="of the coordinator")
    parser.add_argument("--model", type=Path, default=Path(".headrace/models/tiny"))
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    model = options.model.resolve()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    end, rng = tokenizer.token_to_id("<eos>"), random.Random(0)
    spec = {"name": "own-sft", "model": {"path": str(model), "dtype": "float32"}}
    with Client(options.url) as client, Training(client, spec) as training:
        print(f"session {training.session}")
        sent = []
        for step in range(1, options.steps + 1):
            rows = [datum(tokenizer, end, f"{rng.randrange(1000):03d}") for _ in range(ROWS)]
            sent.append((step, training.forward_backward(rows), training.optim_step(5e-3)))
            while len(sent) > (AHEAD if step < options.steps else 0):  # some calls are always on their way
                number, gradient, applied = sent.pop(0)
                applied.result()
                if number % 25 == 0:
                    print(f"step {number}: loss {gradient.result().metrics['loss:sum']:.3f}", flush=True)
        training.publish()
        asked = [f"{rng.randrange(1000):03d}" for _ in range(50)]
        prompts = [tokenizer.encode(f"{digits}=").ids for digits in asked]
        answers = [training.sample(prompt, temperature=0, max_tokens=4) for prompt in prompts]
        right = sum(
            tokenizer.decode(answer.result().sequences[0].tokens[:3], skip_special_tokens=True) == digits
            for digits, answer in zip(asked, answers, strict=True)
        )
        print(f"{right} of {len(asked)} are right; kept as {training.save('sft').result().checkpoint}")


if __name__ == "__main__":
    main()
