"""One GRPO loss and its gradient from hidden states and head; a process of its own, see `losses.py`.

    python fused_loss.py '{"path": "verl", "sequences": 4, "tokens": 2048, "vocabulary": 49152, …}'

Runs under the Python of whoever owns the path. Prints one JSON line: seconds, what the call added to resident memory
at its peak, and numbers by which the caller sees that all paths computed the same.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CLIP = 0.2
WARM_UP_TOKENS = 16
LogProbs = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def headrace(hidden_ND: Tensor, weight_VD: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
    """What the trainer's policy calls."""
    from headrace_modelkit.hidden import hidden_log_probs
    from headrace_modelkit.logprobs import Head

    found_N, entropy_N = hidden_log_probs(
        Head(weight_VD, None, 1.0, None), hidden_ND, tokens_N, 1.0, entropy=True
    )
    assert entropy_N is not None
    return found_N, entropy_N


def verl(chunk: int) -> LogProbs:
    """verl's FusedLinearForPPO. Its file alone is imported: the package's `__init__` wants ray."""
    package = importlib.util.find_spec("verl")
    assert package is not None and package.origin is not None
    file = Path(package.origin).parent / "utils" / "experimental" / "torch_functional.py"
    spec = importlib.util.spec_from_file_location("verl_torch_functional", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fused = module.FusedLinearForPPO(chunk_size=chunk)
    return lambda hidden_ND, weight_VD, tokens_N: fused(hidden_ND, weight_VD, tokens_N, 1.0)


def trl(columns: int) -> LogProbs:
    """TRL's fused head, called as GRPOTrainer's forward calls it."""
    from trl.kernels import ChunkedLogProbFunction

    def log_probs(hidden_ND: Tensor, weight_VD: Tensor, tokens_N: Tensor) -> tuple[Tensor, Tensor]:
        found = ChunkedLogProbFunction.apply(
            hidden_ND, weight_VD, None, tokens_N, 1.0, columns, None, 1.0, ("log_probs", "entropy")
        )
        return found[0], found[1]

    return log_probs


PATHS: dict[str, Callable[[], LogProbs]] = {
    "headrace": lambda: headrace,
    "verl": lambda: verl(512),  # its default
    "verl_128": lambda: verl(128),
    "trl": lambda: trl(32768),  # its constant
    "trl_2048": lambda: trl(2048),
}


def loss_of(log_probs: LogProbs, tensors: dict[str, Tensor]) -> Tensor:
    """The clipped objective's mean over tokens, at ratio 1; entropies are computed and only reported."""
    found_N, entropy_N = log_probs(tensors["hidden"], tensors["weight"], tensors["tokens"])
    ratio_N = (found_N - found_N.detach()).exp()
    advantages_N = tensors["advantages"].repeat_interleave(len(found_N) // len(tensors["advantages"]))
    clipped_N = ratio_N.clamp(1 - CLIP, 1 + CLIP) * advantages_N
    tensors["entropy"] = entropy_N.detach().mean()
    return -torch.minimum(ratio_N * advantages_N, clipped_N).mean()


def make(task: dict[str, Any], tokens: int) -> dict[str, Tensor]:
    """The tensors, the same for every path: logits with a spread of about 1.2."""
    generator = torch.Generator().manual_seed(task["seed"])
    rows, vocabulary, hidden = task["sequences"] * tokens, task["vocabulary"], task["hidden"]
    return {
        "hidden": torch.randn(rows, hidden, generator=generator).requires_grad_(),
        "weight": torch.randn(vocabulary, hidden, generator=generator).mul_(0.05).requires_grad_(),
        "tokens": torch.randint(0, vocabulary, (rows,), generator=generator),
        "advantages": torch.randn(task["sequences"], generator=generator),
    }


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (peak since the last reset)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(task: dict[str, Any]) -> dict[str, float]:
    """One loss and gradient; beforehand a small one, so that libraries are loaded, and freed memory is returned."""
    torch.set_num_threads(task["threads"])
    log_probs = PATHS[task["path"]]()
    torch.autograd.backward(loss_of(log_probs, make(task, min(WARM_UP_TOKENS, task["tokens"]))))
    tensors = make(task, task["tokens"])
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    loss = loss_of(log_probs, tensors)
    torch.autograd.backward(loss)
    seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    peak = resident("VmHWM") - before
    return {**seconds, "peak_bytes": float(peak), **fingerprint(tensors)}


def fingerprint(tensors: dict[str, Tensor]) -> dict[str, float]:
    """The mean entropy and, of both gradients, norm and direction; the loss itself is the same for any logits."""
    generator = torch.Generator().manual_seed(7)
    found = {"entropy": tensors["entropy"].item()}
    for name in ("hidden", "weight"):
        gradient = tensors[name].grad
        assert gradient is not None
        weights = torch.randn(gradient.shape, generator=generator)
        found[f"of_{name}"] = float((gradient.double() * weights).sum() / gradient.double().norm())
        found[f"norm_{name}"] = float(gradient.double().norm())
    return found


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
