"""What the tests of the service share: the header of every call, and how a refusal is checked."""

import grpc
import pytest
import torch
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
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


def check_log_probs(trajectory, model):
    """The policy's segments carry the model's log-probs at their own temperature, behind their branch's before them."""
    for branch in trajectory.branches:
        ids = [i for segment in branch.segments for i in segment.tokens.token_ids]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
        at = 0
        for segment in branch.segments:
            tokens = list(segment.tokens.token_ids)
            if segment.policy_number:
                log_probs = (logits / segment.tokens.distribution.temperature).log_softmax(-1)
                wanted = [float(log_probs[at + n - 1, token]) for n, token in enumerate(tokens)]
                assert list(segment.tokens.log_probs) == pytest.approx(wanted, abs=1e-4)
            at += len(tokens)


def install_files(rollout, number=1, digest="", checkpoint=""):
    """Installs weights that the instance reads from disk."""
    request = rollout_pb2.InstallPolicyRequest(
        header=HEADER, files=rollout_pb2.PolicyFiles(checkpoint=checkpoint)
    )
    request.version.number, request.version.digest = number, digest
    return rollout.stub.InstallPolicy(request)
