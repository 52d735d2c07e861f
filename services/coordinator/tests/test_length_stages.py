"""Answers get longer in stages: each step's samples have the limit of their stage, also where they are made ahead."""

from __future__ import annotations

import pytest
from headrace_simulation.fleet.rollout import Rollout
from scene import Scene, ends

STAGES = [{"until_step": 2, "max_new_tokens": 20}, {"until_step": 5, "max_new_tokens": 30}]
LIMITS = [20, 20, 30, 30, 30, 40, 40, 40]


async def nothing(scene):
    """Happens beside it."""


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_step_s_answers_have_the_limit_of_its_stage(ahead, monkeypatch):
    asked, make = dict[int, set[int]](), Rollout._make

    async def watched(self, opening, group, sample, done):
        asked.setdefault(group.prompt_ordinal // 2, set()).add(opening.max_new_tokens)
        await make(self, opening, group, sample, done)

    monkeypatch.setattr(Rollout, "_make", watched)
    scene = Scene(
        nothing,
        steps=len(LIMITS),
        sampling={"max_new_tokens": 40, "stages": STAGES},
        algorithm={"max_staleness": ahead, "prompts_per_step": 2, "options": {}},
        placement={"mode": "disaggregated", "flow": None, "share": False},
        rollout={"instances": 1, "helpers": 0, "install": "in_flight" if ahead else None},
        data={"curriculum": None, "heldout": 0},
    )
    assert set(ends(scene).values()) == {"SUCCEEDED"}
    assert [asked[step] for step in range(len(LIMITS))] == [{limit} for limit in LIMITS]
