"""The services that get wrong messages, each with valid requests of its methods."""

from __future__ import annotations

import itertools
import json

import numpy as np
from headrace.common.v1 import common_pb2, weights_pb2
from headrace.coordinator.v1 import fleet_pb2
from headrace.reward.v1 import reward_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace.simulator.v1 import simulator_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_servicekit.rpc.digests import trajectory_digest
from headrace_servicekit.rpc.tensors import encode_tensor

from harness.services.alone import CALL_S, SERVICES, channel_to
from harness.services.by_hand import DISTRIBUTION, SAMPLES, digest_of, header
from harness.services.fake_fleet import RUN
from harness.wire.target import WEIGHTS, Target

LEARN, GENERATE = 11, 12
DIGESTS: set[str] = set()


def reward_target(service):
    config = json.dumps({"scorers": [{"name": "exact"}]})
    attempts = itertools.count(1)

    def score():
        item = reward_pb2.ScoreItem(
            sample=common_pb2.SlotKey(prompt_ordinal=1, sample_index=1),
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
        "StepLocally": lambda: [simulator_pb2.StepLocallyRequest(pool="pools/another")],
        "Render": lambda: [simulator_pb2.RenderRequest(pool=pool.pool, environments=[0])],
        "ClosePool": lambda: [simulator_pb2.ClosePoolRequest(header=header(), pool="pools/another")],
    }
    return Target(service, SERVICES["simulator"], valid)


def rollout_target(service, engine, published, model):
    config = json.dumps({"model": {"path": str(model), "dtype": "float32"}, "rollout": {}, "seed": 3})
    keys = [common_pb2.SlotKey(prompt_ordinal=99, sample_index=1)]
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
        "Follow": lambda: [rollout_pb2.FollowRequest(run=RUN, rank=1, instance="another")],
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

    join = plain("JoinTrainerGroup", generation=1, rank=0, world_size=1, rendezvous="127.0.0.1:0")
    valid = {
        "OpenRun": plain("OpenRun", config_json=json.dumps(config), run_directory=str(learner.directory)),
        "BeginStep": begin,
        "Learn": learn,
        # Refused by the run, which is no session, once its fields are read.
        "ComputeLoss": plain(
            "ComputeLoss",
            loss="ppo",
            options={"clip_low_threshold": 0.8},
            sequences=[trainer_pb2.LossSequence(token_ids=[1, 2], targets=[2, 3], log_probs=[-1.0, -1.0])],
        ),
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
        "JoinTrainerGroup": join,
        "Suspend": plain("Suspend"),
        "LeaveTrainerGroup": plain("LeaveTrainerGroup", generation=1),
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
        # Of a version that is not there: a broadcast without its other members takes seconds to fail.
        "JoinBroadcast": lambda: [
            weights_pb2.JoinBroadcastRequest(run=RUN, number=99, host="127.0.0.1", receivers=1)
        ],
        "ShareDeviceMemory": lambda: [weights_pb2.ShareDeviceMemoryRequest(**fields)],
    }
    return Target(service, WEIGHTS, valid)


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

    valid = {
        "Register": lambda: [registration],
        "Session": heartbeat,
        "Supervise": supervise,
        "Relay": lambda: [
            fleet_pb2.RelayRequest(),
            fleet_pb2.RelayRequest(connection=1, data=b"x", ended=True),
        ],
    }
    return Target(service, "headrace.coordinator.v1.FleetService", valid)
