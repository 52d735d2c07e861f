"""What megatron-core 0.16 needs in order to run without a GPU: it asks CUDA for its device and its random numbers.

Applied only where CUDA is not available; on a GPU nothing here runs. Each patch says who calls what it replaces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_applied = False


def run_without_gpu() -> None:
    """Patches torch.cuda and Megatron's random numbers, once in a process; does nothing where there is a GPU."""
    global _applied
    if _applied or torch.cuda.is_available():
        return
    from megatron.core.tensor_parallel import random

    cuda: Any = torch.cuda
    # tensor_parallel.mappings, .layers, p2p_communication and the rotary embedding allocate on "the current device".
    cuda.current_device = lambda: torch.device("cpu")
    # p2p_communication waits for the device after a batch of messages; on the CPU they have come by then.
    cuda.synchronize = lambda device=None: None
    # The tracker of random states forks what dropout and recomputation draw from: the CPU's generator here.
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.manual_seed = _seed
    random._get_cuda_rng_state = _state
    random._set_cuda_rng_state = _set_state
    _applied = True


def _seed(seed: int) -> None:
    torch.manual_seed(seed)


def _state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> Tensor:
    return torch.get_rng_state()


def _set_state(state: Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)
