"""Attention of packed rows without a mask, against a dense mask: `python benchmarks/attention.py`.

Two groups' shapes, 8,192 nodes in all: eight answers of 1,022 tokens to a prompt of 16 (`answers`), and a prompt of
7,168 tokens with eight answers of 128 (`prompt`). One layer's attention, forward and backward, with Qwen2.5-0.5B's 14
query heads and 2 key heads of 64: by segments, as the trainer computes it on this device, and by torch's
scaled_dot_product_attention under the tree's mask. On a CPU in fp32, on a GPU in bf16.

Prints one JSON line with `packed_vs_dense_time` and `packed_vs_dense_bytes`, ratios of the median seconds and of the
peaks of memory, each of the shape where segments gain less, and both of each shape. `--head` adds the errors of a bf16
model's head: `head_log_prob_error`, the mean of |difference| of log-probs to fp64, and `head_gradient_error`, relative
L2.
"""

from __future__ import annotations

import argparse
import time
import weakref
from contextlib import nullcontext
from statistics import median
from typing import TYPE_CHECKING, Any

from _harness import emit, machine, say, table

if TYPE_CHECKING:
    from headrace_trainer.learning.segments import Segments

HEADS, WIDTH = 7, 64
"""Query heads of a key head; their width."""
SHAPES = {"answers": (16, 1022, 8), "prompt": (7168, 128, 8)}
"""Tokens of the prompt, tokens of each answer, answers."""
COLUMNS = ("shape", "nodes", "packed, s", "dense, s", "time", "packed, MiB", "dense, MiB", "bytes")
MIB = 2**20


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=1, help="measured turns of each kind")
    parser.add_argument("--shrink", type=int, default=1, help="divides all lengths, for a quick look")
    parser.add_argument("--groups", type=int, default=2, help="key heads; a CPU needs half the time for one")
    parser.add_argument("--head", action="store_true", help="measure the errors of a bf16 model's head too")
    options = parser.parse_args()
    import torch  # not at the top: --help must not wait for it

    torch.set_num_threads(1)
    say(machine())
    for kind in ("packed", "dense"):
        measure(kind, of_group(32, 16, 4), options.groups)  # loads and chooses kernels
    figures: dict[str, float] = {}
    rows: list[tuple[object, ...]] = []
    for name, shape in SHAPES.items():
        prompt, answer, count = shape[0] // options.shrink or 1, shape[1] // options.shrink or 1, shape[2]
        segments = of_group(prompt, answer, count)
        found = {
            kind: [measure(kind, segments, options.groups) for _ in range(options.turns)]
            for kind in ("packed", "dense")
        }
        seconds = {kind: median(each.seconds for each in turns) for kind, turns in found.items()}
        peaks = {kind: max(each.peak for each in turns) for kind, turns in found.items()}
        figures[f"time_{name}"] = seconds["packed"] / seconds["dense"]
        figures[f"bytes_{name}"] = peaks["packed"] / peaks["dense"]
        rows.append(
            (
                name,
                segments.queries,
                seconds["packed"],
                seconds["dense"],
                figures[f"time_{name}"],
                peaks["packed"] / MIB,
                peaks["dense"] / MIB,
                figures[f"bytes_{name}"],
            )
        )
    table(COLUMNS, rows)
    worst = {
        f"packed_vs_dense_{kind}": max(figures[f"{kind}_{name}"] for name in SHAPES)
        for kind in ("time", "bytes")
    }
    emit("attention", worst | figures | (head_errors() if options.head else {}))


def of_group(prompt: int, answer: int, count: int) -> Segments:
    """One tree: a prompt with so many answers."""
    from headrace_trainer.learning.segments import Segment, Segments

    parts = [Segment(0, prompt, 0)]
    for start in range(prompt, prompt + answer * count, answer):
        parts.append(Segment(start, start + answer, start, ((0, prompt),)))
    return Segments.of(parts)


class Measured:
    """Seconds of a forward and a backward, and the most bytes that were alive beside the inputs."""

    def __init__(self, seconds: float, peak: int) -> None:
        self.seconds, self.peak = seconds, peak


def measure(kind: str, segments: Segments, groups: int) -> Measured:
    """One turn, in which a CPU's bytes are counted too: some microseconds an operation, of which there are hundreds."""
    import torch

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    placed = segments.to(device)
    torch.manual_seed(0)
    heads = [
        torch.randn(
            segments.queries, count, WIDTH, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32
        ).requires_grad_()
        for count in (HEADS * groups, groups, groups)
    ]
    if on_gpu:
        run(kind, heads, placed)  # compiles, and chooses kernels
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    counted: Any = nullcontext() if on_gpu else peak_bytes()
    start = time.perf_counter()
    with counted:
        run(kind, heads, placed)
    if on_gpu:
        torch.cuda.synchronize()
        return Measured(time.perf_counter() - start, torch.cuda.max_memory_allocated() - before)
    return Measured(time.perf_counter() - start, counted.most)


def run(kind: str, heads: list[Any], segments: Segments) -> None:
    """Forward and backward; the dense mask is made each time, as it is for each micro-batch."""
    from headrace_trainer.backends.shared.attention import attend_segments, by_mask
    from headrace_trainer.learning.segments import Segments

    query, key, value = heads
    if kind == "packed":
        found: Any = attend_segments(query, key, value, segments)
    else:
        found = by_mask(query, key, value, Segments.of(segments.parts).to(query.device), WIDTH**-0.5)
    found.backward(found.detach())
    for each in heads:
        each.grad = None


def peak_bytes() -> Any:
    """Counts the bytes of the tensors that operations make, while they are alive."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.most = self.now = 0
            self._known: set[int] = set()

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            for each in found if isinstance(found, tuple | list) else (found,):
                if isinstance(each, Tensor):
                    self._count(each.untyped_storage())
            return found

        def _count(self, storage: Any) -> None:
            key = storage._cdata
            if key in self._known:
                return
            self._known.add(key)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._release, key, storage.nbytes())

        def _release(self, key: int, size: int) -> None:
            self._known.discard(key)
            self.now -= size

    return Peak()


def head_errors() -> dict[str, float]:
    """Of a head of 32,000 words over 896 hidden units, 512 tokens, as a GPU multiplies its bf16 factors."""
    import torch
    from headrace_modelkit import logprobs
    from headrace_modelkit.hidden import hidden_log_probs
    from headrace_modelkit.logprobs import Head

    generator = torch.Generator().manual_seed(0)
    weight = (0.05 * torch.randn(32000, 896, generator=generator)).bfloat16().requires_grad_()
    hidden = torch.randn(512, 896, generator=generator).bfloat16().requires_grad_()
    tokens = torch.randint(32000, (512,), generator=generator)
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    exact = (wide[0] @ wide[1].T).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    upstream = torch.linspace(-1.0, 1.0, len(tokens))
    expected = torch.autograd.grad((exact * upstream).sum(), wide)
    before = logprobs.narrow_products
    logprobs.narrow_products = lambda *factors: all(each.dtype == torch.bfloat16 for each in factors)
    try:
        found, _ = hidden_log_probs(Head(weight, None, 1.0, None), hidden, tokens, 1.0)
        given = torch.autograd.grad((found * upstream).sum(), (hidden, weight))
    finally:
        logprobs.narrow_products = before
    pairs = list(zip(given, expected, strict=True))
    return {
        "head_log_prob_error": float((found.detach() - exact.detach()).abs().mean()),
        "head_gradient_error": max(
            float((own.double() - other).norm() / other.norm()) for own, other in pairs
        ),
    }


if __name__ == "__main__":
    main()
