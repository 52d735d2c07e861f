"""Providers of containers by name; other packages publish theirs as entry points of `headrace.container_providers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_servicekit.registry import Plugin, PluginError, Registry

from headrace_containers.docker.options import DockerOptions
from headrace_containers.provider import BadSpec, Provider
from headrace_containers.remote.options import KubernetesOptions, ModalOptions, RemoteOptions

KEY = "provider"
DOCKER = Plugin(
    "headrace_containers.docker.provider:build",
    DockerOptions,
    description="containers of a Docker engine",
    modules=("docker",),
)
E2B = Plugin(
    "headrace_containers.remote.e2b:build",
    RemoteOptions,
    description="sandboxes of the service E2B",
    modules=("e2b",),
)
MODAL = Plugin(
    "headrace_containers.remote.modal:build",
    ModalOptions,
    description="sandboxes of the service Modal",
    modules=("modal",),
)
DAYTONA = Plugin(
    "headrace_containers.remote.daytona:build",
    RemoteOptions,
    description="sandboxes of the service Daytona",
    modules=("daytona",),
)
KUBERNETES = Plugin(
    "headrace_containers.remote.kubernetes:build",
    KubernetesOptions,
    description="pods of a Kubernetes cluster",
    modules=("kubernetes",),
)
PROVIDERS: Registry[Provider] = Registry(
    "headrace.container_providers",
    "provider of containers",
    KEY,
    "provider_options",
    {name: f"{__name__}:{name.upper()}" for name in ("docker", "e2b", "modal", "daytona", "kubernetes")},
)


def provider_of(name: str, options: Mapping[str, Any]) -> Provider:
    """Makes a provider. Raises EngineLost, and BadSpec: no such name, an option is wrong, a package is missing."""
    try:
        return PROVIDERS.choose(name, options).build()
    except PluginError as error:
        first = error.problems[0]
        raise BadSpec(first.key, f"{first.problem}; {first.fix}") from error
    except ImportError as error:
        raise BadSpec(
            KEY, f"{name} needs its extra: pip install 'headrace-containers[{name}]' ({error})"
        ) from error
