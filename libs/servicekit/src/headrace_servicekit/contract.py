"""What every plug-in must hold, as a check that its author runs in a test of the own package.

Each service adds what its kind must hold: `headrace_trainer.algorithms.contract`, `headrace_reward.scorers.contract`,
`headrace_coordinator.data.contract`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from headrace_servicekit.registry import Chosen, PluginError, Registry, capability, read_capabilities

Made = TypeVar("Made")
NOBODYS_KEY = "a_key_that_no_plug_in_has"


def check_plugin(registry: Registry[Made], name: str, options: Mapping[str, Any]) -> Chosen[Made]:
    """The plug-in with these options, ready to be built. Raises AssertionError saying what does not hold."""
    require(name in registry.names(), f"{name!r} is not published in the group {registry.group}")
    try:
        chosen = registry.choose(name, options)
    except PluginError as error:
        raise AssertionError(str(error)) from error
    _check_options(registry, name, options)
    schema = chosen.plugin.options.model_json_schema()
    sent = read_capabilities([capability(name, schema)])
    require(
        sent == {name: json.loads(json.dumps(schema))}, "the options' JSON Schema does not survive as JSON"
    )
    require(bool(chosen.plugin.description), "the plug-in has no description: say in one line what it does")
    try:
        factory = chosen.plugin.factory()
    except (ImportError, AttributeError) as error:
        raise AssertionError(f"{chosen.plugin.build} cannot be imported: {error}") from error
    require(callable(factory), f"{chosen.plugin.build} is not callable")
    return chosen


def _check_options(registry: Registry[Made], name: str, options: Mapping[str, Any]) -> None:
    try:
        registry.choose(name, {**options, NOBODYS_KEY: 1})
    except PluginError as error:
        keys = [problem.key for problem in error.problems]
        expected = f"{registry.options_key}.{NOBODYS_KEY}"
        require(expected in keys, f"an unknown option is refused without its key: {error}")
    else:
        raise AssertionError(
            "an unknown option is taken in silence: derive the options from registry.Options"
        )


def require(holds: bool, otherwise: str) -> None:
    """Raises AssertionError with a sentence; unlike `assert` it holds under `python -O` too."""
    if not holds:
        raise AssertionError(otherwise)
