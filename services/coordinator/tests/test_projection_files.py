"""A run's derived files: complete, idempotent over restarts, and never in the run's way."""

import json
import logging
import os
import subprocess
import sys
import textwrap

import pytest
from headrace_coordinator.projections.projection import RunProjection
from headrace_coordinator.projections.reading import Filter, PageTokenError, read_rewards, read_trajectories
from headrace_coordinator.projections.trajectories import SettledTrajectory, is_kept, whole_groups
from headrace_schema.resources.evaluations import EvaluationView
from headrace_schema.sections.tracking import TrackingSection
from projection_parts import step_view


def evaluation_view(step: int) -> EvaluationView:
    return EvaluationView(
        kind="heldout", step=step, version=step, score=0.4, parts={"exact": 0.3}, answers=80, examples=[]
    )


def trajectory_view(
    step: int, ordinal: int, sample: int = 0, version: int = 1, **values
) -> SettledTrajectory:
    given = {
        "step": step,
        "version": version,
        "prompt_ordinal": ordinal,
        "sample_index": sample,
        "attempt": 1,
        "prompt": "1 + 1 =",
        "completion": "2",
        "reference": "2",
        "reward": 1.0,
        "parts": {"exact": 1.0},
        "finish_reason": "EOS",
        "tokens": 2,
    }
    return SettledTrajectory(**{**given, **values})


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_hold_a_line_a_step_and_an_evaluation(tmp_path):
    projection = RunProjection(tmp_path / "run")
    projection.spec({"name": "x"})
    projection.evaluation(evaluation_view(0))
    projection.step(step_view(0, figures={"loss": float("nan")}))
    projection.close()
    first, second = lines(tmp_path / "run" / "metrics.jsonl")
    assert (first["type"], first["kind"], first["score"]) == ("evaluation", "heldout", 0.4)
    assert (second["type"], second["tokens"], second["figures"]) == ("step", 100, {"loss": None})
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == {"name": "x"}


def test_what_was_projected_before_a_restart_is_not_written_again(tmp_path):
    for _ in range(2):
        projection = RunProjection(tmp_path)
        for step in range(3):
            projection.step(step_view(step))
            projection.trajectories([trajectory_view(step, 4 * step + group) for group in range(4)])
        projection.evaluation(evaluation_view(3))
        projection.close()
    assert len(lines(tmp_path / "metrics.jsonl")) == 4
    assert len(lines(tmp_path / "trajectories.jsonl")) == 12


def test_a_rewound_step_is_a_new_line_and_readers_take_the_last(tmp_path):
    projection = RunProjection(tmp_path)
    projection.step(step_view(0, version=1))
    projection.trajectories([trajectory_view(0, group, version=1, completion="old") for group in range(4)])
    projection.step(step_view(0, version=7))
    projection.trajectories([trajectory_view(0, group, version=7, completion="new") for group in range(2)])
    projection.close()
    assert [line["version"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 7]
    page = read_trajectories(tmp_path)
    assert [(view.prompt_ordinal, view.completion) for view in page.trajectories] == [(0, "new"), (1, "new")]


def test_a_slot_that_was_filled_again_is_shown_once(tmp_path):
    projection = RunProjection(tmp_path)
    projection.trajectories([trajectory_view(0, 0, completion="first")])
    projection.trajectories([trajectory_view(0, 0, attempt=2, completion="second")])
    projection.close()
    assert [view.completion for view in read_trajectories(tmp_path).trajectories] == ["second"]


def test_a_torn_line_is_closed_off_and_its_step_written_again(tmp_path):
    projection = RunProjection(tmp_path)
    projection.step(step_view(0))
    projection.trajectories([trajectory_view(0, 0)])
    projection.close()
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-20])
    projection = RunProjection(tmp_path)
    projection.step(step_view(0))
    projection.trajectories([trajectory_view(0, 0)])
    projection.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])["step"] == 0
    assert len(read_trajectories(tmp_path).trajectories) == 1


def test_a_step_keeps_a_spread_sample(tmp_path):
    projection = RunProjection(tmp_path, TrackingSection(trajectories_per_step=4))
    projection.trajectories([trajectory_view(0, ordinal) for ordinal in range(16)])
    projection.trajectories([trajectory_view(0, ordinal) for ordinal in range(16, 20)])
    projection.trajectories([trajectory_view(1, ordinal) for ordinal in range(2)])
    projection.close()
    kept = [(line["step"], line["prompt_ordinal"]) for line in lines(tmp_path / "trajectories.jsonl")]
    assert kept == [(0, 0), (0, 4), (0, 8), (0, 12), (1, 0), (1, 1)]


def test_files_are_rotated_and_pages_go_on_over_a_rotation(tmp_path):
    projection = RunProjection(tmp_path, trajectory_file_bytes=2000, trajectory_files=3)
    shown: list[int] = []
    token = ""
    for step in range(40):
        projection.trajectories([trajectory_view(step, step)])
        assert projection.flush()
        page = read_trajectories(tmp_path, token, 1)
        shown += [view.step for view in page.trajectories]
        token = page.next_page_token or token
    projection.close()
    full = sorted(path.name for path in tmp_path.glob("trajectories-*.jsonl"))
    assert len(full) == 3
    assert all(path.stat().st_size < 2500 for path in tmp_path.glob("trajectories*.jsonl"))
    assert shown == sorted(shown)
    whole = read_trajectories(tmp_path, "", 1000)
    assert whole.trajectories[-1].step == 39
    assert not whole.next_page_token


def test_pages_join_to_the_whole(tmp_path):
    projection = RunProjection(tmp_path, trajectory_file_bytes=1500)
    for step in range(5):
        projection.trajectories(
            [trajectory_view(step, 3 * step + group, sample) for group in range(3) for sample in (0, 1)]
        )
    projection.close()
    token, pages = "", []
    while True:
        page = read_trajectories(tmp_path, token, 4)
        pages.append([(view.step, view.prompt_ordinal, view.sample_index) for view in page.trajectories])
        token = page.next_page_token
        if not token:
            break
    assert [len(page) for page in pages] == [4] * 7 + [2]
    assert [slot for page in pages for slot in page] == [
        (step, 3 * step + g, s) for step in range(5) for g in range(3) for s in (0, 1)
    ]
    only = read_trajectories(tmp_path, only=Filter(step=2)).trajectories
    assert [view.step for view in only] == [2] * 6


def test_no_file_is_an_empty_page(tmp_path):
    assert read_trajectories(tmp_path / "none").trajectories == []


@pytest.mark.parametrize("token", ["x", "1", "1.", ".1", "-1.2", "1.2.3", "١.٢", "9" * 30 + ".1"])
def test_a_foreign_page_token_is_refused(tmp_path, token):
    with pytest.raises(PageTokenError):
        read_trajectories(tmp_path, token)


def test_a_failing_disk_is_logged_once_and_counted(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    projection = RunProjection(tmp_path / "file" / "run")
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            projection.step(step_view(step))
            projection.trajectories([trajectory_view(step, step)])
        assert projection.flush()
    projection.close()
    assert projection.failures == 10
    assert len([record for record in caplog.records if "incomplete" in record.message]) == 1


FULL_DISK = textwrap.dedent(
    """
    import resource, signal, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    from projection_parts import step_view
    from headrace_coordinator.projections.projection import RunProjection
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    projection = RunProjection(Path(sys.argv[1]))
    for step in range(10):
        projection.step(step_view(step))
    projection.flush()
    failed = projection.failures
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    projection.step(step_view(10))
    projection.close()
    print(failed > 0, projection.failures == failed)
    """
)


def test_lines_go_on_whole_when_the_disk_has_room_again(tmp_path):
    arguments = [sys.executable, "-c", FULL_DISK, str(tmp_path), os.path.dirname(__file__)]
    output = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert output.stdout.split() == ["True", "True"]
    whole = []
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        try:
            whole.append(json.loads(line)["step"])
        except ValueError:
            continue
    assert whole[0] == 0
    assert whole[-1] == 10


def test_a_full_queue_drops_instead_of_waiting(tmp_path, monkeypatch):
    fifo = tmp_path / "metrics.jsonl"
    os.mkfifo(fifo)  # Opening it blocks, as a hung disk does.
    monkeypatch.setattr("headrace_coordinator.projections.projection.QUEUE_LENGTH", 5)
    projection = RunProjection(tmp_path)
    for step in range(20):
        projection.step(step_view(step))
    assert projection.failures >= 14
    assert not projection.flush(timeout=0.05)
    projection.close(timeout=0.05)


def test_tensorboard_reads_the_scalars(tmp_path):
    projection = RunProjection(tmp_path)
    for step, version in ((0, 1), (1, 2), (2, 3), (1, 9)):
        projection.step(step_view(step, version, figures={"loss": 1e300, "entropy": float("nan")}))
    projection.evaluation(evaluation_view(2))
    projection.close()
    events = [event for path in (tmp_path / "tensorboard").iterdir() for event in read_events(path)]
    assert events[0].file_version == "brain.Event:2"
    rewards = [
        (event.step, value.simple_value)
        for event in events
        for value in event.summary.value
        if value.tag == "train/reward"
    ]
    assert rewards == [(0, 0.25), (1, 0.25), (2, 0.25), (1, 0.25)]
    purges = [event.step for event in events if event.HasField("session_log")]
    assert purges == [1]
    tags = {value.tag for event in events for value in event.summary.value}
    assert {
        "evaluation/heldout",
        "evaluation/heldout/exact",
        "stage_seconds/generate",
        "trainer/loss",
    } <= tags


def read_events(path):
    """Events of a file as tensorboardX's own messages, checksums verified by its own code."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data, at = path.read_bytes(), 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        assert int.from_bytes(data[at + 8 : at + 12], "little") == masked_crc32c(data[at : at + 8])
        body = data[at + 12 : at + 12 + length]
        assert int.from_bytes(data[at + 12 + length : at + 16 + length], "little") == masked_crc32c(body)
        yield Event.FromString(body)
        at += 16 + length


def test_projections_load_neither_torch_nor_tensorboard():
    program = (
        "import sys, headrace_coordinator.projections.projection\n"
        "print([name for name in ('torch', 'tensorboardX', 'numpy') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


def test_trajectories_are_sorted_and_filtered_page_by_page(tmp_path):
    projection = RunProjection(tmp_path, trajectory_file_bytes=2000)
    rewards = [0.5, 1.0, 0.0, 1.0, 0.25, 0.5]
    for step in range(3):
        views = [
            trajectory_view(step, 2 * step + index // 3, index % 3, reward=reward)
            for index, reward in enumerate(rewards)
        ]
        projection.trajectories(views)
    projection.close()

    def walk(**options):
        found, token = [], ""
        while True:
            page = read_trajectories(tmp_path, token, 4, **options)
            found += [(view.step, view.prompt_ordinal, view.sample_index) for view in page.trajectories]
            if not (token := page.next_page_token):
                return found

    spread = read_rewards(tmp_path, 2, bins=4)
    assert (spread.steps, spread.edges) == ([1, 2], [0.0, 0.25, 0.5, 0.75, 1.0])
    assert spread.counts == [[1, 1, 2, 2]] * 2
    oldest = walk()
    assert len(oldest) == 18 and oldest == sorted(oldest)
    assert walk(order="newest") == oldest[::-1]
    best = [oldest.index(each) % 6 for each in walk(order="best", only=Filter(step=1))]
    assert best == [1, 3, 0, 5, 4, 2]
    assert [oldest.index(each) % 6 for each in walk(order="worst", only=Filter(step=1))] == [2, 4, 0, 5, 1, 3]
    assert walk(only=Filter(prompt=3)) == [(1, 3, 0), (1, 3, 1), (1, 3, 2)]
    assert sorted(walk(order="best")) == oldest
    with pytest.raises(PageTokenError):
        read_trajectories(tmp_path, "1.7", order="best")


def test_trajectories_are_found_by_text_end_and_scorer_but_not_by_names_of_fields(tmp_path):
    projection = RunProjection(tmp_path)
    views = [
        trajectory_view(0, 0, 0, completion='He said "Zürich"'),
        trajectory_view(0, 0, 1, completion="no", finish_reason="LENGTH", parts={"exact": 0.0}),
        trajectory_view(0, 1, 0, prompt="ZÜRICH?", parts={"exact": -1.0}),
    ]
    projection.trajectories(views)
    projection.close()

    def found(**only):
        shown = read_trajectories(tmp_path, only=Filter(**only)).trajectories
        return [(view.prompt_ordinal, view.sample_index) for view in shown]

    assert found(search="zürich") == [(0, 0), (1, 0)]
    assert found(search='said "z') == [(0, 0)] and found(search="completion") == []
    assert found(finish_reason="LENGTH") == [(0, 1)] and found(failed="exact") == [(0, 1), (1, 0)]
    assert found(failed="exact", search="no") == [(0, 1)]


def test_log_probs_and_versions_of_a_trajectory_are_kept(tmp_path):
    projection = RunProjection(tmp_path)
    projection.trajectories(
        [trajectory_view(0, 0, versions=[(3, 1), (4, 1)], log_probs=[-0.5, float("-inf")])]
    )
    projection.close()
    (view,) = read_trajectories(tmp_path).trajectories
    assert (view.versions, view.log_probs) == ([(3, 1), (4, 1)], [-0.5, None])


def test_whole_groups_are_kept_of_a_step(tmp_path):
    projection = RunProjection(tmp_path, TrackingSection(trajectories_per_step=9))
    projection.trajectories([trajectory_view(0, group, sample) for group in range(8) for sample in range(4)])
    projection.trajectories([trajectory_view(1, group, sample) for group in range(2) for sample in range(4)])
    projection.trajectories([trajectory_view(2, 0, sample) for sample in range(18)])
    projection.close()
    kept: dict[tuple[int, int], list[int]] = {}
    for line in lines(tmp_path / "trajectories.jsonl"):
        kept.setdefault((line["step"], line["prompt_ordinal"]), []).append(line["sample_index"])
    whole = [0, 1, 2, 3]
    assert kept == {(0, 0): whole, (0, 4): whole, (1, 0): whole, (1, 1): whole, (2, 0): list(range(0, 18, 2))}


@pytest.mark.parametrize(
    ("groups", "size", "room"), [(8, 4, 9), (8, 4, 64), (3, 5, 15), (4, 16, 6), (7, 3, 0)]
)
def test_what_is_kept_of_the_slots_is_what_whole_groups_choose(groups, size, room):
    slots = [(place // size, place) for place in range(groups * size)]
    chosen = whole_groups(slots, room, lambda slot: slot[0])
    assert [place for _, place in slots if is_kept(place, groups, size, room)] == [
        place for _, place in chosen
    ]
