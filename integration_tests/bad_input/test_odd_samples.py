"""Samples that teach nothing or cannot be made: defined, counted and shown."""

from __future__ import annotations

import json

from harness.ledger import audit
from harness.specs import BATCH, GROUPS, SAMPLES

LONG = "0123456789" * 3


def questions(path, short, long):
    items = [{"question": f"{n:03d}=", "answer": f"{n:03d}"} for n in range(short)]
    items += [{"question": f"{n}{LONG}=", "answer": "0"} for n in range(long)]
    path.write_text("\n".join(map(json.dumps, items)))
    return {"source": "jsonl", "options": {"path": str(path)}, "heldout": 0}


def test_a_prompt_beyond_the_context_is_dropped_and_shown(fleet, spec_of, tmp_path):
    spec = spec_of(
        steps=6, model__max_context=16, limits={"max_drop_rate": 1.0}, trainer__warmup={"steps": 0}
    )
    spec["data"] = {**spec["data"], **questions(tmp_path / "items.jsonl", 22, 2)}
    run = fleet.succeed(fleet.submit(spec))
    found = audit(fleet, run)
    assert set(found.dropped.values()) == {"PROMPT_TOO_LONG"}
    assert len(found.dropped) == 2 * SAMPLES == run.counts.dropped, "once an epoch, with their whole groups"
    assert sum(step.dropped for step in fleet.client.metrics(run.id)) == 2 * SAMPLES
    rates = [item.raw["drop_rate_by_length"] for item in found.live if item.dropped]
    assert all(rate.get("0") == 1.0 for rate in rates), "the drops are shown by length"
    assert "PROMPT_TOO_LONG" in fleet.headrace("run", "logs", run.id).stdout


def test_too_many_drops_end_the_run(fleet, spec_of, tmp_path):
    spec = spec_of(steps=50, model__max_context=16, trainer__warmup={"steps": 0})
    spec["data"] = {**spec["data"], **questions(tmp_path / "items.jsonl", 0, 24)}
    ended = fleet.client.wait(fleet.submit(spec).id, 240)
    assert ended.state == "FAILED" and ended.reason.startswith("the prompt does not fit model.max_context (")
    assert ended.reason.endswith("(limits.max_drop_rate)")


def scorer(tmp_path, body):
    path = tmp_path / "mine.py"
    path.write_text(f"def score(prompt, completion, reference, metadata):\n    {body}\n")
    return {"scorers": [{"name": f"{path}:score"}], "evaluation": [{"name": "exact"}]}


def test_groups_without_a_difference_are_counted(fleet, spec_of, tmp_path):
    run = fleet.succeed(fleet.submit(spec_of(steps=2, reward=scorer(tmp_path, "return 0.5"))))
    assert len(audit(fleet, run).trained) == 2 * BATCH
    for step in fleet.client.metrics(run.id):
        assert step.figures["groups_all_equal"] == GROUPS and step.reward_mean == 0.5


def test_empty_answers_are_samples_like_others(fleet, spec_of):
    stop = [str(digit) for digit in range(6)]  # more than half of all answers end before they begin
    run = fleet.succeed(fleet.submit(spec_of(steps=2, sampling__stop=stop)))
    answers = fleet.client.trajectories(run.id)
    empty = [answer for answer in answers if not answer.completion]
    assert empty and {answer.finish_reason for answer in empty} <= {"STOP", "EOS"}
    slots = {
        (prompt, sample) for item in fleet.client.certificates(run.id) for prompt, sample, _ in item.trained
    }
    assert len(slots) == 2 * BATCH == run.counts.trained


def test_steps_of_nothing_but_drops_are_skipped(fleet, spec_of, tmp_path):
    """Where whole steps are dropped no version is made; the next one is made from the same base."""
    spec = spec_of(
        steps=5, model__max_context=16, limits={"max_drop_rate": 1.0}, trainer__warmup={"steps": 0}
    )
    spec["data"] = {**spec["data"], **questions(tmp_path / "items.jsonl", 1, 8)}
    spec["algorithm"] = {"prompts_per_step": 1, "group_size": SAMPLES}
    run = fleet.succeed(fleet.submit(spec | {"steps": 9}))
    found = audit(fleet, run)
    assert (len(found.live), len(found.trained), len(found.dropped)) == (1, SAMPLES, 8 * SAMPLES)


def worth(completion):
    """What the scorer below says, and what an answer is worth that it cannot read."""
    try:
        return float(int(completion) % 2)
    except ValueError:
        return -1.0


def test_an_answer_that_breaks_the_scorer_gets_the_declared_reward(fleet, spec_of, tmp_path):
    reward = scorer(tmp_path, "return float(int(completion) % 2)") | {"failed_reward": -1.0}
    run = fleet.succeed(fleet.submit(spec_of(steps=2, reward=reward)))
    assert len(audit(fleet, run).trained) == 2 * BATCH
    answers = fleet.client.trajectories(run.id)
    assert [answer.reward for answer in answers] == [worth(answer.completion) for answer in answers]
    assert -1.0 in {answer.reward for answer in answers}


def test_a_scorer_that_breaks_in_the_run_drops_groups_and_ends_it(fleet, spec_of, tmp_path):
    (tmp_path / "scale").write_text("2.0")
    body = f"return float(open({str(tmp_path / 'scale')!r}).read()) * len(completion)"
    run = fleet.submit(spec_of(steps=10_000, reward=scorer(tmp_path, body)))
    fleet.reach(run, 1)
    (tmp_path / "scale").unlink()
    ended = fleet.client.wait(run.id, 240)
    assert ended.state == "FAILED" and ended.reason.startswith(
        "a scorer is broken: mine.py:score: FileNotFoundError"
    )
    assert ended.reason.endswith("(limits.max_drop_rate)")
    dropped = [event.data for event in fleet.events(run) if event.type == "group_dropped"]
    assert {data["reason"] for data in dropped} == {"GROUP_INCOMPLETE"}
    assert all("FileNotFoundError" in data["detail"] for data in dropped), dropped[:3]
    assert audit(fleet, ended).dropped


def test_questions_that_contradict_each_other_are_counted_and_shown(fleet, spec_of, tmp_path):
    pairs = [("012=", "012"), ("012=", "013"), *((f"{n:03d}=", f"{n:03d}") for n in range(20, 28))]
    file = tmp_path / "items.jsonl"
    file.write_text("\n".join(json.dumps({"question": q, "answer": a}) for q, a in pairs))
    spec = spec_of(steps=1, trainer__warmup={"steps": 0})
    spec["data"] = {**spec["data"], "source": "jsonl", "options": {"path": str(file)}, "heldout": 0}
    run = fleet.succeed(fleet.submit(spec))
    notes = [event.data["text"] for event in fleet.client.events(run.id) if event.type == "noted"]
    assert any("1 items repeat" in text and "1 questions are answered" in text for text in notes), notes
