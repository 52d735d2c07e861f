"""The journal of a session: what is durable, where a rewound run goes on; and what a desk does with its calls."""

from __future__ import annotations

import pytest
from headrace_coordinator.run.asked.sampling import alike
from headrace_coordinator.run.asked.step import counted, problem_of
from headrace_coordinator.sessions.desk import AskedSample, Desk
from headrace_coordinator.sessions.journal import Journal
from headrace_schema.sessions import (
    Datum,
    Failure,
    Forward,
    ForwardBackward,
    ForwardResult,
    Load,
    LoadResult,
    OptimStep,
    OptimStepResult,
    Publish,
    PublishResult,
    Sample,
)

GRADIENT = ForwardBackward(data=[Datum(tokens=[1, 2], targets=[2, 3], weights=[0, 1])])
TOLD = ForwardResult(kind="forward_backward", log_probs=[[-1.0, -2.0]], metrics={"loss:sum": 2.0})
FAILED = Failure(category="user", message="no")


def step(version):
    return OptimStepResult(version=version, step=version, metrics={})


def written(folder, calls):
    """A journal of (call, result or None)."""
    journal = Journal(folder)
    for seq, (call, result) in enumerate(calls, 1):
        journal.keep(seq, call)
        if result is not None:
            journal.settle(seq, result)
    return journal


def test_a_journal_that_is_read_again_knows_calls_results_and_names(tmp_path):
    journal = written(tmp_path, [(GRADIENT, TOLD), (OptimStep(), FAILED), (Publish(), None)])
    journal.keep(5, Publish())
    journal.name("one", {"checkpoint": "a/b", "step": 1, "version": 2, "size_bytes": 3, "created": 4.0})
    journal.close()
    again = Journal(tmp_path)
    assert again.end == 3 and again.kinds[5] == "publish" and again.closed
    assert (again.call(1), again.result(1), again.result(2), again.result(3)) == (
        GRADIENT,
        TOLD,
        FAILED,
        None,
    )
    assert again.named == journal.named and again.named["one"]["version"] == 2
    again.name("one", None)
    assert Journal(tmp_path).named == {}


def test_a_result_that_a_power_cut_left_empty_is_none_and_is_settled_again(tmp_path):
    written(tmp_path, [(GRADIENT, TOLD)])
    (file,) = (tmp_path / "calls").glob("*.ok.json")
    file.write_bytes(b"")
    again = Journal(tmp_path)
    assert again.outcomes == {} and again.result(1) is None and again.call(1) == GRADIENT
    again.settle(1, TOLD)
    assert Journal(tmp_path).result(1) == TOLD


@pytest.mark.parametrize(
    ("terminal", "position"),
    [
        (0, 0),
        (2, 4),  # two gradients and their step; the call that failed between them counts as none
        (3, 8),  # a gradient that a load has dropped
        (4, 10),  # a step that failed: its gradient was dropped, too
        (5, 12),  # the last step has no result yet: the coordinator ended before it was written
    ],
)
def test_a_run_goes_on_behind_the_step_that_its_ledger_has(tmp_path, terminal, position):
    calls = [
        (GRADIENT, TOLD),
        (GRADIENT, FAILED),
        (GRADIENT, TOLD),
        (OptimStep(), step(2)),
        (OptimStep(), FAILED),  # without a gradient
        (GRADIENT, TOLD),
        (Load(checkpoint="x"), FAILED),
        (Load(checkpoint="one"), LoadResult(version=3)),
        (GRADIENT, TOLD),
        (OptimStep(), FAILED),
        (GRADIENT, TOLD),
        (OptimStep(), None),
        (Publish(), PublishResult(version=4)),
    ]
    assert written(tmp_path, calls).position(terminal) == position


def test_calls_that_no_checkpoint_lacks_are_deleted_and_their_results_stay(tmp_path):
    journal = written(tmp_path, [(GRADIENT, TOLD), (OptimStep(), step(2)), (GRADIENT, TOLD)])
    journal.prune(2)
    assert sorted(path.name for path in tmp_path.glob("calls/*.call.json")) == [
        "00000003.forward_backward.call.json"
    ]
    again = Journal(tmp_path)
    assert again.end == 3 and again.result(2) == step(2) and again.position(1) == 2


async def test_a_number_and_a_key_are_used_once_and_latest_is_bound_when_it_is_asked_for(tmp_path):
    news = []
    desk = Desk(tmp_path, lambda: news.append(1))
    await desk.keep(1, GRADIENT)
    await desk.keep(1, Publish())
    assert desk.journal.call(1) == GRADIENT and desk.next_seq == 2 and news
    desk.published = 7
    key = desk.ask("k", Sample(prompt=[1]))
    assert desk.ask("k", Sample(prompt=[2])) == key and len(desk.waiting) == 1
    assert desk.sample("k").request.weights == "7" and desk.busy


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (Forward(data=[Datum(tokens=[1, 2], targets=[2])]), "data[0].targets"),
        (Forward(data=[Datum(tokens=[1], targets=[2], weights=[1, 1])]), "data[0].weights"),
        (Forward(data=[Datum(tokens=[1], targets=[2])], loss="ppo"), "data[0].advantages"),
        (
            Forward(data=[Datum(tokens=[1], targets=[2], advantages=[1])], loss="cispo"),
            "data[0].log_probs",
        ),
        (Forward(data=[Datum(tokens=[1], targets=[2])], options={"beta": 1}), "options.beta"),
        (GRADIENT, ""),
        (Publish(), ""),
    ],
)
def test_what_does_not_fit_together_is_named(call, key):
    found = problem_of(call)
    assert (found.key if found else "") == key
    assert found is None or (found.category == "user" and ";" in found.message)


def test_tokens_that_count_are_those_with_a_weight():
    assert (
        counted(GRADIENT) == 1 and counted(ForwardBackward(data=[Datum(tokens=[1, 2], targets=[2, 3])])) == 2
    )


def test_samples_that_differ_in_their_prompts_alone_are_of_one_stream_and_those_with_a_seed_alone():
    asked = {
        "a": Sample(prompt=[1], max_tokens=4),
        "b": Sample(prompt=[2, 3], max_tokens=4, samples=8),
        "c": Sample(prompt=[1], max_tokens=5),
        "d": Sample(prompt=[1], max_tokens=4, seed=7),
        "e": Sample(prompt=[2], max_tokens=4, seed=7),
        "f": Sample(prompt=[4], max_tokens=4),
    }

    def keys(streams):
        made = alike([AskedSample(key, request) for key, request in asked.items()], streams)
        return sorted("".join(each.key for each in some) for some in made)

    assert keys(1) == ["abf", "c", "d", "e"]
    assert keys(2) == ["af", "b", "c", "d", "e"], "as many streams as there are rollouts"
