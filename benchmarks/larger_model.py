"""A run of a larger model for real: `python benchmarks/larger_model.py [--shape qwen2.5-0.5b] [--engine vllm]`.

Three whole steps of a model of a published shape with random weights: fp32 masters, bf16 forward, published versions
of a gigabyte, through a fleet that `headrace up` starts on two cores, in turns. Groups are small and answers short:
what is large is the model, and with it messages, snapshots, memory plans, publications and what deadlines wait for.

Prints one JSON line: seconds of the run, of its first and last step and of the last one's stages; the peaks of each
kind of process (`host_peak_*_bytes`, a shared page by its share); what the engine said of its tokens against the
trainer (`worst_mismatch_kl`). With `--gpus N` on so many GPUs, with their peaks by process and what a sleeping engine
keeps (`engine_asleep_bytes`).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from _harness import emit, machine, say

SHAPES = ("qwen2.5-small", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-moe-tiny")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b", help="the model's shape")
    parser.add_argument("--engine", default="transformers", help="transformers, vllm or sglang")
    parser.add_argument("--steps", type=int, default=3, help="steps of the run")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of the fleet; default: two CPU slots")
    parser.add_argument(
        "--model", type=Path, help="a directory with the model; default: made below the temporary"
    )
    options = parser.parse_args()
    from _run_at_size import Size, run, write_model

    size = Size(options.shape, options.engine, options.steps, gpus=options.gpus)
    say(machine())
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        device = "cuda:0" if options.gpus else "cpu"
        model = options.model or write_model(options.shape, Path(folder) / "model", device=device)
        figures = run(size, model)
    for name, value in sorted(figures.items()):
        say(f"{name:32} {value:.6g}")
    say(f"at the end: {machine()}")
    emit("larger_model", figures)


if __name__ == "__main__":
    main()
