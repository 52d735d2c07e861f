"""Training backends by name. Importing this loads no torch; building one does."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from headrace_servicekit.registry import Chosen, PluginError, Registry

from headrace_trainer.errors import refused

if TYPE_CHECKING:
    from headrace_schema.openings import TrainerConfig
    from headrace_schema.sections.learning import TrainerSection

    from headrace_trainer.algorithms._base import Algorithm
    from headrace_trainer.backends._base import Backend
    from headrace_trainer.group.group import TrainerGroup

BACKENDS: Registry[Backend] = Registry(
    "headrace.backends",
    "backend",
    "trainer.backend",
    "trainer.backend_options",
    {
        "fsdp": "headrace_trainer.backends.plugins:FSDP",
        "megatron": "headrace_trainer.backends.plugins:MEGATRON",
    },
)

_MODULES = {"megatron": ("megatron", "megatron.core")}
"""What must be importable for a backend that is an extra of this package."""


def is_installed(name: str) -> bool:
    """Whether this instance can build a backend; imports none of it but a namespace."""
    return all(find_spec(module) is not None for module in _MODULES.get(name, ()))


def installed_backends() -> list[str]:
    """Names of the backends that this instance can build."""
    return [name for name in BACKENDS.names() if is_installed(name)]


def choose_backend(section: TrainerSection) -> Chosen[Backend]:
    """The backend that the section names, with its options. Raises Refusal INVALID, naming the key."""
    try:
        return BACKENDS.choose(section.backend, section.backend_options)
    except PluginError as error:
        raise refused(error) from error


def build_backend(config: TrainerConfig, algorithm: Algorithm, ranks: TrainerGroup) -> Backend:
    """The backend that `config.trainer` names, without weights yet."""
    chosen = choose_backend(config.trainer)
    try:
        return chosen.build(config, algorithm, ranks)
    except PluginError as error:
        raise refused(error) from error
