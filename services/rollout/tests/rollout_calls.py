"""What the tests of the service share: the header of every call, and how a refusal is checked."""

import grpc
import pytest
from headrace.common.v1 import common_pb2
from headrace_servicekit.rpc.errors import message_of, reason_of

RUN = "runs/test"
HEADER = common_pb2.CommandHeader(request_id="r", run=RUN, coordinator_epoch=1, lease_epoch=1)


async def refused(awaitable, reason, *words):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    assert reason_of(caught.value) == reason, caught.value
    for word in words:
        assert word in message_of(caught.value)
    return caught.value.code()
