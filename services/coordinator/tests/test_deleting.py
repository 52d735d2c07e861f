"""Ended runs are deleted with their files; runs that somebody may still read are not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.domain import events as ev
from headrace_simulation.judging.world import WorldJudge
from scene import Scene, ends


async def refusal(changes, run, key="k"):
    with pytest.raises(Refused) as caught:
        await changes.delete(run, key)
    return caught.value


class Deleting(Scene):
    """A run that is deleted as soon as it has ended, and before."""

    def __init__(self):
        super().__init__(self.delete, steps=3)

    async def delete(self, _):
        run = await self.first()
        changes = self.coordinator.run_changes
        self.early = await refusal(changes, run)
        self.directory = Path(self.coordinator.event_log.state.runs[run].directory)
        await self.until(lambda: self.state(run) == "SUCCEEDED")
        self.kept = self.directory.exists()
        origin = self.specs[0].model_dump(mode="json") | {"from_checkpoint": {"run": run}, "steps": 6}
        fork = await self.users.submit(type(self.specs[0]).model_validate(origin), "fork")
        self.forked = await refusal(changes, run)
        await self.until(lambda: self.state(fork) == "SUCCEEDED")
        await changes.delete(run, "delete-it")
        await changes.delete(run, "delete-it")  # The same request again.
        self.again = await refusal(changes, run, "another")
        self.deleted = run
        del self.users.specs[run]  # Its user does not wait for its end.


async def unjudged(_):
    return SimpleNamespace(states={})


def test_an_ended_run_is_deleted_with_its_files(monkeypatch):
    monkeypatch.setattr(WorldJudge, "judge", unjudged)  # It asks for every run that ever was.
    scene = Deleting()
    ends(scene)
    assert scene.early.reason == "CONFLICT" and "cancel" in str(scene.early)
    assert scene.forked.reason == "CONFLICT" and "may still read a checkpoint" in str(scene.forked)
    assert scene.again.reason == "NOT_FOUND"
    assert scene.kept and not scene.directory.exists()
    assert [event.run for event in scene.log(ev.RunDeleted)] == [scene.deleted]
    assert scene.deleted not in scene.coordinator.event_log.state.ended
