"""Training backends: one folder each, found by name. Importing this loads no torch; building one does."""

from __future__ import annotations

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
    {"fsdp": "headrace_trainer.backends.plugins:FSDP"},
)


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
