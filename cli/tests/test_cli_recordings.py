"""`--rrd`: what it needs is said before anything is queued; what a coordinator kept of an episode is read as arrays."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from headrace.client import Client
from headrace_servicekit.rpc.episodes import Episode, encode_episode

NAME = "0000-0-push-success.mp4"


@pytest.fixture
def spec(tmp_path):
    file = tmp_path / "eval.yaml"
    file.write_text("model: {path: policies/push}\nsuite: {name: episodes, options: {starts: 8}}\n")
    return str(file)


def test_recordings_need_a_directory_and_the_extra(headrace, coordinator, spec, monkeypatch):
    alone = headrace("eval", spec, "--rrd")
    assert alone.returncode == 1 and "--rrd needs --videos DIR" in alone.stderr
    monkeypatch.setitem(sys.modules, "rerun", None)  # not installed
    for command in (("eval", spec, "--videos", "films"), ("eval", "videos", "eval-00001a", "films")):
        missing = headrace(*command, "--rrd")
        assert missing.returncode == 1 and "pip install 'headrace[rerun]'" in missing.stderr
    assert coordinator.requests("POST /v1/evaluations") == []


def test_each_video_gets_its_recording(headrace, coordinator, tmp_path, monkeypatch):
    """What is written is the coordinator's episode and video; only rerun-sdk itself is left out (nightly)."""
    written = []
    (tmp_path / "rerun.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        "headrace_cli.rerun_files.write_rrd",
        lambda path, episode, video, *, name: written.append((path, episode, video, name)),
    )
    base = "GET /v1/evaluations/eval-00001a/videos"
    video = {"name": NAME, "item": 0, "sample": 0, "success": True, "size_bytes": 4}
    coordinator.routes |= {
        base: (200, {"videos": [video]}),
        f"{base}/{NAME}": (200, "film"),
        f"{base}/{NAME}/episode": (200, encode_episode(episode()).SerializeToString()),
    }
    out = headrace("eval", "videos", "eval-00001a", "films", "--rrd")
    assert out.returncode == 0 and "each with its recording (.rrd)" in out.stderr
    [(path, found, content, name)] = written
    assert (path.name, content, name) == (
        "0000-0-push-success.rrd",
        b"film",
        "eval-00001a-0000-0-push-success",
    )
    np.testing.assert_array_equal(found.observation["state"], episode().observation["state"])
    with Client(coordinator.url) as client:
        assert client.episode("evaluations/eval-00001a", NAME).steps == 2


def episode() -> Episode:
    valid = np.array([[True], [True]])
    return Episode(
        observation={"state": np.arange(6, dtype=np.float32).reshape(2, 3)},
        sampled={"actions": np.zeros((2, 1, 2), np.float32)},
        executed_TCA=np.ones((2, 1, 2), np.float32),
        valid_TC=valid,
        log_probs_TCA=np.zeros((2, 1, 2), np.float32),
        rewards_TC=valid.astype(np.float32),
        successes_TC=valid,
        terminated=True,
        truncated=False,
    )
