"""Algorithms by name. Importing this loads no torch; building one does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_servicekit.registry import PluginError, Registry

from headrace_trainer.errors import refused

if TYPE_CHECKING:
    from headrace_schema.learning import AlgorithmSection

    from headrace_trainer.algorithms._base import Algorithm

ALGORITHMS: Registry[Algorithm] = Registry(
    "headrace.algorithms",
    "algorithm",
    "algorithm.name",
    "algorithm.options",
    {"grpo": "headrace_trainer.algorithms.plugins:GRPO"},
)


def build_algorithm(section: AlgorithmSection) -> Algorithm:
    """The algorithm that the section names, with its options. Raises Refusal INVALID, naming the key."""
    try:
        return ALGORITHMS.choose(section.name, section.options).build()
    except PluginError as error:
        raise refused(error) from error
