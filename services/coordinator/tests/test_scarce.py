"""A host without descriptors, or without room on its disk: a run stands still, says why, and goes on by itself."""

import errno
import os

import pytest
from headrace_coordinator.domain import events as ev
from headrace_schema.problems import Impossible, problem
from headrace_simulation.world import Quiet
from scene import Scene, ends, trained_once


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOSPC])
@pytest.mark.parametrize("where", ["spec", "step", "trajectories", "timeline"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_run_that_finds_no_descriptor_stands_still_and_goes_on(monkeypatch, code, where, wrapped):
    left = [3]

    def fail(self, *arguments, **options):
        if left[0]:
            left[0] -= 1
            lack = OSError(code, os.strerror(code), "metrics.jsonl")
            if wrapped:
                raise Impossible([problem("data.source", "it cannot be read", "make it readable")]) from lack
            raise lack

    async def play(scene):
        await scene.until(lambda: not left[0])

    monkeypatch.setattr(Quiet, where, fail)
    scene = Scene(play)
    (run,) = ends(scene)
    assert scene.state(run) == "SUCCEEDED" and trained_once(scene, run)
    assert not scene.log(ev.RunRecovering)
    told = [event.reason for event in scene.log(ev.RunStateChanged) if "room again" in event.reason]
    assert told and os.strerror(code) in told[0]
