"""Options of remote containers."""

from __future__ import annotations

from headrace_servicekit.registry import Options
from pydantic import Field, PositiveFloat


class RemoteOptions(Options):
    """What every provider of remote containers may be told."""

    unheld: list[str] = Field(
        default_factory=list,
        description="limits, such as limits.processes, that may be the service's own where it cannot hold the spec's",
    )
    timeout_s: PositiveFloat = Field(300.0, description="seconds in which a container has to be ready")


class ModalOptions(RemoteOptions):
    """Options of the provider `modal`."""

    app: str = Field(
        "headrace", description="app of Modal whose sandboxes they are; made where it is missing"
    )


class KubernetesOptions(RemoteOptions):
    """Options of the provider `kubernetes`."""

    namespace: str = Field("headrace-containers", description="namespace of the pods, which has to be there")
    enforces_policies: bool = Field(
        False,
        description="whether the cluster's network enforces NetworkPolicy, which no pod can be sure of; has to be said",
    )
    runtime_class: str = Field(
        "", description="runtime class of the pods, such as gvisor; empty: the cluster's"
    )
