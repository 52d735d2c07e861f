"""Every method of every service gets bytes that are no message, and messages that are wrong in one field.

Whatever comes, the caller gets a clear refusal or an ordinary answer, the service logs at most one line and no
traceback, and goes on. Fixed seeds: a failure names the method and the field.
"""

from __future__ import annotations

import zlib

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from harness.services.alone import CALL_S, Coordinator, Service, channel_to
from harness.services.by_hand import Engine, Learner, header
from harness.services.fake_fleet import FakeFleet
from harness.valkey import Valkey
from harness.wire import nasty
from harness.wire.target import Target
from harness.wire.targets import (
    DIGESTS,
    GENERATE,
    LEARN,
    coordinator_target,
    reward_target,
    rollout_target,
    simulator_target,
    trainer_target,
    weights_target,
)
from headrace.common.v1 import common_pb2
from headrace.coordinator.v1 import fleet_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
from headrace_servicekit.rpc.errors import reason_of
from headrace_servicekit.rpc.tensors import encode_tensor

MUTANTS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def reward_and_simulator(folder):
    flags = {"HEADRACE_SIMULATOR_CHILDREN": "1"}
    with (
        Service("reward", folder / "reward") as reward,
        Service("simulator", folder / "simulator", **flags) as simulator,
    ):
        yield {"reward": reward_target(reward), "simulator": simulator_target(simulator)}


@pytest.fixture(scope="module")
def pair(folder, tiny_model):
    """A trainer and a rollout with leases, an open run and one installed version."""
    with FakeFleet() as fleet:
        flags = ("--coordinator", fleet.address, "--devices", "cpu:0")
        made = [
            Service(kind, folder / kind, "--name", f"{kind}-0", *flags) for kind in ("trainer", "rollout")
        ]
        with made[0] as trainer, made[1] as rollout:
            with channel_to(trainer.address) as to_trainer, channel_to(rollout.address) as to_rollout:
                fleet.grant("trainer-0", LEARN)
                fleet.grant("rollout-0", GENERATE)
                learner = Learner(to_trainer, LEARN, folder / "run")
                engine = Engine(to_rollout, GENERATE)
                learner.open(tiny_model)
                learner.join(1)
                learner.restore(1)
                engine.open(tiny_model)
                engine.wake(rollout_pb2.WAKE_SCOPE_WEIGHTS)
                published = learner.publish()
                engine.install(published)
                engine.wake(rollout_pb2.WAKE_SCOPE_KV_CACHE)
                engine.stub.Resume(rollout_pb2.ResumeRequest(header=header()), timeout=CALL_S)
                groups = learner.settle(engine.generate(1, [0]))
                DIGESTS.update(member.trajectory.body_digest for member in groups[0].members)
                yield {
                    "rollout": rollout_target(rollout, engine, published, tiny_model),
                    "trainer": trainer_target(trainer, learner, groups, tiny_model),
                    "weights": weights_target(trainer, published),
                }


@pytest.fixture(scope="module")
def coordinator(folder):
    with Valkey(folder / "store") as store, Coordinator(folder / "coordinator", store.url) as service:
        yield coordinator_target(service)


SETS = {
    "reward": "reward_and_simulator",
    "simulator": "reward_and_simulator",
    "rollout": "pair",
    "trainer": "pair",
    "weights": "pair",
    "coordinator": "coordinator",
}


@pytest.fixture(params=SETS)
def target(request):
    found = request.getfixturevalue(SETS[request.param])
    return found if isinstance(found, Target) else found[request.param]


def test_bytes_that_are_no_message_are_refused(target):
    with channel_to(target.service.address) as channel:
        for method in target.methods.values():
            for index, data in enumerate(nasty.junk(zlib.crc32(method.name.encode()), 8)):
                error = target.check(channel, method, [data], f"junk {index} {data[:20]!r}")
                if index < len(nasty.UNDECODABLE):
                    assert error is not None, method.full_name
                    assert reason_of(error) in ("UNDECODABLE", "UNIMPLEMENTED"), (
                        f"{method.full_name}: {error.details()}"
                    )
    assert target.service.health() == health_pb2.HealthCheckResponse.SERVING


def test_empty_streams_break_nothing(target):
    with channel_to(target.service.address) as channel:
        for method in target.methods.values():
            if method.client_streaming:
                target.check(channel, method, [], "no message")
                target.check(channel, method, [b""], "an empty message")
    assert target.service.health() == health_pb2.HealthCheckResponse.SERVING


def test_one_wrong_field_is_refused_or_harmless(target):
    assert set(target.valid) == set(target.methods), "every method has a valid request to start from"
    failures = []
    with channel_to(target.service.address) as channel:
        for name, make in target.valid.items():
            method = target.methods[name]
            right = target.check(channel, method, [m.SerializeToString() for m in make()], "nothing wrong")
            if right is not None:
                assert right.code() is not grpc.StatusCode.INVALID_ARGUMENT, right.details()
                # Nothing that was sent before has raised what the instance obeys, or closed its run.
                assert reason_of(right) not in ("EPOCH_STALE", "OPENING_STALE"), f"{name}: {right.details()}"
                assert "call OpenRun first" not in right.details(), f"{name}: {right.details()}"
            for index, message in enumerate(make()):
                seed = zlib.crc32(f"{method.full_name}{index}".encode())
                for what, wrong in nasty.mutants(message, seed, MUTANTS):
                    if target.repair is not None:
                        target.repair(wrong)
                    messages = make()
                    messages[index] = wrong
                    try:
                        target.check(channel, method, [m.SerializeToString() for m in messages], what)
                    except AssertionError as failure:
                        failures.append(str(failure))
            assert target.service.health() == health_pb2.HealthCheckResponse.SERVING, name
    assert not failures, f"{len(failures)} requests:\n" + "\n".join(failures)


def sent(target, name, *messages):
    """The error that these messages are refused with."""
    with channel_to(target.service.address) as channel:
        method = target.methods[name]
        error = target.check(channel, method, [message.SerializeToString() for message in messages], name)
    assert error is not None, "the request was taken"
    return error


SUPERVISOR = fleet_pb2.ProcessTable()
UNKNOWN_PHASE = common_pb2.OpenRunReport(run="runs/a", open_id=1, phase=77)


def registered(**fields):
    kind = fleet_pb2.SERVICE_KIND_REWARD
    return fleet_pb2.RegisterRequest(instance="a", incarnation="x", kind=kind, **fields)


@pytest.mark.parametrize(
    ("name", "messages", "field"),
    [
        ("Session", [], "incarnation"),
        ("Session", [fleet_pb2.SessionRequest(heartbeat=fleet_pb2.Heartbeat(sequence=1))], "incarnation"),
        ("Session", [fleet_pb2.SessionRequest(incarnation="one"), fleet_pb2.SessionRequest()], "incarnation"),
        ("Supervise", [fleet_pb2.SuperviseRequest(processes=SUPERVISOR)], "host"),
        (
            "Supervise",
            [fleet_pb2.SuperviseRequest(host=host, processes=SUPERVISOR) for host in ("h", "i")],
            "host",
        ),
        ("Register", [fleet_pb2.RegisterRequest(instance="a\nb", incarnation="x")], "instance"),
        ("Register", [fleet_pb2.RegisterRequest(instance="a", incarnation="x", kind=77)], "kind"),
        ("Register", [registered(coordinator_epoch=2**31)], "coordinator_epoch"),
        ("Register", [registered(open_run_reports=[UNKNOWN_PHASE])], "open_run_reports.phase"),
        (
            "Session",
            [
                fleet_pb2.SessionRequest(
                    incarnation="one", heartbeat=fleet_pb2.Heartbeat(open_runs=[UNKNOWN_PHASE])
                )
            ],
            "heartbeat.open_runs.phase",
        ),
    ],
)
def test_a_lifeline_that_begins_wrong_is_refused_by_name(coordinator, name, messages, field):
    sent_registration = coordinator.valid["Register"]()
    with channel_to(coordinator.service.address) as channel:
        coordinator.send(
            channel, coordinator.methods["Register"], [m.SerializeToString() for m in sent_registration]
        )
    error = sent(coordinator, name, *messages)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(f"{field}: "), error.details()


@pytest.mark.parametrize("shape", [[0, 2**62], [2**62, 0, 8], [2**31, 2**31, 2**31]])
def test_an_impossible_action_is_refused_and_the_environment_goes_on(reward_and_simulator, shape):
    target = reward_and_simulator["simulator"]
    (opening,) = target.valid["OpenPool"]()
    opening.header.request_id = f"shape {shape}"
    action = common_pb2.Tensor(data_type=common_pb2.DATA_TYPE_INT64, shape=shape, data=b"")
    with channel_to(target.service.address) as channel:
        stub = simulator_pb2_grpc.SimulatorServiceStub(channel)
        pool = stub.OpenPool(opening, timeout=CALL_S)

        def perform(**operation):
            request = simulator_pb2.StepRequest(
                header=header(),
                pool=pool.pool,
                pool_incarnation=pool.pool_incarnation,
                operations=[simulator_pb2.EnvironmentOperation(**operation)],
            )
            (response,) = stub.Step(iter([request]), timeout=CALL_S)
            return response.outcomes[0]

        perform(step_index=0, reset=simulator_pb2.ResetOperation(seed=1))
        outcome = perform(step_index=1, action=action)
        assert outcome.status == simulator_pb2.OUTCOME_STATUS_REFUSED and "limit" in outcome.detail
        right = encode_tensor(np.asarray(1, dtype=np.int64))
        assert perform(step_index=1, action=right).status == simulator_pb2.OUTCOME_STATUS_OK
