"""Workflows of the user's own on a real fleet: a second reward stage that sees what the first one let through, and a
second policy that answers the one that learns.
"""

from __future__ import annotations

import pytest
from harness.ledger import audit
from harness.specs import BATCH
from headrace.client import Workflow

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
    part = f"judge/{scorer}:score"
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


REFEREE = """
def score(prompt, completion, reference, metadata):
    return sum(character in "12345" for character in completion) / 16
"""


def test_two_policies_answer_each_other(fleet, spec_of, tiny_model, tmp_path):
    """A frozen policy replies twice; the exchange is scored whole, and the tokens of the answers alone are trained."""
    referee = tmp_path / "referee.py"
    referee.write_text(REFEREE, encoding="utf-8")
    flow = Workflow()
    exchange = flow.reply(
        flow.answers, path=str(tiny_model), turns=2, before=" 0", after="=", max_new_tokens=3, temperature=0.5
    )
    flow.learn(flow.score(exchange, scorers=[]))
    spec = spec_of(steps=2, reward={"scorers": [{"name": f"{referee}:score"}]})
    run = fleet.succeed(fleet.submit(flow.into(spec)))
    found = audit(fleet, run)
    assert len(found.trained) == 2 * BATCH and not found.dropped
    assert all(certificate.max_staleness == 0 for certificate in found.live)

    answers = fleet.client.trajectories(run.id, limit=100)
    assert len(answers) == 2 * BATCH
    assert all(each.completion.count(" 0") >= 2 and each.completion.count("=") >= 2 for each in answers)
    for certificate in found.live:
        of_step = [each for each in answers if each.step == certificate.step]
        # Three answers of at most four tokens each; replies and the text around them are longer and not among them.
        assert certificate.tokens == sum(each.tokens for each in of_step)
        assert all(3 <= each.tokens <= 12 for each in of_step)
        # The engine's log-probs of all answers are the trainer's, replies in their context included.
        assert certificate.log_prob_mismatch_mean < 1e-3
        assert certificate.log_prob_compared_tokens == certificate.tokens
