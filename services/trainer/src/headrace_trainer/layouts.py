"""`python -m headrace_trainer.layouts`: how a run's model would lie on GPUs, without any. A JSON object in and out.

In: `config` as OpenRun takes it, `gpu_bytes` and `host_bytes` of memory (0: a CPU), `ranks_per_host`. Out: what
`layout_on` gives, or `problem` in words. Needs the model's configuration and none of its weights.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from headrace_modelkit.errors import ModelNotReadable
from headrace_schema.openings import TrainerConfig
from pydantic import ValidationError

from headrace_trainer.backends import choose_backend
from headrace_trainer.backends.fsdp.layouts.planned import choose_layout
from headrace_trainer.backends.fsdp.resident import shares_base
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.errors import Refusal
from headrace_trainer.memory import Room, Rooms, check_host, check_rooms
from headrace_trainer.workloads import run_kind


def layout_on(config: TrainerConfig, gpu_bytes: int, host_bytes: int, ranks_per_host: int) -> dict[str, Any]:
    """`layout` with `reason` and the bytes by part on a GPU (`device`) and of the host, and what was `tried` before it.

    Raises Refusal INVALID with the table of what was tried where nothing fits, and ModelNotReadable.
    """
    backend = choose_backend(config.trainer)
    if not isinstance(backend.options, FsdpOptions):
        raise Refusal("INVALID", f"trainer.backend: {config.trainer.backend} chooses no layout; fsdp does")
    kind = run_kind(config).policies[""]
    algorithm = kind.check()
    ranks = config.trainer.ranks
    ranks_here = max(1, min(ranks, ranks_per_host))
    device = Room("GPU memory", gpu_bytes, gpu_bytes) if gpu_bytes else None
    base = False if shares_base(config, ranks, on_gpu=bool(gpu_bytes)) else None
    rooms = Rooms(Room("host memory", host_bytes, host_bytes), device, base)
    _, plan = choose_layout(config, algorithm, backend.options, ranks, ranks_per_host, rooms, kind.sizes)
    check_host(plan, rooms, ranks_here)
    check_rooms(plan, rooms)
    return {
        "layout": plan.layout,
        "reason": plan.reason,
        "saves_in_place": plan.saves_in_place,
        "device": dict(plan.device),
        "host": dict(plan.host),
        "tried": [vars(each) for each in plan.tried],
    }


def main() -> None:
    """Answers one question."""
    asked = json.load(sys.stdin)
    try:
        config = TrainerConfig.model_validate(asked["config"])
        found = layout_on(config, asked["gpu_bytes"], asked["host_bytes"], asked["ranks_per_host"])
    except Refusal as refusal:
        found = {"problem": refusal.message}
    except (ModelNotReadable, ValidationError) as error:
        found = {"problem": str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
