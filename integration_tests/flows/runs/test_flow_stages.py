"""Workflows of the user's own on a real fleet: a second reward stage that sees what the first one let through."""

from __future__ import annotations

import pytest
from harness.ledger import audit
from harness.specs import BATCH

STEPS, LEAST = 2, 0.5
STAGES = {
    "generate": {"service": "rollout"},
    "score": {"service": "reward"},
    "judge": {"service": "reward"},
    "learn": {"service": "trainer"},
}
JUDGE = """
def score(prompt, completion, reference, metadata):
    with open({seen!r}, "a", encoding="utf-8") as file:
        file.write(repr(completion) + "\\n")
    return len(set(completion)) / 8
"""


@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_the_second_stage_sees_what_the_first_let_through(fleet, spec_of, tmp_path, mode):
    seen, scorer = tmp_path / "seen", tmp_path / "judge.py"
    seen.touch()
    seen.chmod(0o666)  # as root, users' code is another user
    scorer.write_text(JUDGE.format(seen=str(seen)), encoding="utf-8")
    # The first reward is 1 for an answer of one character and less for longer ones.
    spec = spec_of(
        steps=STEPS,
        placement__mode=mode,
        data__heldout=0,
        workflow={
            "stages": STAGES,
            "edges": [
                {"source": "generate", "target": "score"},
                {"source": "score", "target": "judge", "at_least": LEAST},
                {"source": "judge", "target": "learn", "granularity": "group"},
            ],
        },
        reward={
            "scorers": [{"name": "length", "options": {"target": 1, "limit": 4}}],
            "stages": {"judge": [{"name": f"{scorer}:score", "weight": 0.5}]},
        },
    )
    run = fleet.succeed(fleet.submit(spec))
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * BATCH and not found.dropped

    answers = fleet.client.trajectories(run.id)
    assert len(answers) == STEPS * BATCH
    passed = [each for each in answers if each.stage_rewards["score"] >= LEAST]
    assert 0 < len(passed) < len(answers), "the test needs answers of both kinds"
    for each in answers:
        assert ("judge" in each.stage_rewards) == (each in passed)
        assert each.reward == pytest.approx(sum(each.stage_rewards.values()))
    part = "judge/judge.py:score"
    assert all(each.stage_rewards["judge"] == pytest.approx(each.parts[part] / 2) for each in passed)
    # An opening tries the scorers with a blank answer; all else that the second scorer saw had passed the first.
    asked = [line for line in seen.read_text(encoding="utf-8").splitlines() if line != repr("")]
    assert set(asked) == {repr(each.completion) for each in passed if each.completion}

    for certificate in found.live:
        of_step = [each for each in answers if each.step == certificate.step]
        judged = [each for each in of_step if each in passed]
        assert certificate.scored_by_stage == {"score": BATCH, "judge": len(judged)}
        mean = sum(each.stage_rewards["judge"] for each in judged) / len(judged)
        assert certificate.reward_by_stage["judge"] == pytest.approx(mean)
    assert all({"score", "judge"} <= step.stage_s.keys() for step in fleet.client.metrics(run.id))
