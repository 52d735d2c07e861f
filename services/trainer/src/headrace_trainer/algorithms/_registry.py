"""Algorithms by name. Importing this loads no torch; building one does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_servicekit.registry import PluginError, Registry

from headrace_trainer.errors import Refusal, refused

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
        algorithm = ALGORITHMS.choose(section.name, section.options).build()
    except PluginError as error:
        raise refused(error) from error
    if section.group_size < algorithm.least_group:
        raise Refusal(
            "INVALID",
            f"algorithm.group_size: {section.name} compares the samples of a group, and {section.group_size} is too "
            f"few; use at least {algorithm.least_group}",
            "invalid",
            key="algorithm.group_size",
        )
    return algorithm
