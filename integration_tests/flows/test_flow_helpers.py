"""Devices that move inside a step, on a real fleet: a helper takes groups while the tail decodes."""

from __future__ import annotations

import pytest
from harness.fleet import Fleet
from harness.ledger import audit

STEPS, GROUPS, SAMPLES = 5, 12, 4
SLOW = "rollout.round=delay:0.02;trainer.micro=delay:0.15"
"""Times that do not depend on how busy the machine is: a decode round, and a micro-batch of about one group."""


@pytest.fixture(scope="module")
def elastic(tmp_path_factory):
    """Two rollouts, an owner and a helper on two cores."""
    with Fleet(
        tmp_path_factory.mktemp("elastic") / "data", "--simulator", "0", "--rollout", "2", "--trainer", "2",
        HEADRACE_FAILPOINTS=SLOW,
    ) as made:  # fmt: skip
        yield made


def long_tailed(spec_of, **overrides):
    """Answers of a model that knows nothing end anywhere: a few of them late."""
    return spec_of(
        steps=STEPS,
        sampling__max_new_tokens=200,
        algorithm={"prompts_per_step": GROUPS, "group_size": SAMPLES},
        rollout__instances=2,
        trainer={"helpers": 1, "micro_batch_tokens": 96, "warmup": {"steps": 0}},
        reward={"scorers": [{"name": "length", "options": {"target": 1, "limit": 200}}]},
        checkpoint={"enabled": False},
        **overrides,
    )


def test_a_helper_learns_groups_while_the_tail_decodes(elastic, spec_of):
    elastic.ready("rollout-0", "rollout-1", "trainer-0", "trainer-1")
    run = elastic.succeed(elastic.submit(long_tailed(spec_of)))
    trained = audit(elastic, run).trained
    assert len(trained) == STEPS * GROUPS * SAMPLES and run.recoveries == 0
