"""Mamba-2 layers, as transformers 5.23 has them in Nemotron-H and Zamba 2."""

from __future__ import annotations

import sys
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

_STEP = "mamba2_selective_state_update"


def bound_steps(model: nn.Module) -> None:
    """Bounds the time step of a pass over one token as passes over several are bounded.

    transformers leaves the bound out there, so that sampled log-probs would be up to 0.1 nats from those of a whole
    sequence. Raises ValueError where a model of this process has another bound.
    """
    for module in model.modules():
        least = float(getattr(module, "time_step_limit", (0.0,))[0] or 0.0)
        modeling: Any = sys.modules[type(module).__module__]
        own = getattr(modeling, _STEP, None)
        if not least or own is None:
            continue
        bound = getattr(own, "least", None)
        if bound not in (None, least):
            raise ValueError(f"time_step_min is {least}, and {bound} in another model of this process")
        if bound is None:
            setattr(modeling, _STEP, _bounded(own, least))


def _bounded(own: Any, least: float) -> Any:
    def step(
        state: Tensor,
        hidden: Tensor,
        dt: Tensor,
        *others: Any,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        **more: Any,
    ) -> Any:
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        bounded = (F.softplus(dt) if dt_softplus else dt).clamp(min=least)
        return own(state, hidden, bounded, *others, dt_bias=None, dt_softplus=False, **more)

    step.least = least  # type: ignore[attr-defined]
    return step
