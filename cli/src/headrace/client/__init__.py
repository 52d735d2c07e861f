"""The Python client of Headrace: `Client` and the resources it returns. Knows no service.

Names load when they are first used, so that `headrace --help` does not wait for an HTTP library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.client.client import Client
    from headrace.client.errors import HeadraceError, Problem
    from headrace.client.frames import frame, live, plot
    from headrace.client.models import (
        Certificate,
        Checkpoint,
        Comparison,
        Counts,
        Device,
        Evaluation,
        EvaluationRun,
        Event,
        Instance,
        Lease,
        Leases,
        Policy,
        Run,
        Step,
        Trajectory,
        Video,
    )
    from headrace.client.specs import fork_spec, load_spec, load_specs
    from headrace.client.training import Training
    from headrace.client.workflow import Workflow
    from headrace_schema.sessions import Datum

__all__ = [
    "Certificate",
    "Checkpoint",
    "Client",
    "Comparison",
    "Counts",
    "Datum",
    "Device",
    "Evaluation",
    "EvaluationRun",
    "Event",
    "HeadraceError",
    "Instance",
    "Lease",
    "Leases",
    "Policy",
    "Problem",
    "Run",
    "Step",
    "Training",
    "Trajectory",
    "Video",
    "Workflow",
    "fork_spec",
    "frame",
    "live",
    "load_spec",
    "load_specs",
    "plot",
]

_ELSEWHERE = {
    "Client": "client",
    "HeadraceError": "errors",
    "Problem": "errors",
    "Datum": "training",
    "Training": "training",
    "Workflow": "workflow",
    "fork_spec": "specs",
    "frame": "frames",
    "live": "frames",
    "load_spec": "specs",
    "load_specs": "specs",
    "plot": "frames",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'models')}"), name)
