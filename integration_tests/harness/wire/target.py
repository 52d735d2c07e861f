"""One running service as a target of wrong messages: its methods, its valid requests, and what a refusal may be."""

from __future__ import annotations

import grpc
from headrace.common.v1 import weights_pb2
from headrace.coordinator.v1 import fleet_pb2
from headrace.reward.v1 import reward_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace.simulator.v1 import simulator_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_servicekit.rpc.errors import reason_of

from harness.wire import nasty

CODES = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


class Target:
    """One running service, the valid requests of its methods, and calls with whatever instead of them."""

    def __init__(self, service, full_name, valid, repair=None, state=lambda: None):
        self.service, self.full_name, self.valid = service, full_name, valid
        self.repair, self.state = repair, state
        module = {
            "coordinator": fleet_pb2,
            "rollout": rollout_pb2,
            "trainer": trainer_pb2,
            "reward": reward_pb2,
            "simulator": simulator_pb2,
        }
        if full_name == WEIGHTS:
            descriptor = weights_pb2.DESCRIPTOR.services_by_name["WeightService"]
        else:
            kind = full_name.split(".")[1]
            descriptor = module[kind].DESCRIPTOR.services_by_name[full_name.split(".")[-1]]
        self.methods = {method.name: method for method in descriptor.methods}

    def send(self, channel, method, messages, timeout=30):
        """The status a caller gets for these bytes; None when the call succeeds."""
        arity = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        call = getattr(channel, arity)(nasty.path_of(method))
        sent = iter(messages) if method.client_streaming else messages[0]
        try:
            answer = call(sent, timeout=timeout)
            if method.server_streaming:
                for _ in answer:
                    pass
        except grpc.RpcError as error:
            return error
        return None

    def check(self, channel, method, messages, what):
        """Sends; fails unless the answer is an ordinary one and the log has at most one line more."""
        before, state = self.service.log, self.state()
        error = self.send(channel, method, messages)
        said = self.service.log[len(before) :]
        where = f"{method.full_name} with {what}"
        assert "Traceback" not in said and '"exception"' not in said, (
            f"{where}\n{str(error)[:300]}\n{said[:3000]}"
        )
        if error is not None:
            assert error.code() in CODES, f"{where}: {error.code()} {error.details()}\n{said}"
            assert error.details() and "failed unexpectedly" not in error.details(), where
            # A line that stands for earlier ones, which were not written, comes in its own time.
            told = [line for line in said.splitlines() if '"not_written"' not in line]
            assert sum("refused a request" in line for line in told) <= 1, f"{where}\n{said}"
        if error is not None and error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            assert reason_of(error), f"{where}: no google.rpc.Status"
            assert self.state() == state, f"{where} was refused and changed the service's state"
            # Runs that an earlier session told of are closed, and that is logged, in their own time.
            own = [line for line in told if "fleet.reconciler" not in line]
            assert len(own) <= 1, f"{where}\n{said}"
        return error


WEIGHTS = "headrace.common.v1.WeightService"
