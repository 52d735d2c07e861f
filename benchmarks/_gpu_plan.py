"""The entries of gpu_check in their order: what each proves, what it needs, and how long it may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

GRACE_S = 10.0
"""In which a late entry ends its fleet: then it is killed. Counted to each entry."""
LENT_S = 540.0
"""In which all that one GPU can show without an engine of its own fits: a machine lent for ten minutes."""
REHEARSAL = 6
"""Times as long on a CPU, for a few slow cores."""


@dataclass(frozen=True)
class Check:
    """A function of _gpu_checks or _gpu_runs by name. `gpus`: the fewest that it needs, `needs`: a module."""

    name: str
    deadline_s: float
    proves: str
    gpus: int = 1
    needs: str = ""

    def budget_s(self, gpus: int) -> float:
        """Seconds that it may take, its end included; with 0 GPUs on a CPU."""
        return self.deadline_s * (1 if gpus else REHEARSAL) + GRACE_S


CHECKS = (
    Check(
        "basics", 45, "FSDP trains, suspends and wakes; an engine gives all memory back; a GPU is leased once"
    ),
    Check(
        "largest",
        80,
        "the largest model that fits takes the memory planned, at 0.35 of the GPU's peak",
    ),
    Check(
        "deterministic", 60, "two runs of `deterministic: true` are equal in every bit of every gradient norm"
    ),
    Check("built_in", 60, "a bf16 run with the built-in engine, in turns, whose log-probs are the trainer's"),
    Check(
        "weight_sync", 30, "GB/s of each leg that a version travels, and of `cuda_ipc` between two processes"
    ),
    Check("collocated", 150, "the same run with vLLM, which sleeps and is started once", needs="vllm"),
    Check(
        "asleep",
        240,
        "vLLM over two GPUs sleeps between its leases and is not restarted",
        gpus=2,
        needs="vllm",
    ),
    Check("broadcast", 60, "versions by NCCL between two GPUs", gpus=2),
    Check("killed_rank", 90, "a trainer group goes on after SIGKILL of one of its ranks", gpus=2),
    Check("lora", 50, "adapters are trained, published and sampled from"),
    Check("sglang", 180, "the same run with SGLang, which sleeps and is started once", needs="sglang"),
    Check("layouts", 40, "offload (one GPU) and HSDP (four) train as the plain layout does"),
    Check("out_of_memory", 30, "CUDA out of memory is known by name, and half the micro-batch goes on"),
    Check("experts", 50, "a mixture of experts, whose versions reach the engine"),
    Check("megatron", 180, "Megatron's tensor, pipeline and context parallelism", gpus=2, needs="megatron"),
    Check("two_hosts", 60, "ranks that NCCL takes for two hosts' train as those of one", gpus=2),
    Check("simulated", 120, "ManiSkill many times in one process on a GPU", needs="mani_skill"),
)


def why_not(check: Check, gpus: int, left_s: float, lacks: Callable[[str], str]) -> str:
    """Why an entry does not run; empty where it does. An entry is run only with its whole budget.

    `lacks`: why a module's entries cannot run. A rehearsal (0 GPUs) has as many processors as it takes.
    """
    if 0 < gpus < check.gpus:
        return f"it needs {check.gpus} GPUs and there {'is' if gpus == 1 else 'are'} {gpus}"
    if check.needs and (reason := lacks(check.needs)):
        return reason
    if check.budget_s(gpus) > left_s:
        return f"it may take {check.budget_s(gpus):.0f} s and {left_s:.0f} s are left; raise --limit or use --only"
    return ""


def whole_s(checks: Sequence[Check], gpus: int, lacks: Callable[[str], str]) -> float:
    """Seconds in which all entries that can run here end, if each takes all that it may."""
    return sum(check.budget_s(gpus) for check in checks if not why_not(check, gpus, float("inf"), lacks))
