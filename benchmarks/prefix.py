"""What computing a group's prompt once saves in training: `python benchmarks/prefix.py`.

The same group (prompt : answer = 5 : 1, 8 answers, no two alike) goes through the trainer's own learner and backend
twice: with `trainer.shared_prefix` and without. Timed is what a step does with a settled group: packing, forward,
loss, backward; side by side, turn about, on one torch thread. The model has SmolLM2-135M's shape, or is `--model`.

Prints one JSON line with `speedup`, the ratio of the median times in fp32, `gradient_difference`, the relative L2
distance of the two gradients before clipping in fp32, and `speedup_bf16`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from _harness import emit, machine, say, table

GROUP_SIZE, PROMPT, ANSWER = 8, 100, 20
WARM_UP = 1  # torch's first forward and backward of a shape
COLUMNS = ("type", "shared", "plain", "ratio")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=5, help="measured turns of each kind and type")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of the prompt")
    parser.add_argument("--answer", type=int, default=ANSWER, help="tokens of each answer")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--model", type=Path, help="a model directory; default: SmolLM2's shape at random")
    parser.add_argument(
        "--device", default="cpu", help="torch's name of where it is computed, such as cuda:0"
    )
    options = parser.parse_args()
    import torch  # not at the top: --help must not wait for it

    torch.set_num_threads(options.threads)
    say(machine())
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        model = options.model or write_model(Path(folder))
        sizes = (options.prompt, options.answer, options.repetitions)
        times, difference = measure(model, "float32", *sizes, options.device)
        times_bf16, _ = measure(model, "bfloat16", *sizes, options.device)
    table(COLUMNS, [row("float32", times), row("bfloat16", times_bf16)])
    say(f"gradient, shared against plain, float32: relative L2 {difference:.2e}; at the end: {machine()}")
    emit(
        "prefix",
        {
            "speedup": speedup(times),
            "gradient_difference": difference,
            "speedup_bf16": speedup(times_bf16),
        },
    )


Times = dict[bool, list[float]]
"""Seconds of each turn, by whether prefixes were shared."""


def speedup(times: Times) -> float:
    """The ratio of the medians, plain over shared."""
    return median(times[False]) / median(times[True])


def row(dtype: str, times: Times) -> tuple[object, ...]:
    """The cells of a row under COLUMNS: median seconds."""
    return dtype, median(times[True]), median(times[False]), speedup(times)


def write_model(directory: Path, layers: int = 30) -> Path:
    """SmolLM2-135M's shape with random weights, with so many layers."""
    import torch
    from headrace_modelkit.loading import save_model
    from headrace_modelkit.presets.tiny import character_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = LlamaForCausalLM(shape)
    save_model(model.to(torch.bfloat16), character_tokenizer(), directory / "model")
    return directory / "model"


def measure(
    model: Path, dtype: str, prompt: int, answer: int, repetitions: int, device: str = "cpu"
) -> tuple[Times, float]:
    """The turns' times, and the relative L2 distance of the first turn's gradients."""
    import torch
    from _gradient import Accumulation, relative_l2, synthetic_group
    from headrace_trainer.group.forming import join_trainer_group

    times: Times = {True: [], False: []}
    where = torch.device(device)
    trainer_group = join_trainer_group(1, 0, 1, "", 30.0, where)
    try:
        both = {
            shared: Accumulation(model, dtype, trainer_group, GROUP_SIZE, shared=shared) for shared in times
        }
        gradients = {}
        for turn in range(WARM_UP + repetitions):
            group = synthetic_group(turn, GROUP_SIZE, (answer, answer), vocabulary=1000, given=prompt)
            order = (True, False) if turn % 2 else (False, True)
            for shared in order:
                started = time.perf_counter()
                both[shared].learn([group])
                if where.type == "cuda":
                    torch.cuda.synchronize(where)
                if turn >= WARM_UP:
                    times[shared].append(time.perf_counter() - started)
                gradient = both[shared].gradient()
                if turn == 0:
                    gradients[shared] = gradient
        return times, relative_l2(gradients[True], gradients[False])
    finally:
        trainer_group.leave()


if __name__ == "__main__":
    main()
