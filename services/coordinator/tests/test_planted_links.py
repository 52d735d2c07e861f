"""Links that users' code planted below the runs: no download follows one, and nothing is written through one."""

import shutil

import pytest
from headrace_coordinator.api.http.downloads import _entries, _pieces
from headrace_coordinator.api.http.routes.fleet import read_log
from headrace_coordinator.data.items import DataItem
from headrace_coordinator.domain import events as ev
from headrace_coordinator.projections.lines import LineFile, read_lines, write_whole
from headrace_coordinator.projections.videos import Recording, Video, write_recordings
from headrace_coordinator.store.run_files import RunFiles
from headrace_servicekit.recording.recorder import RunRecorder
from history_parts import train

SECRET = b"a token outside"
VIDEO = Video.of(3, 0, DataItem("a-question", "", ""), success=True).name
RECORDING = "recordings/step-1.recording"
DOORS = {
    "checkpoints/lineage-1/step-9": ("checkpoints/lineage-1/step-9", "state.json"),
    "export": ("model", "config.json"),
    f"{RECORDING}/checkpoint": ("checkpoints/lineage-1/step-9", "state.json"),
    RECORDING: ("recordings", "step-1.recording"),
    f"videos/{VIDEO}": ("videos", VIDEO),
    f"videos/{VIDEO}/episode": ("videos", VIDEO.replace(".mp4", ".episode")),
}


@pytest.fixture
async def run(api, served, run_id):
    """A run's directory with something behind each door."""
    directory = served.runs / run_id
    for folder, name in DOORS.values():
        (directory / folder).mkdir(parents=True, exist_ok=True)
        (directory / folder / name).write_bytes(b"its own")
    recorder = RunRecorder(f"runs/{run_id}", directory / "recordings", keep="all")
    (directory / RECORDING).unlink()
    recorder.based("lineage-1/step-9", 9, "d", 0)
    recorder.begin(1)
    await recorder.end(lambda: ("{}", []))
    recorder.close()
    await train(served.event_log, 9, run=run_id)
    await served.post(
        ev.CheckpointSaved(at=0, run=run_id, name="lineage-1/step-9", number=10, step=9),
        ev.ModelExported(at=0, run=run_id, path=str(directory / "model"), number=10),
    )
    return directory


def parts_of(door):
    folder, name = DOORS[door]
    parts = ["", *folder.split("/"), name]
    return ["/".join(parts[1 : end + 1]) for end in range(len(parts))]


@pytest.mark.parametrize(("door", "part"), [(door, part) for door in DOORS for part in parts_of(door)])
async def test_no_download_follows_a_link(api, run, run_id, tmp_path, door, part):
    url = f"/v1/runs/{run_id}/{door}"
    before = await api.get(url)
    assert before.status_code == 200 and before.content
    folder, name = DOORS[door]
    outside = tmp_path / "outside"
    shutil.move(run / part, outside)
    (run / part).symlink_to(outside)
    if door != RECORDING:  # one that is none is not listed
        (run / folder / name).write_bytes(SECRET)
    answer = await api.get(url)
    assert (answer.status_code, SECRET in answer.content) == (404, False)


async def test_a_part_of_a_video_is_sent_too(api, run, run_id):
    answer = await api.get(f"/v1/runs/{run_id}/videos/{VIDEO}", headers={"Range": "bytes=4-6"})
    assert (answer.status_code, answer.content) == (206, b"own")


@pytest.mark.parametrize("part", ["run/checkpoint", "run/checkpoint/weights"])
def test_what_is_swapped_for_a_link_after_the_listing_is_not_sent(tmp_path, part):
    folder = tmp_path / "run" / "checkpoint"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"public")
    entries = _entries(tmp_path, folder, "checkpoint")
    shutil.move(tmp_path / part, tmp_path / "outside")
    (tmp_path / part).symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="symbolic link"):
        list(_pieces(tmp_path, entries))


@pytest.mark.parametrize("part", ["logs", "logs/rollout-0.log"])
def test_no_log_is_read_through_a_link(tmp_path, part):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rollout-0.log").write_bytes(SECRET)
    assert read_log(tmp_path / "logs", "rollout-0", "debug", 10)
    (tmp_path / part).rename(tmp_path / "outside")
    (tmp_path / part).symlink_to(tmp_path / "outside")
    assert read_log(tmp_path / "logs", "rollout-0", "debug", 10) is None


def append_to(history):
    event = ev.Noted(at=0, run="run", text="")
    with RunFiles.opened(history, write=True) as files:
        files.append([(1, event, ev.encode(event))])


WRITERS = {
    "videos/file": lambda runs, path: write_recordings(
        path.parents[1], [Recording(Video(path.name, 0, 0, success=True), b"", b"")]
    ),
    "metrics.jsonl": lambda runs, path: LineFile(path).append([b"{}"]),
    "position": lambda runs, path: write_whole(path, b"{}"),
    "history/events.sqlite3": lambda _, path: append_to(path.parent),
}


@pytest.mark.parametrize(
    ("file", "part"),
    [(file, part) for file in WRITERS for part in ("run", f"run/{file.split('/')[0]}", f"run/{file}")],
)
def test_nothing_is_written_through_a_link(tmp_path, file, part):
    runs, outside = tmp_path / "runs", tmp_path / "outside"
    whole = runs / "run" / file
    whole.parent.mkdir(parents=True)
    whole.write_bytes(SECRET)
    (runs / part).rename(outside)
    (runs / part).symlink_to(outside)
    kept = {path: path.read_bytes() for path in (outside, *outside.rglob("*")) if path.is_file()}
    try:
        WRITERS[file](runs, whole)
    except OSError as error:
        assert "symbolic link" in str(error)
    else:
        assert part == f"run/{file}" and not (runs / part).is_symlink(), "the link was replaced"
    assert {path: path.read_bytes() for path in (outside, *outside.rglob("*")) if path.is_file()} == kept


def test_no_lines_are_read_through_a_link(tmp_path):
    (tmp_path / "outside").write_bytes(SECRET + b"\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="symbolic link"):
        list(read_lines(tmp_path / "run" / "metrics.jsonl"))
