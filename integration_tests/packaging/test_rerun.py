"""`headrace[rerun]`: a recording that the CLI writes is read back by rerun-sdk itself, without a viewer."""

import base64
import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
VIDEO = Path(__file__).with_name("six_frames.mp4")
"""16 × 16 pixels, 20 frames a second: the start and what five actions led to."""

SCRIPT = """
import base64, json, sys
from pathlib import Path
import numpy as np
from headrace_cli.rerun_files import write_rrd
from headrace_servicekit.rpc.episodes import Episode
from rerun.chunk import RrdReader

valid = np.array([[True, True], [True, True], [True, False]])
episode = Episode(
    observation={
        "state": np.arange(12, dtype=np.float32).reshape(3, 4),
        "image/front": np.full((3, 8, 8, 3), 7, np.uint8),
    },
    sampled={"actions": np.zeros((3, 2, 2), np.float32)},
    executed_TCA=np.arange(12, dtype=np.float32).reshape(3, 2, 2),
    valid_TC=valid,
    log_probs_TCA=np.zeros((3, 2, 2), np.float32),
    rewards_TC=np.where(valid, 0.5, 0).astype(np.float32),
    successes_TC=np.array([[False, False], [False, False], [True, False]]),
    terminated=False,
    truncated=True,
    values_T=np.array([1.0, 2.0, 3.0], np.float32),
    final_observation={"state": np.full(4, 9, np.float32), "image/front": np.full((8, 8, 3), 8, np.uint8)},
)
video = base64.b64decode(sys.argv[1])
write_rrd(Path("one.rrd"), episode, video, name="push-1")
reader = RrdReader("one.rrd")
found = {"recordings": [[each.application_id, each.recording_id] for each in reader.recordings()]}
for chunk in reader.stream():
    batch = chunk.to_record_batch()
    for name in batch.schema.names:
        rows = batch[name].to_pylist()
        if name.endswith(":blob"):
            rows = [base64.b64encode(bytes(row[0])).decode() for row in rows]
        if name == "time":
            rows = [each.total_seconds() for each in rows]
        if ":" in name or name in ("step", "time"):
            found.setdefault(chunk.entity_path, {})[name] = rows
print(json.dumps(found, default=str))
"""


@pytest.fixture(scope="module")
def installed(make_environment):
    environment = make_environment("rerun")
    environment.install(
        "headrace-proto",
        "headrace-servicekit",
        "headrace-schema",
        "headrace-planner",
        "headrace[rerun]",
        pins="rerun.txt",
    )
    return environment


def test_a_recording_holds_the_episode_and_its_video(installed):
    content = base64.b64encode(VIDEO.read_bytes()).decode()
    found = json.loads(installed.run("-", content, given=SCRIPT))
    assert found["recordings"] == [["headrace", "push-1"]]
    assert found["/video"]["AssetVideo:blob"] == [content]
    assert found["/video"]["step"] == [0, 1, 2, 3, 4, 5]
    nanoseconds = [ns for [ns] in found["/video"]["VideoFrameReference:timestamp"]]
    assert nanoseconds == [50_000_000 * frame for frame in range(6)]
    assert found["/video"]["time"] == pytest.approx([0.05 * frame for frame in range(6)])

    def series(entity):
        return found[entity]["step"], found[entity]["Scalars:scalars"]

    assert series("/action") == ([0, 1, 2, 3, 4], [[2 * k, 2 * k + 1] for k in range(5)])
    assert series("/reward") == ([1, 2, 3, 4, 5], [[0.5]] * 5)
    assert series("/return")[1] == [[0.5], [1.0], [1.5], [2.0], [2.5]]
    assert series("/success") == ([1, 2, 3, 4, 5], [[0], [0], [0], [0], [1]])
    assert series("/value") == ([0, 2, 4], [[1], [2], [3]])
    steps, states = series("/observation/state")
    assert (steps, states[0], states[-1]) == ([0, 2, 4, 5], [0, 1, 2, 3], [9, 9, 9, 9])
    pictures = found["/observation/image/front"]
    assert pictures["step"] == [0, 2, 4, 5]
    assert base64.b64decode(pictures["EncodedImage:blob"][0]).startswith(b"\x89PNG")
