"""What engines in processes of their own do beyond the contract."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from headrace_rollout.engines.base import Policy, Refused
from headrace_rollout.engines.samples import Distribution, Finish, SlotKey
from headrace_servicekit.lease.devices import bind_cpu
from rig import START_S, Collector, expected_log_probs, group

pytestmark = pytest.mark.timeout(START_S)

PROMPT = [3 + index % 20 for index in range(200)]


@pytest.fixture(autouse=True)
def _hosted(shared_rig) -> None:
    if not shared_rig.hosted:
        pytest.skip(f"{shared_rig.name} runs in this process")


async def test_an_install_that_breaks_halfway_leaves_the_version_before(rig):
    weights, number = rig.weights(rig.model_b), rig.engine.policy.number
    *others, last = weights.entries
    damaged = replace(weights, entries=(*others, replace(last, offset=len(weights.body))))
    with pytest.raises(Refused) as refused:
        await rig.engine.install(Policy(number + 1, "c"), damaged)
    assert refused.value.reason == "INSTALL_FAILED"
    assert last.name in str(refused.value) and f"version {number} serves on" in str(refused.value)
    assert rig.engine.policy == Policy(number, "a")
    await rig.serves(rig.model_a)
    await rig.install(rig.model_b)
    await rig.serves(rig.model_b)


async def test_an_engine_of_another_project_tells_what_its_cache_holds(rig):
    """By which fewer samples are asked for at once where answers turn out long."""
    if rig.name == "plain":
        pytest.skip("it has no cache of its own")
    await rig.serves(rig.model_a)
    assert rig.engine._backend.cache_tokens >= rig.engine.max_context_tokens


async def test_an_update_in_flight_that_breaks_leaves_the_sequences_to_the_version_before(rig):
    if not rig.engine.capabilities.inflight_update:
        pytest.skip(f"{rig.name} offers no update in flight")
    weights, number, collector = rig.weights(rig.model_b), rig.engine.policy.number, Collector()
    *others, last = weights.entries
    damaged = replace(weights, entries=(*others, replace(last, offset=len(weights.body))))
    stream = rig.stream(collector, Distribution(1.5), max_new_tokens=300, chunk_tokens=4)
    await rig.engine.submit(stream, [group(0, PROMPT, 8)])
    await collector.wait(lambda c: len(c.outputs) > 2)
    with pytest.raises(Refused) as refused:
        await rig.engine.install(Policy(number + 1, "c"), damaged, in_flight=True)
    assert refused.value.reason == "INSTALL_FAILED"
    for output in (await collector.wait_ended(8)).values():
        answer = list(output.whole.token_ids)
        expected = expected_log_probs(rig.model_a, PROMPT, answer, Distribution(1.5))
        assert output.whole.log_probs == pytest.approx(expected, abs=1e-4)
        assert output.whole.spans == [(number, len(answer))] and not output.stopped


async def test_what_a_turn_of_its_loop_has_goes_out_in_one_piece(rig):
    collector, pieces = Collector(), []
    stream = rig.stream(collector, max_new_tokens=8, chunk_tokens=1)
    taken = stream.sink
    stream = replace(stream, sink=lambda outputs: (pieces.append(len(outputs)), taken(outputs)))
    await rig.engine.submit(stream, [group(0, PROMPT, 8)])
    ended = await collector.wait_ended(8)
    assert len(pieces) < sum(pieces) == sum(len(each.whole.token_ids) for each in ended.values())


@pytest.mark.parametrize("killed", ["all", "a worker"])
async def test_a_killed_engine_is_reported_and_started_again_with_its_version(rig, tmp_path, killed):
    if killed == "all":
        only_plain(rig)  # the harder case is tried with the others
    collector, file = Collector(), tmp_path / "body"
    weights = rig.weights(rig.model_a)
    file.write_bytes(weights.body)
    rig.number += 1
    await rig.engine.install(Policy(rig.number, f"a, {killed}"), replace(weights, path=file))
    file.unlink()  # as the store does with versions that nobody needs any more
    # Many more than run at once: some are left whenever the kill comes, and some were just about to run.
    await rig.engine.submit(rig.stream(collector, max_new_tokens=400, chunk_tokens=1), [group(0, PROMPT, 64)])
    await collector.wait(lambda c: len(c.outputs) > 8)
    before, sockets = rig.pids(), sockets_of(rig)
    for pid in before if killed == "all" else before[-1:]:
        os.kill(pid, signal.SIGKILL)
    await collector.wait(lambda c: c.failures, failing=True)
    assert rig.name in collector.failures[0]
    # What the coordinator does next: the samples again, of the version that it knows to be installed.
    again = await rig.generate([group(0, PROMPT, 8)])
    assert all(output.finish in (Finish.EOS, Finish.LENGTH) for output in again.values())
    await rig.serves(rig.model_a)
    assert not [pid for pid in before if runs(pid)], "a process of the engine before is left"
    assert not sockets & sockets_of(rig) and not any(map(os.path.exists, sockets)), "its sockets are left"


async def comes_to_rest(rig):
    """Ends with two seconds in which the engine's processes compute less than half of the time of a core."""
    for _ in range(15):
        used = cpu_seconds(rig.pids())
        await asyncio.sleep(2)
        if cpu_seconds(rig.pids()) - used < 1.0:
            return
    raise AssertionError("the engine computes without a lease")


async def test_an_engine_without_a_lease_computes_nothing_and_takes_the_cores_of_the_next(rig):
    engine, cores = rig.engine, os.sched_getaffinity(0)
    await rig.generate([group(0, PROMPT)])
    await engine.release()
    await comes_to_rest(rig)
    bind_cpu([f"cpu:{min(cores)}"])  # as the service does at a grant
    try:
        await engine.place((torch.device("cpu"),), 1)
        for pid in rig.pids():
            for thread in os.listdir(f"/proc/{pid}/task"):
                assert os.sched_getaffinity(int(thread)) == {min(cores)}
    finally:
        bind_cpu([f"cpu:{core}" for core in cores])
        await engine.place((torch.device("cpu"),), 1)
    await rig.install(rig.model_a)
    await rig.serves(rig.model_a)


async def test_a_request_that_the_engine_refuses_costs_that_sample_alone(rig):
    only_plain(rig)
    rig.engine._backend.refused.add(9)
    try:
        found = await rig.generate([group(0, PROMPT, 2), group(1, [9, 5, 6])])
    finally:
        rig.engine._backend.refused.clear()
    assert found[SlotKey(1, 0)].finish is Finish.ERROR
    assert all(found[SlotKey(0, index)].finish in (Finish.EOS, Finish.LENGTH) for index in (0, 1))


async def test_a_lease_that_ends_while_the_engine_starts_does_not_wait_for_it(rig):
    only_plain(rig)
    engine, gate = rig.engine, rig.engine._backend.start_gate
    await engine._thread.call(engine._process.stop)
    await engine.release()
    gate.clear()
    await engine.place((torch.device("cpu"),), 1)
    installing = asyncio.create_task(rig.install(rig.model_a))
    await asyncio.sleep(0.2)
    async with asyncio.timeout(30):
        await engine.release()
        with pytest.raises(Refused, match="the lease ended before plain was up"):
            await installing
    gate.set()
    await engine.place((torch.device("cpu"),), 1)
    await rig.install(rig.model_a)
    await rig.serves(rig.model_a)


async def test_an_engine_that_dies_between_two_leases_starts_with_the_next(rig):
    only_plain(rig)
    await rig.engine.release()
    before = rig.pids()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while rig.engine._process.up:  # noqa: ASYNC110  # seen by a watch of its own
            await asyncio.sleep(0.05)
    assert not rig.engine._backend.alive
    await rig.engine.place((torch.device("cpu"),), 1)
    await rig.install(rig.model_a)
    await rig.serves(rig.model_a)
    assert not set(before) & set(rig.pids())


def only_plain(rig) -> None:
    """For what is the adapter's doing: a start of a real engine takes half a minute."""
    if rig.name != "plain":
        pytest.skip("tested with the plain backend")


def sockets_of(rig) -> set[str]:
    """Files of the sockets through which its processes speak, where it leaves any."""
    if rig.name != "vllm":
        return set()
    found = {str(path) for path in Path(rig.engine._backend._sockets).iterdir()}
    assert found
    return found


def runs(pid: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def cpu_seconds(pids) -> float:
    """Processor time that these have used."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)
