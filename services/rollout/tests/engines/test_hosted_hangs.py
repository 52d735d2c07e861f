"""An engine that does not answer a call: it has a deadline, then the process is killed and another one started."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
from headrace_rollout.engines.base import Refused
from headrace_rollout.engines.hosted.backend import Deadlines
from headrace_rollout.engines.samples import Distribution
from plain_backend import PlainBackend, build_plain
from rig import ENGINES_HERE, Collector, Rig, group, make_rig

pytestmark = pytest.mark.skipif(
    "plain" not in ENGINES_HERE, reason="what the adapter does, whatever the engine"
)

SHORT_S = 3.0
START_LIMIT_S = 6.0  # the start that follows makes a model


@pytest.fixture
def rig(tmp_path, monkeypatch) -> Iterator[Rig]:
    limits = Deadlines(start_s=START_LIMIT_S, command_s=SHORT_S, install_s=SHORT_S, silence_s=SHORT_S)
    monkeypatch.setattr("rig.build_plain", lambda config: build_plain(config, limits))
    made = make_rig("plain", tmp_path)
    yield made
    asyncio.run(made.engine.close())


def hang(rig: Rig, call: str) -> int:
    """The engine's process answers this call no more; returns its id."""
    backend = rig.engine._backend
    assert isinstance(backend, PlainBackend)
    backend.hangs.add(call)
    return next(iter(rig.pids()), 0)


async def ask(rig: Rig, call: str) -> str:
    """What hangs in the call; returns what is said of it."""
    engine, collector = rig.engine, Collector()
    if call == "generate":
        await engine.submit(rig.stream(collector), [group(0, [5, 6, 7])])
        await collector.wait(lambda c: c.failures, failing=True)
        return collector.failures[0]
    with pytest.raises(Refused) as refused:
        if call == "score":
            await engine.score([([5, 6, 7], 1)], Distribution())
        elif call == "sleep":
            await engine.pause()
            await engine.suspend()
        else:
            await rig.install(rig.model_b)
    assert refused.value.reason == ("ENGINE_FAILED" if call in ("score", "sleep") else "BROKEN")
    return str(refused.value)


@pytest.mark.parametrize("call", ["generate", "score", "sleep", "begin_install", "update"])
async def test_a_call_that_is_not_answered_costs_the_process_and_not_the_version(rig, call):
    await rig.ready()
    pid = hang(rig, call)
    said = await ask(rig, call)
    assert f"no token for {SHORT_S:g} s" in said if call == "generate" else f"{call} of plain was not" in said
    if rig.engine.paused:
        await rig.engine.resume()
    await rig.serves(rig.model_a)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_process_that_ends_without_memory_is_started_for_half_the_samples(rig):
    await rig.ready()
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    rows = rig.engine._requests._rows
    for words in (f"with {rows.most // 2} samples", "rollout.max_concurrency: plain: "):
        hang(rig, "generate")
        collector = Collector()
        await rig.engine.submit(rig.stream(collector), [group(0, [5, 6, 7])])
        rig.engine._backend.death = said  # what it has logged before it ends
        os.kill(rig.pids()[0], 9)
        await collector.wait(lambda c: c.failures, failing=True)
        assert "CUDA out of memory" in collector.failures[0] and words in collector.failures[0]
        rig.engine._backend.death = ""
        await rig.serves(rig.model_a)


async def test_a_start_that_is_not_answered_is_said_and_tried_again(rig):
    await rig.ready()
    pid = hang(rig, "start")
    os.kill(pid, 9)
    with pytest.raises(Refused, match=f"start of plain was not answered within {START_LIMIT_S:g} s"):
        while True:  # until its death is seen
            await rig.engine.score([([5, 6, 7], 1)], Distribution())
    await rig.serves(rig.model_a)
