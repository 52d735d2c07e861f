"""Games of TextArena (https://github.com/LeonGuertler/TextArena) for one player or two, by the names of its registry.

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

MOVE = textarena.ObservationType.PLAYER_ACTION


class GameOptions(Options):
    """Options of a game; what stands beside them are arguments of the game's class."""

    model_config = ConfigDict(extra="allow")

    opening: str = Field("", description="what the model reads first; left out: the game's rules")


class Game:
    """One game at a time, of one player."""

    def __init__(self, game: Any, inner: Any, opening: str) -> None:
        self._game, self._inner, self._opening = game, inner, opening

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
        return "\n".join(text for _, text, kind in heard if kind is not MOVE)


class Match:
    """One game at a time, of two players, each a role: what one hears, the other does not."""

    roles = ("player_0", "player_1")

    def __init__(self, game: Any, inner: Any, opening: str) -> None:
        self._game, self._inner, self._opening = game, inner, opening

    def reset(self, seed: int, item: Mapping[str, Any]) -> Sequence[Message]:
        """A game that follows from the seed: the rules of who begins."""
        self._game.reset(num_players=2, seed=seed)
        return [self._news()]

    def step(self, message: Message) -> tuple[Sequence[Message], Mapping[str, float], bool]:
        """Makes the move of who spoke; both get their reward at the end."""
        done, _ = self._game.step(action=message["content"])
        if not done:
            return [self._news()], {}, False
        rewards, _ = self._game.close()
        return [], {self.roles[player]: float(reward) for player, reward in rewards.items()}, True

    def _news(self) -> Message:
        """What the game and the other player have said to who is next since they were asked last."""
        player, heard = self._inner.get_observation()
        texts = []
        for sender, text, kind in heard:
            if kind is textarena.ObservationType.PROMPT and self._opening:
                texts.append(self._opening)
            elif kind is not MOVE:
                texts.append(text)
            elif sender != player:
                texts.append(f"Player {sender}: {text}")
        return {"role": "user", "content": "\n".join(texts), "to": self.roles[player]}


def _made(name: str, options: GameOptions) -> Game | Match:
    """The game, of as many players as it has; AssertionError where it needs more than two."""
    game = inner = textarena.make(name, **(options.model_extra or {}))
    while isinstance(inner, textarena.Wrapper):
        inner = inner.env
    try:
        game.reset(num_players=1, seed=0)
        alone = isinstance(inner.state, textarena.SinglePlayerState)
    except AssertionError:
        alone = False
    if alone:
        return Game(game, inner, options.opening)
    game.reset(num_players=2, seed=0)
    return Match(game, inner, options.opening)


def converse(name: str, options: Mapping[str, Any]) -> Game | Match:
    """Makes an environment; BackendError for a wrong name or option, and for more than two players."""
    if name not in ENV_REGISTRY:
        raise unknown("game of TextArena", name, ENV_REGISTRY)
    try:
        return _made(name, parse(GameOptions, options))
    except AssertionError as error:
        reason = f"{name} is a game of more than two players ({error})"
        raise BackendError("environment.name", reason) from error
    except TypeError as error:
        raise BackendError("options_json", f"{name}: {error}") from error
    except LookupError as error:
        reason = "it needs data of nltk on the simulator's host: python -m nltk.downloader words"
        raise BackendError("environment.name", f"{name}: {reason}") from error
