"""Opens a run: of a language model, or of what a workload recognises. Imports torch only as a run is opened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.errors import ModelNotReadable
from headrace_schema.images import MANY, READS, VISION_FAMILIES, Kind
from headrace_schema.openings import RolloutConfig, policy_model, role_model
from headrace_schema.sections.agent import AgentSection
from headrace_schema.sections.generating import ModelSection, engine_hosts
from headrace_schema.workflow import CONVERSATIONS, TOOLS
from headrace_servicekit.instance import InstanceConfig, host_memory
from headrace_servicekit.lease.devices import gpu_uuids
from headrace_servicekit.lease.leases import Memory
from headrace_servicekit.memory.blobs import BlobReader
from headrace_servicekit.problems import KeyProblem
from headrace_servicekit.registry import PluginError
from headrace_servicekit.rpc.addresses import advertised_host
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.stores.files import localized
from headrace_servicekit.stores.problems import StoreProblem

from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.base import Engine, EngineConfig, TellsLikeliest, Weights
from headrace_rollout.engines.beside import EngineBeside, Frozen
from headrace_rollout.engines.contract import require_engine
from headrace_rollout.engines.hosts import Hosts
from headrace_rollout.engines.samples import Distribution, SlotKey, Stream
from headrace_rollout.environments.pools import Pools
from headrace_rollout.runs.opened import (
    RETENTION_BYTES,
    ConversationRun,
    OnlineRun,
    OpenedRun,
    Retention,
    TextRun,
)
from headrace_rollout.sessions.template import TurnTemplate
from headrace_rollout.sessions.turns import Player
from headrace_rollout.wire import weights_of
from headrace_rollout.workloads import acting_policy

if TYPE_CHECKING:
    import torch
    from headrace_modelkit.tokenizer import TextCodec


@dataclass(frozen=True)
class Place:
    """Of an instance in an engine of several hosts: the other hosts where it leads, else whom it follows."""

    hosts: Hosts | None
    hello: rollout_pb2.FollowRequest
    leader: str
    address: str
    """Of this host, for the ranks of the others."""


def place_in(
    request: rollout_pb2.OpenRunRequest, run: str, config: RolloutConfig, instance: InstanceConfig
) -> Place | None:
    """The place that a request gives an instance; None where engines do not span hosts."""
    if not request.HasField("engine_group"):
        return None
    group = request.engine_group
    address = advertised_host(instance.listen, instance.advertise)
    followers = engine_hosts(config.rollout.engine_options) - 1
    hello = rollout_pb2.FollowRequest(run=run, rank=group.rank, instance=instance.name)
    return Place(Hosts(followers, address) if group.rank == 0 else None, hello, group.leader, address)


def open_run(
    name: str,
    config: RolloutConfig,
    leased: Sequence[str],
    shm_dir: Path,
    token: str | None,
    place: Place | None = None,
) -> OpenedRun:
    """Builds everything but the weights, on leased devices if there are any already.

    It takes seconds the first time, as it imports torch. Simulators on this host put observations below `shm_dir`, and
    are shown `token`.

    Raises ServiceError INVALID for an unknown engine or wrong options, and MODEL_NOT_READABLE.
    """
    blobs = BlobReader(shm_dir, token)
    try:
        config = localized(config)
        if (policy := acting_policy(config.model)) is None:
            return _text_run(name, config, leased, blobs, token, place)
        if config.workflow == CONVERSATIONS:
            raise ModelNotReadable(
                f"model.path: {config.model.path!r} holds a policy that acts, and a conversation is of a language "
                "model; set workflow: embodied, or give another model"
            )
        return policy.open_run(name, config, devices_of(leased), blobs, token)
    except PluginError as error:
        code = grpc.StatusCode.INVALID_ARGUMENT
        raise ServiceError(code, "INVALID", str(error), **error.metadata) from error
    except ModelNotReadable as error:
        raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "MODEL_NOT_READABLE", str(error)) from error
    except StoreProblem as problem:
        if problem.lasting:
            code, reason = grpc.StatusCode.INVALID_ARGUMENT, "MODEL_NOT_READABLE"
        else:
            code, reason = grpc.StatusCode.UNAVAILABLE, "STORE"
        raise ServiceError(code, reason, str(problem)) from problem


def _text_run(
    name: str,
    config: RolloutConfig,
    leased: Sequence[str],
    blobs: BlobReader,
    token: str | None,
    place: Place | None,
) -> TextRun:
    from headrace_modelkit.tokenizer import load_tokenizer

    if config.environment is not None and config.workflow != CONVERSATIONS:
        raise ModelNotReadable(
            f"model.path: {config.model.path!r} holds no policy that acts, and environment needs one; give a directory "
            "with policy.json, or model.policy"
        )
    chosen = ENGINES.choose(config.rollout.engine, config.rollout.engine_options)
    codec = load_tokenizer(config.model)
    settings = EngineConfig(
        config.model,
        codec,
        config.rollout.max_concurrency,
        devices_of(leased),
        config.routed_experts,
        config.adapters,
        place.hosts if place else None,
        config.deterministic,
        config.draft,
    )
    if place is not None and place.hosts is None:
        from headrace_rollout.engines.vllm.building import follow_vllm

        part = follow_vllm(chosen.read_options(), settings, place.hello, place.leader, place.address, token)  # type: ignore[arg-type]
        return TextRun(name, config, part, codec)

    def build(wanted: EngineConfig) -> Engine:
        engine = chosen.build(wanted)
        require_engine(chosen.name, engine)
        if config.deterministic and not engine.capabilities.deterministic:
            reason = "deterministic: true, and it computes log-probs by other kernels than the trainer"
            fix = "use the engine transformers, or set deterministic: false"
            raise PluginError([KeyProblem("rollout.engine", reason, fix)])
        if config.images and (wrong := _images_refused(chosen.name, engine, codec, config.images)):
            raise PluginError([wrong])
        return engine

    if config.environment is not None:
        policy = _player(config, build(settings), codec)
        others, engine = _players(config, settings, policy, build)
        pools = Pools(blobs, token, config.environment.step_timeout_s)
        return ConversationRun(name, config, engine, codec, policy, pools, others)
    if config.agent is not None and config.agent.online is not None:
        return _online_run(name, config, config.agent, build(settings), codec)
    if config.teacher is not None:
        return _taught_run(name, config, config.teacher, settings, build)
    return TextRun(name, config, build(settings), codec)


def _taught_run(
    name: str,
    config: RolloutConfig,
    section: ModelSection,
    settings: EngineConfig,
    build: Callable[[EngineConfig], Engine],
) -> TextRun:
    """A run whose teacher is beside its policy. Raises ModelNotReadable, and PluginError for one that reads less."""
    with _naming("trainer.reference.path"):
        teacher = build(replace(settings, model=section, adapters={}, routed_experts=False))
    engine = build(settings)
    if not (isinstance(teacher, TellsLikeliest) and teacher.capabilities.likeliest):
        reason = f"{config.rollout.engine} does not tell the likeliest words, which algorithm.options.top_k asks for"
        raise PluginError([KeyProblem("rollout.engine", reason, "use transformers or vllm")])
    if (most := teacher.max_context_tokens) < engine.max_context_tokens:
        reason = f"the teacher reads {most} tokens, and the policy {engine.max_context_tokens}"
        raise PluginError([KeyProblem("trainer.reference.path", reason, f"set model.max_context: {most}")])
    beside = EngineBeside(engine, [Frozen(teacher, _reader(config, section))])
    return TextRun(name, config, beside, settings.codec, teacher=teacher)


def _online_run(
    name: str, config: RolloutConfig, agent: AgentSection, engine: Engine, codec: TextCodec
) -> OnlineRun:
    from headrace_rollout.endpoint.answers import Terms
    from headrace_rollout.sessions.drivers.online import Desk

    assert agent.online is not None
    blind = _blind(engine, codec, config)
    template, sampling = (
        TurnTemplate(codec, config.prompt, blind=blind, files=engine.capabilities.files),
        config.sampling,
    )
    template.check()
    retention = Retention(RETENTION_BYTES)
    stream = Stream(
        0,
        Distribution(temperature=sampling.temperature),
        sampling.max_new_tokens,
        config.seed,
        lambda _: None,
        lambda _: None,
        tuple(sampling.stop),
    )
    asked, hints = agent.sampling == "request", agent.forms == "hint"
    terms = Terms(name, agent.tool_calls, agent.online.max_turns, asked=asked, hints=hints)
    policy = Player(engine, codec, template)

    def kept(key: SlotKey) -> bool:
        return retention.has(key.prompt_ordinal, key.sample_index)

    desk = Desk(config.endpoint_key, agent.online, terms, policy, stream, config.group_size, kept)
    return OnlineRun(name, config, engine, codec, desk, retention=retention)


def _player(config: RolloutConfig, engine: Engine, codec: TextCodec, **more: Any) -> Player:
    """A model with the form in which it reads messages. Raises ModelNotReadable for a template that has none."""
    assert config.environment is not None
    append = config.environment.rewritten_turns == "append"
    template = TurnTemplate(
        codec,
        config.prompt,
        append=append,
        blind=_blind(engine, codec, config),
        files=engine.capabilities.files,
    )
    template.check(tools=TOOLS in config.environment.tasks)
    return Player(engine, codec, template, **more)


def _players(
    config: RolloutConfig, settings: EngineConfig, policy: Player, build: Callable[[EngineConfig], Engine]
) -> tuple[dict[str, Player], Engine]:
    """Who plays each role that the config names, and the engines of all models as one.

    A frozen model that plays several roles is there once.
    """
    from headrace_modelkit.tokenizer import load_tokenizer

    assert config.environment is not None
    found: dict[str, Player] = {}
    policies: dict[str, Player] = {}
    apart: list[Engine] = []
    for name, section in config.policies.items():
        if config.adapters:
            policies[name] = replace(policy, adapter=name)
            continue
        model = policy_model(config.model, section)
        with _naming(f"policies.{name}.model.path"):
            codec = load_tokenizer(model)
            policies[name] = _player(config, build(replace(settings, model=model, codec=codec)), codec)
        apart += [policies[name].engine] if section.own_devices else []
    made: dict[tuple[str, str | None], Player] = {}
    for name, role in config.environment.roles.items():
        player = policies.get(role.policy, policy)
        if role.path:
            model = role_model(config.model, role)
            with _naming(f"environment.roles.{name}.path"):
                if (role.path, role.revision) not in made:
                    codec = load_tokenizer(model)
                    engine = build(replace(settings, model=model, codec=codec, adapters={}))
                    frozen = Frozen(engine, _reader(config, model))
                    made[role.path, role.revision] = _player(config, engine, codec, frozen=frozen)
                player = made[role.path, role.revision]
            if role.own_devices and player.engine not in apart:
                apart.append(player.engine)
        found[name] = replace(
            player,
            learns=role.trained,
            temperature=role.temperature,
            max_new_tokens=role.max_new_tokens,
            stop=role.stop,
        )
    beside = [player.frozen for player in made.values() if player.frozen]
    learning = {name: player.engine for name, player in policies.items() if not player.adapter}
    if not (beside or learning):
        return found, policy.engine
    return found, EngineBeside(policy.engine, beside, learning, apart)


def _images_refused(
    name: str, engine: Engine, codec: TextCodec, kinds: Collection[Kind] = ()
) -> KeyProblem | None:
    """Why model or engine cannot read images, or files of these kinds."""
    if codec.images is None:
        families, path = ", ".join(VISION_FAMILIES), codec.tokenizer.name_or_path
        reason = f"there are images, and {path!r} is of no family whose images are read ({families})"
        return KeyProblem("model.path", reason, "name a vision-language model")
    family = codec.images.family
    for kind in kinds:
        if kind not in codec.images.kinds:
            reason = (
                f"there are {MANY[kind]}, and {family} reads none ({', '.join(codec.images.kinds)} alone)"
            )
            readers = ", ".join(each for each, reads in READS.items() if kind in reads)
            return KeyProblem("model.path", reason, f"name a model of {readers}")
        if kind not in engine.capabilities.files:
            reason = f"there are {MANY[kind]}, and {name} takes {', '.join(engine.capabilities.files)} alone"
            return KeyProblem("rollout.engine", reason, "use the engine transformers")
    if family in engine.capabilities.images:
        return None
    taken = ", ".join(engine.capabilities.images) or "none"
    reason = f"there are images, and {name} takes those of {family} from no prompt (it takes: {taken})"
    return KeyProblem("rollout.engine", reason, "use the engine transformers")


def _blind(engine: Engine, codec: TextCodec, config: RolloutConfig) -> str:
    """Why messages of a conversation may have no images; empty: they may."""
    wrong = _images_refused(config.rollout.engine, engine, codec)
    return f"{wrong.key}: {wrong.problem}; {wrong.fix}" if wrong else ""


def devices_of(leased: Sequence[str]) -> tuple[torch.device, ...]:
    """torch's names of leased devices, none for none. Raises ServiceError INVALID for a GPU that is not seen."""
    from headrace_modelkit.devices import DeviceNotSeen, torch_devices

    if not leased:
        return ()
    try:
        return torch_devices(gpu_uuids(leased))
    except DeviceNotSeen as error:
        raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", str(error)) from error


def memory_on(leased: Sequence[str], engine_bytes: int = 0) -> Memory:
    """What is free on leased devices, and what this process uses there.

    `engine_bytes`: what its engine said of itself, which may compute in processes of its own.
    """
    from headrace_modelkit.devices import free_bytes, used_bytes

    gpus = [device for device in devices_of(leased) if device.type == "cuda"]
    if not gpus:
        return host_memory()
    return Memory(sum(map(free_bytes, gpus)), max(sum(map(used_bytes, gpus)), engine_bytes))


def _reader(config: RolloutConfig, model: ModelSection) -> Callable[[], tuple[str, Weights]]:
    """What reads a frozen model's weights."""

    def read() -> tuple[str, Weights]:
        from headrace_rollout.runs.policy_files import read_policy

        manifest, body = read_policy(config.model_copy(update={"model": model}), "", "")
        return manifest.digest, weights_of(manifest, body)

    return read


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Names `key` in errors about a frozen model, which say `model.path`."""
    try:
        yield
    except ModelNotReadable as error:
        raise ModelNotReadable(str(error).replace("model.path", key)) from error
