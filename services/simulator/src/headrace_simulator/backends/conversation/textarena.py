"""Games of TextArena (https://github.com/LeonGuertler/TextArena) for one player, by the names of its registry.

The model reads what the game newly says after each of its turns. Its wrappers of what a player does stay (they put
brackets around a move), those of what a player sees do not: they would tell all that was said again each turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import textarena
from headrace_servicekit.registry import Options
from pydantic import ConfigDict, Field
from textarena.envs.registration import ENV_REGISTRY

from headrace_simulator.backends.base import BackendError, Message
from headrace_simulator.backends.options import parse, unknown


class GameOptions(Options):
    """Options of a game; what stands beside them are arguments of the game's class."""

    model_config = ConfigDict(extra="allow")

    opening: str = Field("", description="what the model reads first; left out: the game's rules")


class Game:
    """One game at a time, of one player."""

    def __init__(self, name: str, options: GameOptions) -> None:
        self._opening = options.opening
        self._game = self._inner = textarena.make(name, **(options.model_extra or {}))
        while isinstance(self._inner, textarena.Wrapper):
            self._inner = self._inner.env
        self._game.reset(num_players=1, seed=0)
        if not isinstance(self._inner.state, textarena.SinglePlayerState):
            raise AssertionError(type(self._inner.state).__name__)

    def reset(self, seed: int, item: Mapping[str, Any]) -> Sequence[Message]:
        """A game that follows from the seed: its rules."""
        self._game.reset(num_players=1, seed=seed)
        rules = self._news()
        return [{"role": "user", "content": self._opening or rules}]

    def step(self, message: Message) -> tuple[Sequence[Message], float, bool, Mapping[str, Any]]:
        """Makes the move; the game's one reward comes with its end, and 1 is a game that is won."""
        done, _ = self._game.step(action=message["content"])
        if not done:
            return [{"role": "user", "content": self._news()}], 0.0, False, {}
        rewards, told = self._game.close()
        reward = float(rewards[0])
        end = str(told[0].get("reason") or "")
        return [{"role": "user", "content": end}] if end else [], reward, True, {"success": reward >= 1}

    def _news(self) -> str:
        """What the game has said since it was asked last, without the player's own moves."""
        _, heard = self._inner.get_observation()
        moves = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in heard if kind is not moves)


def converse(name: str, options: Mapping[str, Any]) -> Game:
    """Makes an environment; BackendError where the name or an option is wrong, or the game has several players."""
    if name not in ENV_REGISTRY:
        raise unknown("game of TextArena", name, ENV_REGISTRY)
    try:
        return Game(name, parse(GameOptions, options))
    except AssertionError as error:
        reason = f"{name} is a game of several players, and a conversation has one ({error})"
        raise BackendError("environment.name", reason) from error
    except TypeError as error:
        raise BackendError("options_json", f"{name}: {error}") from error
    except LookupError as error:
        reason = "it needs data of nltk on the simulator's host: python -m nltk.downloader words"
        raise BackendError("environment.name", f"{name}: {reason}") from error
