"""Files below a folder are opened without following a link; folders in shared places are this user's alone."""

import os
from contextvars import copy_context
from pathlib import Path

import grpc
import pytest
from headrace.common.v1 import common_pb2
from headrace_servicekit.folders import (
    new_below,
    open_below,
    own_folder,
    read_below,
    remove_below,
    replace_below,
)
from headrace_servicekit.memory.blobs import BlobReader, BlobStore
from headrace_servicekit.memory.segments import make_private
from headrace_servicekit.process.supervise import main as supervise
from headrace_servicekit.recording.recorder import RunRecorder, write_wanted
from headrace_servicekit.rpc.errors import ServiceError

PARTS = ("run", "run/videos", "run/videos/file")
SECRET = "a token outside"


@pytest.fixture
def planted(tmp_path):
    """Makes a part of runs/run/videos/file a link to a copy outside; what is outside stays as it is."""
    outside = tmp_path / "outside"

    def plant(part):
        runs, elsewhere = tmp_path / "runs", outside / part
        (runs / part).parent.mkdir(parents=True, exist_ok=True)
        whole = outside / PARTS[-1]
        whole.parent.mkdir(parents=True)
        whole.write_text(SECRET)
        (runs / part).symlink_to(elsewhere)
        return runs, runs / PARTS[-1]

    yield plant
    assert [path.relative_to(outside).as_posix() for path in outside.rglob("*")] == [*PARTS]
    assert (outside / PARTS[-1]).read_text() == SECRET


@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_read_through_a_link(planted, part):
    runs, path = planted(part)
    assert path.read_text() == SECRET, "the link leads there"
    with pytest.raises(OSError, match="symbolic link") as refused:
        read_below(runs, path)
    assert refused.value.filename == str(runs / part)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("write", [new_below, replace_below])
def test_nothing_is_written_or_removed_through_a_link(planted, part, write):
    runs, path = planted(part)
    remove_below(runs, path.parent)
    if part == PARTS[-1]:  # the link itself is replaced
        with write(runs, path) as file:
            file.write(b"new")
        assert not path.is_symlink() and path.read_text() == "new"
        return
    with pytest.raises(OSError, match="symbolic link"):
        with write(runs, path) as file:
            file.write(b"new")


@pytest.mark.parametrize("part", [".file.partial"])
def test_a_link_in_place_of_what_is_on_its_way_is_replaced(tmp_path, part):
    outside = tmp_path / "outside"
    outside.write_text(SECRET)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / part).symlink_to(outside)
    with replace_below(tmp_path, tmp_path / "run" / "file") as file:
        file.write(b"new")
    assert (outside.read_text(), (tmp_path / "run" / "file").read_text()) == (SECRET, "new")


def test_a_root_may_be_a_link_and_a_path_may_not_lead_up(tmp_path):
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "disk" / "run" / "file").write_text("kept")
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    assert read_below(tmp_path / "runs", tmp_path / "runs" / "run" / "file").read() == b"kept"
    for path in (tmp_path / "runs" / ".." / "other", tmp_path / "other", Path("runs/file")):
        with pytest.raises(OSError, match="not below"):
            open_below(tmp_path / "runs", path)


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="regular"):
        read_below(tmp_path, tmp_path / "pipe")


@pytest.mark.parametrize("part", ["", "recordings", "recordings/.segments"])
async def test_a_recording_is_not_written_through_a_link(tmp_path, part):
    outside, run = tmp_path / "outside", tmp_path / "runs" / "r"
    outside.mkdir()
    (run / part).parent.mkdir(parents=True, exist_ok=True)
    (run / part).symlink_to(outside)
    if part != "recordings/.segments":
        with pytest.raises(OSError, match="symbolic link"):
            write_wanted(run / "recordings", [1])
    recorder = RunRecorder("runs/r", run / "recordings", keep="all")
    recorder.begin(1)
    recorder.write(_part())
    await recorder.end(lambda: ("{}", []))
    recorder.close()
    assert not any(outside.rglob("*"))
    assert "symbolic link" in recorder.trouble


def _part():
    from headrace_servicekit.recording.files import Part

    return Part(call=1)


async def test_a_body_of_users_code_is_no_link_and_no_pipe(tmp_path):
    """Users' code of a simulator writes into the folder of blobs."""
    secret = tmp_path / "token"
    secret.write_text(SECRET)
    (tmp_path / "i1").mkdir()
    store = BlobStore(tmp_path / "i1")
    (store.folder / "writer-a-0").symlink_to(secret)
    os.mkfifo(store.folder / "writer-b-0")
    for name in ("writer-a-0", "writer-b-0"):
        reference = store.adopt(common_pb2.BlobRef(blob_id=name, size_bytes=len(SECRET), digest="d"))
        with pytest.raises(ServiceError, match="cannot be read"):
            store.open(reference)
        with pytest.raises(ServiceError, match="names no address"):
            reference.producer_address = ""
            await BlobReader(tmp_path, None).read(reference)


# --- folders in places that all share


@pytest.fixture
def shared(tmp_path):
    """A place like /tmp."""
    place = tmp_path / "tmp"
    place.mkdir()
    place.chmod(0o1777)
    return place


def _link(path):
    (path.parent / "theirs").mkdir(mode=0o700)
    path.symlink_to(path.parent / "theirs")


def _of_another_user(path):
    if os.getuid() != 0:
        pytest.skip("only root makes folders of other users")
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


def _open_to_all(path):
    path.mkdir()
    path.chmod(0o777)


def _a_file(path):
    path.write_text("")


PLANTED = [
    (_link, "symbolic link"),
    (_of_another_user, "a folder of user 12345"),
    (_open_to_all, "open to other users"),
    (_a_file, "no folder"),
]


@pytest.mark.parametrize(("plant", "words"), PLANTED)
def test_a_planted_folder_is_refused_by_all_who_use_one(shared, plant, words, monkeypatch, capsys):
    path = shared / "headrace-0"
    plant(path)
    with pytest.raises(PermissionError, match=words) as refused:
        own_folder(path, "set KEY")
    assert str(refused.value.filename) == str(path) and "remove it, or set KEY" in str(refused.value)
    with pytest.raises(ServiceError, match=words) as told:
        make_private(path)
    assert told.value.code == grpc.StatusCode.FAILED_PRECONDITION and "--shm-dir" in told.value.message
    told = ["--kind", "reward", "--log-dir", str(path), "--", "true"]
    assert copy_context().run(supervise, told) == 2  # its name in log lines stays its own
    assert f"{path}: " in (said := capsys.readouterr().err) and "--log-dir" in said


def test_a_folder_of_ones_own_is_made_closed_and_taken_again(shared, tmp_path):
    path = own_folder(shared / "headrace-0", "")
    assert (path.stat().st_mode & 0o777, own_folder(path, "")) == (0o700, path)
    mounted = tmp_path / "weights"  # as an administrator made it, where nobody else makes any
    _open_to_all(mounted)
    assert own_folder(mounted, "") == mounted
