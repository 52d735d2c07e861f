"""Scorers in this process, without children and limits: for `headrace debug`, where breakpoint() works."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from headrace_reward import judge
from headrace_reward.pool import Finding, OpenFault
from headrace_reward.scorers.base import Answer, ScorerError


class InlinePool:
    """Judges answers one by one where it is called; `opening` as in ScorerPool."""

    def __init__(self, opening: dict[str, Any]) -> None:
        self._opening = opening
        self._loaded: dict[str, list[judge.LoadedScorer]] = {}

    async def open(self) -> dict[str, list[str]]:
        """Loads the scorers; returns their code digests. Raises OpenFault.

        They are not tried on a blank answer: a breakpoint() in one should first stop at an answer of the policy.
        """
        directory = Path(self._opening["directory"])
        for name, entries in self._opening["sets"].items():
            self._loaded[name] = []
            for index, entry in enumerate(entries):
                try:
                    each = judge.load(entry["name"], entry["options"], entry["part"], directory)
                except ScorerError as error:
                    raise OpenFault(name, index, error.field, error.message) from error
                self._loaded[name].append(each)
        return {name: [each.digest for each in loaded] for name, loaded in self._loaded.items()}

    def find(self, answer: dict[str, Any]) -> asyncio.Future[Finding]:
        """Judges one answer, at once."""
        fields = dict(answer)
        judged = judge.judge(self._loaded[fields.pop("set")], Answer(**fields))
        found: asyncio.Future[Finding] = asyncio.get_running_loop().create_future()
        found.set_result(Finding(judged.fault, judged.detail, dict(judged.scores), dict(judged.parts)))
        return found

    async def close(self) -> None:
        """Nothing to end."""
