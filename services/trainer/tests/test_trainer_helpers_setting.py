"""Which algorithms a run may have helpers with."""

from __future__ import annotations

import grpc
import pytest
from headrace_servicekit.rpc.errors import reason_of


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        ({"name": "ppo"}, "whole batch"),
        ({"name": "grpo", "options": {"epochs": 2}}, "whole batch"),
        ({"name": "grpo", "options": {"kl_loss_coef": 0.1}}, "reference"),
    ],
)
async def test_an_algorithm_that_cannot_be_helped_is_refused_as_the_run_opens(
    client, make_config, algorithm, why
):
    config = make_config(algorithm=algorithm, trainer={"helpers": 1})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.open_run(config)
    assert reason_of(caught.value) == "INVALID" and "trainer.helpers" in caught.value.details()
    assert why in caught.value.details()
