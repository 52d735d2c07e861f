"""Environments of skyrl-gym (https://github.com/NovaSky-AI/SkyRL), by its names, or as MODULE:CLASS.

An item of the run's data begins each conversation. skyrl-gym makes an environment anew for each, with the item as what
SkyRL calls its extras.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import skyrl_gym
from headrace_servicekit.registry import Options
from omegaconf import OmegaConf
from pydantic import Field
from skyrl_gym.envs.registration import load_env_creator, registry

from headrace_simulator.backends.base import BackendError, Message
from headrace_simulator.backends.options import parse, unknown


class TextOptions(Options):
    """Options of an environment."""

    config: dict[str, Any] = Field(default_factory=dict, description="its env_config")
    extras: dict[str, Any] = Field(
        default_factory=dict, description="of each conversation, beside the item: max_turns and the like"
    )
    system: str = Field("", description="system message that the conversation begins with")


class TextEnvironment:
    """One environment of skyrl-gym after the other, each for one conversation."""

    def __init__(self, name: str, options: TextOptions) -> None:
        self._name, self._options = name, options
        self._made: Any = None

    def reset(self, seed: int, item: Mapping[str, Any]) -> Sequence[Message]:
        """The item's question, or its conversation, as the environment shows it."""
        self._close()
        answer = {"method": "rule", "ground_truth": item.get("answer", "")}
        given = {"reward_spec": answer, "reward_model": answer, "extra_info": {}, **item}
        self._made = skyrl_gym.make(
            self._name,
            env_config=OmegaConf.create(self._options.config),
            extras={**given, **self._options.extras},
        )
        asked = item.get("messages") or [{"role": "user", "content": str(item.get("question", ""))}]
        system = [{"role": "system", "content": self._options.system}] if self._options.system else []
        said, _ = self._made.init([*system, *asked])
        return list(said)

    def step(self, message: Message) -> tuple[Sequence[Message], float, bool]:
        """Takes the model's turn."""
        found = self._made.step(message["content"])
        said = found["observations"] or []
        said = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
        return said, float(found["reward"]), bool(found["done"])

    def _close(self) -> None:
        if self._made is not None:
            self._made.close()


def converse(name: str, options: Mapping[str, Any]) -> TextEnvironment:
    """Makes an environment; BackendError where the name or an option is wrong."""
    chosen = parse(TextOptions, options)
    if name in registry:
        load_env_creator(registry[name].entry_point)
    elif ":" in name:
        _register(name)
    else:
        raise unknown("environment of skyrl-gym", name, registry)
    return TextEnvironment(name, chosen)


def _register(name: str) -> None:
    module, _, kind = name.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise BackendError("environment.name", f"{name}: {error}") from error
    if not hasattr(found, kind):
        raise BackendError("environment.name", f"{name}: there is no class {kind!r} in {module}")
    skyrl_gym.register(id=name, entry_point=name)
