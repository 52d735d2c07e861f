"""Every method of every service gets bytes that are no message, and messages that are wrong in one field.

Whatever comes, the caller gets a clear refusal or an ordinary answer, the service logs at most one line and no
traceback, and goes on. Fixed seeds: a failure names the method and the field.
"""

from __future__ import annotations

import itertools
import json
import zlib

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from harness import nasty
from harness.alone import CALL_S, SERVICES, Coordinator, Service, channel_to
from harness.by_hand import DISTRIBUTION, SAMPLES, Engine, Learner, digest_of, header
from harness.fake_fleet import RUN, FakeFleet
from harness.valkey import Valkey
from headrace.common.v1 import common_pb2, weights_pb2
from headrace.coordinator.v1 import fleet_pb2
from headrace.reward.v1 import reward_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
from headrace.trainer.v1 import trainer_pb2
from headrace_servicekit.rpc.digests import trajectory_digest
from headrace_servicekit.rpc.errors import reason_of
from headrace_servicekit.rpc.tensors import encode_tensor

LEARN, GENERATE = 11, 12
DIGESTS: set[str] = set()
MUTANTS = 120
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
            assert said.count("refused a request") <= 1, f"{where}\n{said}"
        if error is not None and error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            assert reason_of(error), f"{where}: no google.rpc.Status"
            assert self.state() == state, f"{where} was refused and changed the service's state"
            # Runs that an earlier session told of are closed, and that is logged, in their own time.
            own = [line for line in said.splitlines() if "fleet.reconciler" not in line]
            assert len(own) <= 1, f"{where}\n{said}"
        return error


WEIGHTS = "headrace.common.v1.WeightService"


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


def reward_target(service):
    config = json.dumps({"scorers": [{"name": "exact"}]})
    attempts = itertools.count(1)

    def score():
        item = reward_pb2.ScoreItem(
            sample=common_pb2.SampleKey(prompt_ordinal=1, sample_index=1),
            attempt=next(attempts),
            prompt="1+1=",
            completion="2",
            reference="2",
            metadata_json='{"level": 1}',
            finish_reason=common_pb2.FINISH_REASON_EOS,
            token_count=1,
        )
        return [reward_pb2.ScoreRequest(header=header(), items=[item])]

    valid = {
        "ListScorers": lambda: [reward_pb2.ListScorersRequest(page_size=1, page_token="1")],
        "OpenRun": lambda: [reward_pb2.OpenRunRequest(header=header(), config_json=config)],
        "Score": score,
        "CloseRun": lambda: [reward_pb2.CloseRunRequest(header=header(run="runs/another"))],
    }
    return Target(service, SERVICES["reward"], valid)


def simulator_target(service):
    opening = simulator_pb2.OpenPoolRequest(
        header=header(),
        environment=simulator_pb2.Environment(backend="gymnasium", name="CartPole-v1"),
        count=1,
        options_json="{}",
        seed=3,
        max_episode_steps=10,
    )
    opening.step_timeout.FromSeconds(5)
    with channel_to(service.address) as channel:
        call = channel.unary_unary(
            f"/{SERVICES['simulator']}/OpenPool",
            simulator_pb2.OpenPoolRequest.SerializeToString,
            simulator_pb2.OpenPoolResponse.FromString,
        )
        pool = call(opening, timeout=CALL_S)
    names = {"pool": pool.pool, "pool_incarnation": pool.pool_incarnation}

    def step():
        reset = simulator_pb2.EnvironmentOperation(
            environment=0, step_index=0, reset=simulator_pb2.ResetOperation(seed=3, options_json="{}")
        )
        action = simulator_pb2.EnvironmentOperation(
            environment=0, step_index=1, action=encode_tensor(np.asarray(1, dtype=np.int64))
        )
        return [
            simulator_pb2.StepRequest(header=header(), operations=[operation], **names)
            for operation in (reset, action)
        ]

    def another_pool():
        request = simulator_pb2.OpenPoolRequest()
        request.CopyFrom(opening)
        return [request]

    valid = {
        "ListEnvironments": lambda: [simulator_pb2.ListEnvironmentsRequest(page_size=1, page_token="1")],
        "OpenPool": another_pool,
        "Step": step,
        "Render": lambda: [simulator_pb2.RenderRequest(pool=pool.pool, environments=[0])],
        "ClosePool": lambda: [simulator_pb2.ClosePoolRequest(header=header(), pool="pools/another")],
    }
    return Target(service, SERVICES["simulator"], valid)


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


def rollout_target(service, engine, published, model):
    config = json.dumps({"model": {"path": str(model), "dtype": "float32"}, "rollout": {}, "seed": 3})
    keys = [common_pb2.SampleKey(prompt_ordinal=99, sample_index=1)]
    attempts = itertools.count(100)

    def generate():
        opening = rollout_pb2.GenerateOpen(
            header=header(GENERATE),
            policy_number=1,
            distribution=DISTRIBUTION,
            max_new_tokens=2,
            stop=["x"],
            seed=3,
            chunk_tokens=1,
        )
        sample = rollout_pb2.SampleAssignment(sample_index=0, attempt=next(attempts))
        sample.resume.token_ids.append(5)
        sample.resume.log_probs.append(-1.0)
        sample.resume.version_spans.add(policy_number=1, token_count=1)
        sample.resume.rng_position = 1
        prompt = rollout_pb2.Prompt(token_ids=rollout_pb2.TokenIds(values=[5, 6]))
        group = rollout_pb2.GroupAssignment(prompt_ordinal=7, prompt=prompt, samples=[sample])
        return [
            rollout_pb2.GenerateRequest(open=opening),
            rollout_pb2.GenerateRequest(assign=rollout_pb2.AssignGroups(groups=[group])),
        ]

    def install():
        number, digest = published.version.number, published.version.digest
        return [
            rollout_pb2.InstallPolicyRequest(
                header=header(GENERATE),
                version=common_pb2.PolicyVersion(number=number + next(attempts), digest=digest),
                manifest=published.manifest,
                sources=[published.source],
            )
        ]

    def plain(name, **fields):
        message = getattr(rollout_pb2, f"{name}Request")
        own = {} if name == "RunEpisodes" else {"header": header(GENERATE)}
        return lambda: [message(**own, **fields)]

    valid = {
        "OpenRun": plain("OpenRun", config_json=config),
        "Generate": generate,
        "RunEpisodes": plain(
            "RunEpisodes", open=rollout_pb2.RunEpisodesOpen(header=header(GENERATE), policy_number=1)
        ),
        "Score": plain(
            "Score",
            sequences=[rollout_pb2.ScoreSequence(token_ids=[5, 6, 7], start=1)],
            distribution=DISTRIBUTION,
        ),
        "Abort": plain("Abort", samples=keys),
        "ListInventory": plain("ListInventory"),
        "FetchTrajectories": plain("FetchTrajectories", samples=keys),
        "ReleaseTrajectories": plain("ReleaseTrajectories", samples=keys),
        "Resume": plain("Resume"),
        "Wake": plain("Wake", scope=rollout_pb2.WAKE_SCOPE_KV_CACHE),
        "InstallPolicy": install,
        "Pause": plain("Pause"),
        "Suspend": plain("Suspend"),
        "CloseRun": lambda: [rollout_pb2.CloseRunRequest(header=header(run="runs/another"))],
    }

    def state():
        return engine.stub.ListInventory(rollout_pb2.ListInventoryRequest(header=header()), timeout=CALL_S)

    return Target(service, SERVICES["rollout"], valid, state=state)


def trainer_target(service, learner, groups, model):
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "algorithm": {"group_size": SAMPLES, "prompts_per_step": 2},
        "optimizer": {"lr": 1e-3},
        "trainer": {},
        "sampling": {"max_new_tokens": 4},
        "checkpoint": {},
        "seed": 3,
        "steps": 100,
    }
    attempts = itertools.count(1)
    numbers = itertools.count(1000)

    def plain(rpc, **fields):
        message = getattr(trainer_pb2, f"{rpc}Request")
        return lambda: [message(header=header(LEARN), **fields)]

    def learn():
        attempt, number = next(attempts), next(numbers)
        learner.begin(attempt, next_number=number)
        request = trainer_pb2.LearnRequest(header=header(LEARN), step=0, attempt=attempt)
        request.groups.extend(groups)
        return [request]

    def commit():
        attempt, number = next(attempts), next(numbers)
        learner.begin(attempt, next_number=number)
        return [
            trainer_pb2.CommitStepRequest(
                header=header(LEARN),
                step=0,
                attempt=attempt,
                base_number=1,
                next_number=number,
                set_digest=digest_of(groups),
                step_manifest=b"manifest",
            )
        ]

    def begin():
        attempt, number = next(attempts), next(numbers)
        return [
            trainer_pb2.BeginStepRequest(
                header=header(LEARN), step=0, attempt=attempt, base_number=1, next_number=number
            )
        ]

    published = learner.publish()

    def add():
        """A leader takes what has the shape of a gradient: here its own weights."""
        attempt, number = next(attempts), next(numbers)
        learner.begin(attempt, next_number=number)
        given = trainer_pb2.Contribution(
            step=0,
            attempt=attempt,
            base=published.version,
            next_number=number,
            name=f"{RUN}/helpers/one",
            gradient=published.manifest,
            source=published.source,
            token_sums={"tokens": 3.0},
        )
        group = given.groups.add(prompt_ordinal=5, trained_sequence_count=1, token_count=3)
        group.members.add(sample_index=0, attempt=1, body_digest="digest")
        group.tokens_by_version[1] = 3
        group.rewards.append(1.0)
        group.answer_lengths.append(3)
        return [
            trainer_pb2.AddContributionRequest(
                header=header(LEARN), step=0, attempt=attempt, contribution=given, helper="trainer-1"
            )
        ]

    def newest():
        request = trainer_pb2.ListCheckpointsRequest(header=header())
        return learner.stub.ListCheckpoints(request, timeout=CALL_S).checkpoints[0].name

    join = plain("JoinGang", generation=1, rank=0, world_size=1, rendezvous="127.0.0.1:0")
    valid = {
        "OpenRun": plain("OpenRun", config_json=json.dumps(config), run_directory=str(learner.directory)),
        "BeginStep": begin,
        "Learn": learn,
        "AbortStep": plain("AbortStep", step=0, attempt=1),
        "CommitStep": commit,
        "RecordStep": plain("RecordStep", step=0, attempt=1, number=1),
        "GetStepState": plain("GetStepState"),
        "Infer": plain(
            "Infer", kind=trainer_pb2.INFER_KIND_LOG_PROBS, trajectories=[groups[0].members[0].trajectory]
        ),
        "PublishPolicy": plain("PublishPolicy", number=1),
        "Help": plain(
            "Help", version=published.version, manifest=published.manifest, sources=[published.source]
        ),
        "TakeContribution": plain("TakeContribution", step=0, attempt=1),
        "AddContribution": add,
        "SaveCheckpoint": plain("SaveCheckpoint", number=1, wait=True, ledger=b"{}"),
        "ListCheckpoints": plain("ListCheckpoints", page_size=1, page_token="1"),
        "FetchLedger": lambda: [trainer_pb2.FetchLedgerRequest(header=header(LEARN), checkpoint=newest())],
        "ExportModel": plain("ExportModel", name="export"),
        "Restore": lambda: [
            trainer_pb2.RestoreRequest(header=header(LEARN), number=next(numbers), store_id="x")
        ],
        "Wake": plain("Wake"),
        "JoinGang": join,
        "Suspend": plain("Suspend"),
        "LeaveGang": plain("LeaveGang", generation=1),
        "CloseRun": lambda: [trainer_pb2.CloseRunRequest(header=header(run="runs/another"))],
    }
    return Target(service, SERVICES["trainer"], valid, _with_right_digests, learner.state)


def _with_right_digests(message):
    """So that the digest is not all that is wrong with a changed trajectory."""
    for group in getattr(message, "groups", ()):
        for member in group.members:
            if member.trajectory.body_digest in DIGESTS:
                member.trajectory.body_digest = trajectory_digest(member.trajectory)


def weights_target(service, published):
    fields = {"run": RUN, "number": published.version.number}
    valid = {
        "GetManifest": lambda: [weights_pb2.GetManifestRequest(**fields)],
        "FetchWeights": lambda: [weights_pb2.FetchWeightsRequest(offset_bytes=4, **fields)],
    }
    return Target(service, WEIGHTS, valid)


@pytest.fixture(scope="module")
def coordinator(folder):
    with Valkey(folder / "store") as store, Coordinator(folder / "coordinator", store.url) as service:
        yield coordinator_target(service)


def coordinator_target(service):
    opened = common_pb2.OpenRunReport(
        run="runs/a", open_id=1, phase=common_pb2.OPEN_PHASE_OPEN, last_command=1
    )
    registration = fleet_pb2.RegisterRequest(
        instance="reward-0",
        incarnation="one",
        kind=fleet_pb2.SERVICE_KIND_REWARD,
        address="127.0.0.1:1",
        host="here",
        devices=["here/cpu:0"],
        open_runs=["runs/a"],
        open_run_reports=[opened],
        held_leases=[common_pb2.Lease(epoch=1, run="runs/a")],
    )
    registration.capabilities["scorers"].values.append("exact")

    def heartbeat():
        beat = fleet_pb2.Heartbeat(sequence=1, lease_epochs=[1], resident_memory_bytes=5, open_runs=[opened])
        held = fleet_pb2.LeaseHeld(epoch=1, refusal="no")
        draining = fleet_pb2.Draining()
        draining.grace.FromSeconds(1)
        return [
            fleet_pb2.SessionRequest(incarnation="one", heartbeat=beat),
            fleet_pb2.SessionRequest(incarnation="one", lease_held=held),
            fleet_pb2.SessionRequest(incarnation="one", lease_released=fleet_pb2.LeaseReleased(epoch=1)),
            fleet_pb2.SessionRequest(incarnation="one", draining=draining),
        ]

    def supervise():
        process = fleet_pb2.SupervisedProcess(
            instance="a", incarnation="two", kind=fleet_pb2.SERVICE_KIND_REWARD, pid=3
        )
        table = fleet_pb2.ProcessTable(processes=[process], scalable_kinds=[fleet_pb2.SERVICE_KIND_REWARD])
        end = fleet_pb2.ProcessExit(instance="a", incarnation="two", exit_status=1, last_words="words")
        result = fleet_pb2.ScaleResult(
            request_id="r", kind=fleet_pb2.SERVICE_KIND_REWARD, count=1, error="none"
        )
        return [
            fleet_pb2.SuperviseRequest(host="here", processes=table),
            fleet_pb2.SuperviseRequest(host="here", exit=end),
            fleet_pb2.SuperviseRequest(host="here", scale_result=result),
        ]

    valid = {"Register": lambda: [registration], "Session": heartbeat, "Supervise": supervise}
    return Target(service, "headrace.coordinator.v1.FleetService", valid)


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
