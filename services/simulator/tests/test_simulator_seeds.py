"""Seeds that environments get are below 2^32, whatever was asked: numpy's own generator takes no others."""

import pytest
from headrace.simulator.v1 import simulator_pb2
from headrace_simulator.pools.ledger import EnvironmentLedger


@pytest.mark.parametrize(
    ("asked", "given"),
    [(0, 0), (7, 7), (2**32 - 1, 2**32 - 1), (2**32, 1), (2**63 - 1, 2**32 - 1 ^ 2**31 - 1)],
)
def test_a_seed_is_one_that_numpy_takes(asked, given):
    told = simulator_pb2.EnvironmentOperation()
    told.reset.seed = asked
    ledger = EnvironmentLedger(0, asked, None)
    assert ledger.effective(told, 1).reset.seed == given
    told.reset.ClearField("seed")
    told.reset.SetInParent()
    assert ledger.effective(told, 1).reset.seed == given


def test_seeds_that_differ_above_stay_apart():
    told, ledger = simulator_pb2.EnvironmentOperation(), EnvironmentLedger(0, 0, None)
    found = set()
    for seed in range(0, 2**63 - 1, 2**63 // 1000):
        told.reset.seed = seed
        found.add(ledger.effective(told, 1).reset.seed)
    assert len(found) > 990 and max(found) < 2**32
