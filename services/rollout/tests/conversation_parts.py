"""What conversations are about in tests: environments of two kinds, and how a rollout is asked for them."""

from __future__ import annotations

import json

from headrace.rollout.v1 import rollout_pb2
from simulator_rig import open_pool

# What it says depends on seed and turn alone; what its item says is done.
TALKS = """
import os
import time


class Talk:
    def __init__(self, turns=3, says=" +"):
        self.turns, self.says = turns, says

    def reset(self, seed, item):
        self.turn, self.item = 0, item
        first = item.get("first", "=")
        if item.get("unlike"):
            first += str(time.monotonic_ns() % 1000)
        return [{"role": "system", "content": "copy"}, {"role": "user", "content": f"{seed % 10}{first}"}]

    def step(self, message):
        assert message["role"] == "assistant"
        self.turn += 1
        wrong = self.item.get("wrong")
        if wrong == "dies" and self.turn == 2:
            os._exit(7)
        if wrong == "raises" and self.turn == 2:
            raise RuntimeError("the game fell over")
        if wrong == "hangs" and self.turn == 2:
            time.sleep(600)
        says = self.says * (40 if wrong == "grows" else 1)
        done = self.turn == self.turns
        return [{"role": "user", "content": says}], 0.5 * self.turn, done, {"success": done}
"""

# The asker asks twice and the teller tells once; each has heard what is to it alone.
GAME = """
class Game:
    roles = ("asker", "teller")

    def reset(self, seed, item):
        self.turn = 0
        rule = {"role": "system", "content": "copy", "to": "teller"}
        return [rule, {"role": "user", "content": f"{seed % 10}=", "to": "asker"}]

    def step(self, message):
        self.turn += 1
        if self.turn == 1:
            return [{"role": "user", "content": "+", "to": "teller"}], {"teller": 0.25}, False
        if self.turn == 2:
            return [{"role": "user", "content": "-", "to": "asker"}], {"teller": 0.5, "asker": 1.0}, False
        return [], {"asker": -3.0, "teller": 2.0}, True
"""
TASK = "talks.py:Talk"


async def pool_of(address, *, options=None, **fields):
    return await open_pool(
        address,
        TASK,
        options=options,
        backend="conversation",
        **{"max_episode_steps": 0, "count": 3, "processes": 3, **fields},
    )


def begins(prompts, samples=1, *, attempt=1, **item):
    """Groups whose prompt number is the seed of their conversations."""
    return [
        rollout_pb2.GroupAssignment(
            prompt_ordinal=ordinal,
            prompt=rollout_pb2.Prompt(
                episode=rollout_pb2.EpisodeStart(task=TASK, seed=ordinal, options_json=json.dumps(item))
            ),
            samples=[
                rollout_pb2.SampleAssignment(sample_index=index, attempt=attempt) for index in range(samples)
            ],
        )
        for ordinal in prompts
    ]


async def said(rollout, pool, groups, **options):
    call = rollout.generate(groups, pools=[pool], **{"policy_number": 3, "max_new_tokens": 24, **options})
    return await (await call.start()).read_all()


def parts(trajectory):
    (branch,) = trajectory.branches
    return [(segment.policy_number, list(segment.tokens.token_ids)) for segment in branch.segments]


def text_of(codec, ids):
    return codec.decode(ids, skip_special_tokens=False)


ANY = [*"0123456789 =+->:,.?\nacdoprsty"]
"""Texts of which one ends each turn of a random model, at its first character or, most likely, soon after an <unk>."""
