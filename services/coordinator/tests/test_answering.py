"""Answers for evaluations: what a rollout refuses because the spec is wrong ends the evaluation at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace_coordinator.fleet.instance_client import CallRefused
from headrace_coordinator.run.evaluation.evaluate import ATTEMPTS, Questions, answer


class Refusing:
    """A rollout, and the context of its run, whose streams end with a refusal."""

    incarnation = "r0"

    def __init__(self, reason: str) -> None:
        self.reason, self.asked = reason, 0
        self.modality = SimpleNamespace(
            prepare=self.nothing, opening=lambda *_: rollout.RunEpisodesOpen(), ended=lambda *_, **__: None
        )
        self.workers = SimpleNamespace(decoding=[self], usable=lambda worker: True)
        self.spec = SimpleNamespace(limits=SimpleNamespace(step_timeout_s=1.0))

    async def nothing(self, *_: object) -> None:
        return None

    lost = nothing

    async def generate(self, *_: object):
        self.asked += 1
        raise CallRefused(self.incarnation, self.reason, "videos need imageio-ffmpeg")
        yield


async def asked(reason: str) -> int:
    """How often a rollout is asked that refuses for this reason, where nobody raises."""
    refusing = Refusing(reason)
    questions = Questions(["item"], 1, sampling=None)
    await answer(refusing, None, questions, [0], {})  # type: ignore[arg-type]
    return refusing.asked


async def test_a_wrong_spec_is_not_asked_again():
    with pytest.raises(CallRefused, match="imageio-ffmpeg"):
        await asked("INVALID")


async def test_what_may_pass_is_asked_again():
    assert await asked("ENGINE_FAILED") == ATTEMPTS
