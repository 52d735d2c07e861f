"""The audit itself: what the other tests rely on finds each kind of broken ledger."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from harness.ledger import audit
from headrace.client import Certificate, Event, Run

SPEC = {"algorithm": {"group_size": 2, "prompts_per_step": 1, "max_staleness": 0}}


def certificate(ordinal, **changes):
    number = ordinal + 1
    fields = {
        "version": {"number": number, "parent": number - 1, "ordinal": ordinal, "digest": f"{ordinal:032x}"},
        "step": ordinal - 1,
        "trained": [[ordinal - 1, 0, 1], [ordinal - 1, 1, 2]],
        "set_digest": f"{100 + ordinal:032x}",
        "tokens": 5,
        "tokens_by_version": {str(number - 1): 5},
        "max_staleness": 0,
        "mean_staleness": 0.0,
    }
    return Certificate.from_json({"live": True, **fields, **changes})


def check(*certificates, **counts):
    restored = Event.from_json(
        {
            "id": 1,
            "type": "version_restored",
            "data": {"number": 1, "parent": 0, "ordinal": 0, "frontier_step": 0},
        }
    )
    found = {"trained": 4, "dropped": 0, "duplicates": 0, "frontier": 4, **counts}
    client = SimpleNamespace(certificates=lambda run: list(certificates))
    fleet = SimpleNamespace(client=client, events=lambda run: [restored])
    return audit(fleet, Run.from_json({"id": "r", "step": 2, "spec": SPEC, "counts": found}))


def test_a_sound_ledger_passes():
    assert len(check(certificate(1), certificate(2)).trained) == 4


BROKEN = {
    "trained twice": {"trained": [[0, 0, 3], [1, 0, 1], [1, 1, 2]]},
    "lost": {"trained": [[1, 0, 1]]},
    "beyond the frontier": {"trained": [[1, 0, 1], [1, 1, 2], [2, 0, 3]]},
    "dropped and trained": {"dropped": [[1, 0, "GROUP_INCOMPLETE"]]},
    "another branch": {"version": {"number": 3, "parent": 1, "ordinal": 2, "digest": "0" * 32}},
    "a number again": {"version": {"number": 2, "parent": 1, "ordinal": 2, "digest": "0" * 32}},
    "a step left out": {"version": {"number": 3, "parent": 2, "ordinal": 3, "digest": "0" * 32}},
    "stale": {"max_staleness": 1},
    "sampled by another version": {"tokens_by_version": {"1": 5}},
    "tokens that nobody sampled": {"tokens": 6},
    "no set digest": {"set_digest": ""},
    "the set digest of another": {"set_digest": f"{101:032x}"},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_ledger_is_found(name):
    with pytest.raises(AssertionError):
        check(certificate(1), certificate(2, **BROKEN[name]))


def test_counts_are_not_believed():
    with pytest.raises(AssertionError):
        check(certificate(1), certificate(2), trained=5)
