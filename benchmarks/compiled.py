"""What compiled layers gain a trainer: `python benchmarks/compiled.py`.

The same groups go through the trainer's own learner and backend twice: with `trainer.backend_options.compile` and
without, turn about, on one torch thread, on a CPU or `--device`. Answers have other lengths each turn, as in a run. Two
shapes: the tiny preset in fp32, and SmolLM2's with `--layers` layers in bf16.

Prints one JSON line. `SHAPE_compiled_vs_eager` is the ratio of the median seconds of a group, above 1 where compiled is
slower; `SHAPE_first_s` are the seconds of the first compiled turn, `SHAPE_later_s` those of all turns before the
measured ones (programs for other lengths are made there), `SHAPE_programs` how many graphs torch has compiled, and
`SHAPE_gradient_difference` the relative L2 distance of the first turn's gradients.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

from _harness import emit, machine, say, table

SHAPES = ("tiny", "smollm2")
SIZE, PROMPT, ANSWER = 8, 24, (16, 96)
WARM_UP = 3
"""Turns in which programs are made: for the first lengths, and for any."""
COLUMNS = ("shape", "eager, s", "compiled, s", "ratio", "first, s", "programs")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=9, help="measured turns of each kind")
    parser.add_argument("--layers", type=int, default=2, help="of SmolLM2's shape")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, choices=SHAPES, help="which of them")
    parser.add_argument("--device", default="cpu", help="where it is computed, such as cuda:0")
    options = parser.parse_args()
    import torch  # not at the top: --help must not wait for it

    torch.set_num_threads(1)
    say(machine())
    figures: dict[str, float] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        for shape in options.shapes:
            model, dtype, vocabulary = write_model(shape, Path(folder), options.layers)
            found = measure(model, dtype, vocabulary, options.turns, options.device)
            figures |= {f"{shape}_{name}": value for name, value in found.items()}
            eager, compiled = found["eager_s"], found["compiled_s"]
            rows.append((shape, eager, compiled, compiled / eager, found["first_s"], found["programs"]))
    table(COLUMNS, rows)
    say(f"at the end: {machine()}")
    emit("compiled", figures)


def write_model(shape: str, folder: Path, layers: int) -> tuple[Path, str, int]:
    """A model's directory, the type of its forward, and how many tokens to draw from."""
    if shape == "tiny":
        from headrace_modelkit.presets.tiny import write_tiny

        write_tiny(folder / shape)
        return folder / shape, "float32", 30
    import prefix

    return prefix.write_model(folder, layers), "bfloat16", 1000


def measure(model: Path, dtype: str, vocabulary: int, turns: int, device: str) -> dict[str, float]:
    """Of one shape."""
    import torch
    from _gradient import Accumulation, relative_l2, synthetic_group
    from headrace_trainer.group.forming import join_trainer_group
    from torch._dynamo.utils import counters

    where = torch.device(device)
    torch._dynamo.reset()
    counters.clear()
    times: dict[bool, list[float]] = {True: [], False: []}
    gradients = {}
    trainer_group = join_trainer_group(1, 0, 1, "", 30.0, where)
    try:
        both = {
            compiled: Accumulation(model, dtype, trainer_group, SIZE, backend_options={"compile": compiled})
            for compiled in times
        }
        for turn in range(WARM_UP + turns):
            group = synthetic_group(turn, SIZE, ANSWER, vocabulary, given=PROMPT)
            for compiled in (True, False) if turn % 2 else (False, True):
                started = time.perf_counter()
                both[compiled].learn([group])
                if where.type == "cuda":
                    torch.cuda.synchronize(where)
                times[compiled].append(time.perf_counter() - started)
                gradient = both[compiled].gradient()
                if turn == 0:
                    gradients[compiled] = gradient
            programs = counters["stats"]["unique_graphs"]
            say(
                f"turn {turn}: eager {times[False][-1]:.3f} s, compiled {times[True][-1]:.3f} s, {programs} programs"
            )
    finally:
        trainer_group.leave()
    eager, compiled_s = (median(times[kind][WARM_UP:]) for kind in (False, True))
    return {
        "compiled_vs_eager": compiled_s / eager,
        "eager_s": eager,
        "compiled_s": compiled_s,
        "first_s": times[True][0],
        "later_s": sum(times[True][:WARM_UP]),
        "programs": float(counters["stats"]["unique_graphs"]),
        "gradient_difference": relative_l2(gradients[True], gradients[False]),
    }


if __name__ == "__main__":
    main()
