"""A GPU's memory is counted by process: an engine's own is measured, a neighbour's does not count as its."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from engines.plain_backend import PlainBackend
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit import devices
from headrace_modelkit.devices import Nvml, NvmlMissing
from headrace_rollout.engines.base import Capabilities, Scope
from headrace_rollout.engines.figures import Figures
from headrace_rollout.engines.hosted import process as process_module
from headrace_rollout.engines.hosted import processes
from headrace_rollout.engines.hosted.backend import Deadlines, Start
from headrace_rollout.engines.hosted.process import GROWTH_BYTES, EngineProcess
from headrace_rollout.engines.hosted.processes import Watermark
from headrace_rollout.runs.opened import TextRun
from headrace_schema.gpu_defaults import asleep_limit
from headrace_schema.openings import RolloutConfig
from headrace_schema.sections.generating import ModelSection

GIB = 2**30
GPU = torch.device("cuda", 0)
NEIGHBOUR = 1
LIMIT = asleep_limit(80 * GIB)


class Driver:
    """NVML of one GPU, as its library: `used` is bytes by process."""

    def __init__(self, used, uuid="GPU-aa"):
        self.used, self.uuid, self.late = used, uuid, 0

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, device):
        return 0 if uuid.value.decode() == self.uuid else 6

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device, count, listed):
        count, rows = count._obj, list(self.used.items())
        if listed is None or count.value < len(rows):
            count.value = len(rows)
            return 7 if rows else 0
        if self.late:  # others have started since the count was asked for
            self.late, rows[:0] = 0, [(10_000 + number, 0) for number in range(self.late)]
            self.used = dict(rows)
            return self.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), listed)
        count.value = len(rows)
        for row, (pid, size) in zip(listed, rows, strict=False):
            row.pid, row.bytes = pid, size
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        return 0

    def nvmlDeviceGetUUID(self, device, name, size):
        name.value = self.uuid.encode()
        return 0


@pytest.fixture
def driver(monkeypatch):
    """A GPU of 80 GiB of which a neighbour has 30; what the whole card has free follows from its processes."""
    made = Driver({NEIGHBOUR: 30 * GIB})
    nvml = Nvml(made)
    monkeypatch.setattr(Nvml, "open", lambda: nvml)
    monkeypatch.setattr(devices, "_seen", lambda: ["aa"])
    monkeypatch.setattr(devices, "has_hosts_pids", lambda: True)
    for module in (processes, process_module):
        monkeypatch.setattr(module, "total_bytes", lambda device: 80 * GIB)
    monkeypatch.setattr(processes, "free_bytes", lambda device: 80 * GIB - sum(made.used.values()))
    return made


def test_bytes_are_counted_by_process(driver):
    driver.used |= {7: 3 * GIB, 8: 2**64 - 1}
    assert Nvml.open().processes("GPU-aa") == {NEIGHBOUR: 30 * GIB, 7: 3 * GIB, 8: 0}
    assert Nvml.open().used_by([7, 8]) == {"GPU-aa": 3 * GIB}
    driver.late = 40
    assert Nvml.open().processes("GPU-aa")[7] == 3 * GIB, "asked again with more room"
    driver.used = {}
    assert Nvml.open().processes("GPU-aa") == {}
    with pytest.raises(NvmlMissing, match="nvmlDeviceGetHandleByUUID failed with status 6"):
        Nvml.open().processes("GPU-bb")
    with pytest.raises(NvmlMissing, match="no nvmlInit_v2"):
        Nvml(object())


@pytest.fixture
async def engine(model_config, driver):
    """A process of an engine on the GPU, and its backend."""
    from headrace_modelkit.tokenizer import load_tokenizer
    from headrace_rollout.engines.base import EngineConfig

    backend = PlainBackend(EngineConfig(model_config, load_tokenizer(model_config), 4, (GPU,)))
    backend.capabilities = Capabilities(
        resume_from_prefix=True, inflight_update=True, suspend_frees_memory=True
    )

    async def restored():
        return None

    process = EngineProcess(backend, Deadlines(), lambda reason: None, restored, Figures())
    await process.place(Start((GPU,), 1))
    await process.ready()
    yield process, backend
    await process.stop()


async def test_an_engine_is_not_ended_for_a_neighbours_growth(engine, driver):
    process, backend = engine
    driver.used |= {backend.pids[0]: LIMIT, NEIGHBOUR: 60 * GIB}
    await process.release()
    assert process.up and backend.alive


async def test_an_engine_that_keeps_too_much_is_ended_though_a_neighbour_has_left(engine, driver):
    process, backend = engine
    driver.used = {backend.pids[0]: LIMIT + 1}
    await process.release()
    assert not process.up and not backend.alive


async def again(process):
    await process.place(Start((GPU,), 1))
    await process.ready()
    await process.wake(Scope.WEIGHTS)
    await process.wake(Scope.KV_CACHE)


async def test_two_gpus_engine_that_keeps_seven_gib_asleep_is_started_once(engine, driver):
    """NeMo-RL 223 and vLLM 47654 tell of 2.4 to 7.4 GiB of each GPU."""
    process, backend = engine
    for _ in range(4):
        await again(process)
        driver.used[backend.pids[0]] = 7 * GIB
        await process.release()
    assert backend.alive
    assert process._figures == Figures(restarts=0, asleep_bytes=4 * 7 * GIB)


async def test_what_an_engine_keeps_asleep_is_held_against_its_first_sleep(engine, driver):
    process, backend = engine
    for kept in (GIB, GIB + GROWTH_BYTES):
        await again(process)
        driver.used[backend.pids[0]] = kept
        await process.release()
        assert backend.alive
    await again(process)
    driver.used[backend.pids[0]] = GIB + GROWTH_BYTES + 1
    await process.release()
    assert not backend.alive and process._figures.restarts == 0
    await again(process)
    assert process._figures.restarts == 1
    driver.used[backend.pids[0]] = 2 * GIB
    await process.release()
    assert backend.alive, "another process has a first sleep of its own"


async def test_a_release_is_measured_by_the_engines_own_processes(engine, driver):
    process, backend = engine
    driver.used[backend.pids[0]] = 40 * GIB
    mark = Watermark((GPU,), list(backend.pids))
    driver.used |= {backend.pids[0]: GIB, NEIGHBOUR: 50 * GIB}
    freed = mark.freed()
    assert (freed.released_bytes, freed.used_bytes, freed.free_bytes) == (39 * GIB, GIB, 29 * GIB)
    await process.stop()
    assert mark.freed().used_bytes == 0, "processes that have ended have nothing"


async def test_without_a_count_by_process_the_whole_card_less_what_was_there_before(engine, driver):
    """A container with process ids of its own: the driver lists the host's."""
    process, backend = engine
    driver.used[4711] = GIB
    await process.release()
    assert backend.alive, "30 GiB were there when it was started"
    await process.place(Start((GPU,), 1))
    driver.used[4711] = LIMIT + 1
    await process.release()
    assert not backend.alive


async def test_a_container_with_process_ids_of_its_own_is_not_taken_for_its_neighbours(
    engine, driver, monkeypatch
):
    """The driver lists the host's ids: one that is an engine's here may be anybody's there.

    What the whole card has is then the engine's, but for what others had as it got the card: a false figure would
    quarantine the card and end its holder.
    """
    monkeypatch.setattr(devices, "has_hosts_pids", lambda: False)
    process, backend = engine
    driver.used |= {
        backend.pids[0]: 40 * GIB,
        4711: GIB,
    }  # 40 GiB of another process of that number, GIB its own
    assert devices.process_bytes([GPU], list(backend.pids)) is None
    driver.used.pop(backend.pids[0])
    await process.sleep()
    mark = Watermark(process.devices, list(backend.pids), process.others_bytes)
    assert mark.freed().used_bytes == GIB, "and 30 GiB are the neighbour's"
    await process.release()
    # The trainer has the card in between, and keeps its context when it gives it back: that is not the engine's growth.
    driver.used[NEIGHBOUR] += LIMIT
    await process.place(Start((GPU,), 1))
    await process.release()
    assert process.up and backend.alive
    assert Watermark(process.devices, list(backend.pids), process.others_bytes).freed().used_bytes == GIB


def test_a_process_knows_whether_it_counts_with_the_hosts_process_ids(tmp_path):
    assert not devices.has_hosts_pids(tmp_path)  # any other inode than the first namespace's
    assert not devices.has_hosts_pids(tmp_path / "missing")


async def test_a_stream_tells_once_of_what_its_engines_processes_went_through(engine):
    process, _ = engine
    run = TextRun(
        "r", RolloutConfig(model=ModelSection(path="m")), SimpleNamespace(figures=process._figures), None
    )

    def told():
        response = rollout_pb2.GenerateResponse()
        run.tell_engine(response)
        return [dict(stage.values) for stage in response.stages]

    assert told() == []
    process._figures.restarts, process._figures.asleep_bytes = 1, 2 * GIB
    assert told() == [{"engine_restarts": 1, "engine_asleep_bytes": 2 * GIB}]
    assert told() == []
    process._figures.asleep_bytes += GIB
    assert told() == [{"engine_asleep_bytes": GIB}]
