"""What is kept of a run's calls, the file that is made of it, and files that are refused."""

import asyncio
import gzip
import json

import pytest
from headrace.common.v1 import common_pb2, recording_pb2
from headrace.reward.v1 import reward_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_servicekit.recording.files import BadRecording, Part, framed, read_recording
from headrace_servicekit.recording.recorder import Recorder, RunRecorder, read_wanted

HEADER = common_pb2.CommandHeader(run="runs/r", coordinator_epoch=3, lease_epoch=9)


class Kept:
    """A run's recorder, told of calls as a client tells it."""

    def __init__(self, directory, **options):
        self.recorder = Recorder()
        self.run = self.recorder.open(RunRecorder("runs/r", directory, **options))
        self.directory = directory

    def call(self, method, request, *responses, kind="trainer", reason=""):
        request.header.CopyFrom(HEADER)
        call = self.recorder.call(kind, f"{kind}-x", method, request)
        if call is None:
            return
        call.request(request)
        for response in responses:
            call.response(response)
        call.ended(reason)

    def open(self, config="{}"):
        self.call("OpenRun", trainer_pb2.OpenRunRequest(config_json=config), trainer_pb2.OpenRunResponse())

    def restore(self):
        self.call("Restore", trainer_pb2.RestoreRequest(number=1), trainer_pb2.RestoreResponse())

    def step(self, number, padding=0):
        self.run.begin(number)
        begin = trainer_pb2.BeginStepRequest(step=number)
        begin.header.request_id = "".join(map(chr, range(32, 32 + padding % 90)))
        self.call("BeginStep", begin, trainer_pb2.BeginStepResponse())
        manifest = bytes((7 * n * n + n // 3) % 251 for n in range(padding))
        commit = trainer_pb2.CommitStepRequest(step=number, step_manifest=manifest)
        self.call("CommitStep", commit, trainer_pb2.CommitStepResponse(group_count=number))

    async def end(self):
        instance = recording_pb2.RecordedInstance(kind="trainer", name="trainer-0", incarnation="trainer-x")
        found = await self.run.end(lambda: ('{"steps": 9}', [instance]))
        if thread := self.run._segments._thread:
            await asyncio.wrap_future(thread.submit(lambda: None))  # What was told is written.
        return found


@pytest.fixture
def kept(tmp_path):
    made = []

    def make(**options):
        made.append(Kept(tmp_path / "recordings", **options))
        return made[-1]

    yield make
    for each in made:
        each.recorder.close(each.run)


def steps_in(found):
    return [call.step for call in read_recording(found.path).calls if call.method == "CommitStep"]


async def test_a_recording_has_every_message_in_its_order_and_what_the_run_is(kept):
    run = kept(keep="all")
    run.open()
    run.restore()
    run.step(1)
    found = await run.end()
    recording = read_recording(found.path)
    assert found.size == found.path.stat().st_size
    assert (recording.header.run, recording.header.step) == ("runs/r", 1)
    assert json.loads(recording.header.spec_json) == {"steps": 9} and not recording.header.incomplete
    assert recording.name_of("trainer-x") == "trainer-0"
    methods = [call.method for call in recording.calls]
    assert methods == ["OpenRun", "Restore", "BeginStep", "CommitStep"]
    commit = recording.calls[-1]
    sent, back = commit.messages
    assert trainer_pb2.CommitStepRequest.FromString(sent.data).header == HEADER
    assert trainer_pb2.CommitStepResponse.FromString(back.data).group_count == 1
    assert commit.succeeded and sent.is_request and not back.is_request
    assert commit.place < sent.place < back.place < commit.end_place


async def test_nothing_is_written_while_nothing_is_wanted_and_openings_are_known_when_something_is(kept):
    run = kept()
    run.open()
    run.restore()
    run.step(1)
    assert await run.end() is None and not run.directory.exists()
    assert not run.run.needs_base(2)
    run.run.ask([2])
    assert run.run.needs_base(2), "the step's recording would have no beginning"
    run.run.based("lineage-1/step-1", 2, "d2", 1)
    assert not run.run.needs_base(2)
    run.step(2)
    recording = read_recording((await run.end()).path)
    assert [call.method for call in recording.calls] == ["OpenRun", "BeginStep", "CommitStep"]
    base = recording.header.base
    assert (base.checkpoint, base.number, base.digest) == ("lineage-1/step-1", 2, "d2")
    assert recording.header.reason == "asked for" and not recording.header.incomplete
    run.step(3)
    assert await run.end() is None, "one was asked for"


async def test_steps_that_are_asked_for_survive_the_process(kept, tmp_path):
    run = kept()
    run.run.ask([4, 6])
    again = RunRecorder("runs/r", tmp_path / "recordings")
    assert again.needs_base(4) and again.needs_base(6) and not again.needs_base(5)
    run.run.based("c", 1, "d", 3)
    run.step(4)
    assert await run.end()
    assert read_wanted(run.directory) == {6}


async def test_a_step_that_has_begun_unheard_cannot_be_asked_for(kept):
    run = kept()
    run.step(5)
    assert run.run.first_step(5) == 6
    run.run.ask([5])
    assert await run.end() is None, "half a step is no recording"
    heard = kept(keep="failed")
    heard.step(5)
    assert heard.run.first_step(5) == 5


async def test_only_failed_steps_are_kept_with_their_first_reason_and_all_since_the_checkpoint(kept):
    run = kept(keep="failed")
    run.open()
    run.restore()
    for number in (1, 2, 3):
        run.step(number)
        if number == 3:
            run.run.fails("NONFINITE")
            run.run.fails("later")
        found = await run.end()
        assert (found is not None) == (number == 3)
    assert read_recording(found.path).header.reason == "NONFINITE"
    assert steps_in(found) == [1, 2, 3]
    run.run.based("c", 4, "d", 3)
    run.run.based("older", 2, "d", 1)
    run.step(4)
    run.run.fails("again")
    found = await run.end()
    assert steps_in(found) == [4], "the checkpoint has what came before"
    assert read_recording(found.path).header.base.checkpoint == "c"
    run.restore()
    run.step(4)
    run.run.fails("once more")
    found = await run.end()
    assert steps_in(found) == [4] and found.path.name == "step-4-2.recording"
    assert not read_recording(found.path).header.base.checkpoint, "it begins with a Restore"


async def test_without_a_beginning_the_recording_says_so(kept):
    run = kept(keep="failed")
    run.open()
    assert run.run.needs_base(1)
    run.step(1)
    run.run.fails("x")
    recording = read_recording((await run.end()).path)
    assert "no checkpoint" in recording.header.incomplete
    assert "OpenRun" in [call.method for call in recording.calls]
    run.run.ask([2])
    assert run.run.needs_base(2)
    run.run.not_based("the disk is full")
    assert not run.run.needs_base(2), "one try for a checkpoint is enough"
    run.step(2)
    run.run.fails("x")
    assert read_recording((await run.end()).path).header.incomplete == "the disk is full"


async def test_old_recordings_go_by_number_and_by_bytes(kept):
    run = kept(keep="all", max_count=2)
    run.restore()
    names = []
    for number in range(1, 5):
        run.step(number)
        names.append((await run.end()).path.name)
    assert {path.name for path in run.directory.glob("*.recording")} == set(names[-2:])
    small = kept(keep="all", max_bytes=3000)
    small.restore()
    small.step(5, padding=1500)
    assert await small.end()
    small.step(6, padding=1500)
    last = await small.end()
    assert [path.name for path in small.directory.glob("*.recording")] == [last.path.name]


async def test_steps_beyond_the_budget_lose_their_beginning_and_a_checkpoint_mends_it(kept):
    run = kept(keep="failed", max_bytes=2000)
    run.restore()
    for number in (1, 2, 3, 4):
        run.step(number, padding=1500)
        await run.end()
    run.step(5)
    run.run.fails("x")
    found = await run.end()
    assert "max_bytes" in read_recording(found.path).header.incomplete
    assert steps_in(found)[0] > 1 and not run.run.needs_base(6)
    run.run.based("c", 5, "d", 5)
    run.step(6)
    run.run.fails("x")
    assert not read_recording((await run.end()).path).header.incomplete


async def test_a_stream_that_began_before_goes_on_under_its_authority_without_what_it_carried(kept):
    run = kept()
    scores = reward_pb2.ScoreRequest(header=HEADER, items=[reward_pb2.ScoreItem(attempt=1)])
    answers = rollout_pb2.GenerateRequest(open=rollout_pb2.GenerateOpen(header=HEADER, seed=5))
    calls = []
    for kind, method, first in (("reward", "Score", scores), ("rollout", "Generate", answers)):
        calls.append(run.recorder.call(kind, f"{kind}-x", method, first))
        calls[-1].request(first)
    run.run.ask([2])
    run.run.based("c", 1, "d", 1)
    run.run.begin(2)
    calls[0].request(reward_pb2.ScoreRequest(items=[reward_pb2.ScoreItem(attempt=2)]))
    calls[1].request(rollout_pb2.GenerateRequest(assign=rollout_pb2.AssignGroups()))
    calls[1].response(rollout_pb2.GenerateResponse())
    by_method = {call.method: call for call in read_recording((await run.end()).path).calls}
    opening, more = [reward_pb2.ScoreRequest.FromString(each.data) for each in by_method["Score"].messages]
    assert opening == reward_pb2.ScoreRequest(header=HEADER) and more.items[0].attempt == 2
    opened = rollout_pb2.GenerateRequest.FromString(by_method["Generate"].messages[0].data)
    assert opened == answers and by_method["Generate"].ended_at is None


async def test_ranks_that_joined_side_by_side_stand_side_by_side(kept):
    run = kept()
    calls = []
    for rank in (0, 1):
        join = trainer_pb2.JoinTrainerGroupRequest(header=HEADER, rank=rank)
        calls.append(run.recorder.call("trainer", f"trainer-{rank}", "JoinTrainerGroup", join))
        calls[-1].request(join)
    for call in calls:
        call.response(trainer_pb2.JoinTrainerGroupResponse())
        call.ended()
    run.run.ask([2])
    run.run.based("c", 1, "d", 1)
    run.step(2)
    first, second, *_ = read_recording((await run.end()).path).calls
    assert second.method == "JoinTrainerGroup" and second.messages[0].place < first.end_place


async def test_the_endpoints_key_and_other_runs_are_left_out(kept):
    run = kept(keep="all")
    run.open(json.dumps({"endpoint_key": "sk-1", "judge": [{"options": {"api_key": "env:KEY", "n": 1}}]}))
    assert run.recorder.call("trainer", "t", "ListScorers", reward_pb2.ListScorersRequest()) is None
    other = trainer_pb2.BeginStepRequest(header=common_pb2.CommandHeader(run="runs/other"))
    assert run.recorder.call("trainer", "t", "BeginStep", other) is None
    run.restore()
    run.step(1)
    found = await run.end()
    assert b"sk-" not in gzip.decompress(found.path.read_bytes())
    opened = read_recording(found.path).calls[0]
    config = json.loads(trainer_pb2.OpenRunRequest.FromString(opened.messages[0].data).config_json)
    assert config == {"endpoint_key": "", "judge": [{"options": {"api_key": "env:KEY", "n": 1}}]}


async def test_a_disk_that_refuses_ends_the_recording_and_no_step(kept):
    run = kept(keep="all")
    run.directory.parent.mkdir(exist_ok=True)
    run.directory.write_text("a file where the folder should be")
    run.restore()
    run.step(1)
    assert await run.end() is None
    assert "recordings" in run.run.trouble and not run.run.active
    run.step(2)
    assert await run.end() is None


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[: len(data) // 2], "truncated"),
        (lambda data: data[: data.rindex(b"\x1f\x8b\x08")], "truncated"),
        (
            lambda data: data[: data.index(b"\x1f\x8b\x08", 1)] + data[data.rindex(b"\x1f\x8b\x08") :],
            "truncated",
        ),
        (lambda data: data[:-30] + bytes(10) + data[-20:], "truncated or damaged"),
        (lambda data: b"PK" + data, "no recording"),
        (lambda data: gzip.compress(b"something else"), "is no recording|damaged"),
        (
            lambda data: gzip.compress(
                framed(Part(header=recording_pb2.RecordingHeader(format=99, headrace_version="7.0")))
            ),
            "format 99.*install headrace 7.0",
        ),
    ],
)
async def test_files_that_are_no_whole_recording_are_refused_by_name(kept, tmp_path, damage, says):
    run = kept(keep="all")
    run.restore()
    run.step(1, padding=500)
    whole = (await run.end()).path.read_bytes()
    bad = tmp_path / "bad.recording"
    bad.write_bytes(damage(whole))
    with pytest.raises(BadRecording, match=f"(?s)bad.recording.*({says})"):
        read_recording(bad)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(BadRecording, match=r"gone\.recording: No such file"):
        read_recording(tmp_path / "gone.recording")
