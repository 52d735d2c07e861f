"""A rollout that samples from other weights than it says is found by what the trainer computes of its tokens."""

from __future__ import annotations

WRONG_AT = 3
"""The install that goes wrong: the rollout answers as if it had taken it, and has other weights."""


def test_wrong_weights_fail_the_run_with_the_reason(own_fleet, spec_of):
    with own_fleet(HEADRACE_FAILPOINTS=f"rollout.install.load=skip@{WRONG_AT}") as fleet:
        changes = {"steps": 6, "limits__max_mismatch_kl": 1e-6, "placement__mode": "disaggregated"}
        ended = fleet.state(fleet.submit(spec_of(**changes)), "FAILED", timeout_s=200)
        assert "limits.max_mismatch_kl" in ended.reason and f"in step {WRONG_AT} " in ended.reason
        certificates = fleet.client.certificates(ended.id)
        assert [item.step for item in certificates] == list(range(1, WRONG_AT)), "the step is not recorded"
        assert all(item.log_prob_mismatch_kl < 1e-6 for item in certificates)
