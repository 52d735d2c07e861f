"""Cases of training backends, each walked by a group of processes: see `backend_ranks.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rank_processes import RankProcess, end
from safetensors.torch import load_file

WALK_S = 300.0
ROUTED = {"routing_replay": True, "balance_loss_coef": 0.3}


def walk_cases(
    folder: Path, ranks: int, cases: dict[str, dict[str, Any]], start: Callable[..., Any] = RankProcess
) -> dict[str, SimpleNamespace]:
    """Walks through cases with so many processes, started by `start`; figures and tensors by case."""
    job = folder / f"{'-'.join(cases)[:99]}-{ranks}.job"
    listed = [{"name": name, **case} for name, case in cases.items()]
    job.write_text(json.dumps({"ranks": ranks, "folder": str(folder), "cases": listed}))
    children = [start("backend_ranks.py", str(job), str(rank)) for rank in range(ranks)]
    try:
        assert [child.wait(WALK_S) for child in children] == [0] * ranks
    finally:
        end(children)
    return {
        name: SimpleNamespace(
            **json.loads((folder / f"{name}.json").read_text()),
            tensors=load_file(folder / f"{name}.safetensors"),
            file=str(folder / f"{name}.safetensors"),
        )
        for name in cases
    }


def config(
    model: Path,
    ranks: int = 1,
    options: dict | None = None,
    dtype: str = "float32",
    *,
    backend: str = "megatron",
    routed: bool = False,
    **trainer: Any,
) -> dict[str, Any]:
    """What OpenRun tells a trainer: `options` are the backend's; without any it is fsdp's with its own.

    `routed`: the routes of trajectories are replayed, beside a load-balance loss.
    """
    chosen = {} if options is None else {"backend": backend, "backend_options": options}
    return {
        "model": {"path": str(model), "dtype": dtype},
        "algorithm": {
            "group_size": 4,
            "prompts_per_step": 4,
            "options": {"kl_loss_coef": 0.3, "entropy_coef": 0.1, **(ROUTED if routed else {})},
        },
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
        "trainer": {"micro_batch_tokens": 512, "ranks": ranks, **chosen, **trainer},
        "sampling": {"temperature": 0.7},
        "checkpoint": {"keep": 2},
        "seed": 1,
        "steps": 10,
    }


def part(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Those of a kind, without its name before theirs."""
    return {
        name.removeprefix(f"{kind}/"): value for name, value in tensors.items() if name.startswith(f"{kind}/")
    }
