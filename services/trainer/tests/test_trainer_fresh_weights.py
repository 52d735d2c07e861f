"""Every forward uses the weights of the last commit, whatever ran before it."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
import torch

ACTIONS = 3


def flat(values):
    return torch.tensor([value for row in values for value in row])


def actions(backend, group):
    """What can happen to a backend between two looks at its log-probs."""

    def learn():
        assert backend.micro([group])

    def non_finite():
        broken = [msgspec.structs.replace(s, advantages=[math.nan] * len(s.trained)) for s in group]
        assert not backend.micro([broken])

    return {
        "infer": lambda: backend.infer([group], ["old_log_probs"]),
        "learn": learn,
        "non-finite": non_finite,
        "commit": lambda: backend.commit(10.0, 1e-2),
    }


@pytest.mark.parametrize("reshard", [False, True], ids=["kept whole", "resharded"])
def test_log_probs_are_the_weights_after_any_order_of_actions(
    make_backend, sequences, plain_log_probs, reshard
):
    """Every order of `ACTIONS` actions before a commit; each order begins where the one before has ended."""
    backend = make_backend(trainer={"backend_options": {"shard": "weights" if reshard else "state"}})
    group = sequences(1)
    done = actions(backend, group)
    done["learn"]()
    done["commit"]()  # from here on the moments move the weights without a gradient
    for order in itertools.product(done, repeat=ACTIONS):
        for name in (*order, "commit"):
            done[name]()
        expected = flat(plain_log_probs(backend.weights(), group))
        found = flat([own["old_log_probs"] for own in backend.infer([group], ["old_log_probs"])])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4, msg=f"after {order} and a commit")
