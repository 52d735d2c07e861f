"""The Python client of Headrace: `Client` and the resources it returns. Knows no service."""

from headrace.client.client import Client
from headrace.client.errors import HeadraceError, Problem
from headrace.client.models import (
    Certificate,
    Checkpoint,
    Counts,
    Device,
    Evaluation,
    Event,
    Instance,
    Lease,
    Leases,
    Policy,
    Run,
    Step,
    Trajectory,
)
from headrace.client.specs import load_spec

__all__ = [
    "Certificate",
    "Checkpoint",
    "Client",
    "Counts",
    "Device",
    "Evaluation",
    "Event",
    "HeadraceError",
    "Instance",
    "Lease",
    "Leases",
    "Policy",
    "Problem",
    "Run",
    "Step",
    "Trajectory",
    "load_spec",
]
