"""The calls of a recording as they are made again: which ones, with what changed, and at which instance.

Lease, rendezvous and directories are this host's. Everything that a result depends on stays as it was.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import message_factory
from headrace.reward.v1 import reward_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_servicekit.recording.files import Call, Message, Recording
from headrace_servicekit.rpc.addresses import free_port
from headrace_servicekit.rpc.trajectories import segments_of

from headrace_cli.errors import CommandError, user_error
from headrace_cli.replaying.stage import LEASE

SERVICES = {
    "trainer": trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"],
    "reward": reward_pb2.DESCRIPTOR.services_by_name["RewardService"],
    "rollout": rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"],
}
"""Services that recordings are replayed into. A simulator's steps pass between it and the rollout: none has them."""
OPENINGS = ("OpenRun", "JoinTrainerGroup")
MADE_AGAIN = {
    "trainer": {
        *OPENINGS,
        *(
            "Restore",
            "BeginStep",
            "Learn",
            "Infer",
            "CommitStep",
            "RecordStep",
            "AbortStep",
        ),
    },
    "reward": {"OpenRun", "Score"},
    "rollout": {"OpenRun", "InstallPolicy", "Generate"},
}
"""By service. Left out is what changes no result: questions, exports, and devices that change hands."""


@dataclass(frozen=True)
class Method:
    """One method of a service, with the classes of its messages."""

    path: str
    request: Any
    response: Any
    is_stream: bool


def method_of(kind: str, name: str) -> Method:
    """A method by name. Raises CommandError for one that this version does not have."""
    service = SERVICES[kind]
    found = service.methods_by_name.get(name)
    if found is None:
        raise CommandError(f"{service.full_name} has no method {name}: the recording is of another version")
    request, response = map(message_factory.GetMessageClass, (found.input_type, found.output_type))
    return Method(f"/{service.full_name}/{name}", request, response, found.client_streaming)


class Calls:
    """The calls to one service, changed for this host. `directory` holds what it reads and writes.

    `checkpoint` is the recording's base on this host, a folder or a tar file; `model` replaces model.path.
    """

    def __init__(
        self, recording: Recording, kind: str, directory: Path, checkpoint: Path | None, model: str
    ) -> None:
        self._recording, self._kind, self._directory = recording, kind, directory
        self._checkpoint, self._model = checkpoint, model
        self._run_directory = directory / "runs" / recording.header.run.removeprefix("runs/")
        self._run_directory.mkdir(parents=True)
        self._rendezvous: dict[str, str] = {}
        self.all = [call for call in recording.of_kind(kind) if call.method in MADE_AGAIN[kind]]
        self._check()
        working = {call.incarnation for call in self.all if call.method != "OpenRun"}
        self.all = [call for call in self.all if call.incarnation in working]
        self.incarnations = [each for each in recording.incarnations(kind) if each in working]
        if kind == "trainer":
            self._begin_trainers()
            self._check_ranks()
        if kind == "rollout":
            self._begin_rollouts()

    def _check(self) -> None:
        """Raises CommandError (exit code 2) for what cannot be made again, with the reason."""
        header, kind = self._recording.header, self._kind
        if not any(call.method not in OPENINGS for call in self.all):
            had = ", ".join(sorted({call.kind for call in self._recording.calls})) or "no service"
            raise user_error(
                "--service", f"nothing was asked of a {kind} in step {header.step}", f"it has {had}"
            )
        methods = {call.method for call in self._recording.of_kind(kind)}
        if "AddContribution" in methods:
            raise user_error(
                "--service",
                "a helper's gradient was added in this step, and recordings do not have it",
                "record a step of a run with trainer.helpers: false",
            )
        if kind == "trainer" and (away := self._bodies_away()):
            raise user_error(
                "--service",
                f"{away} observations of this step were sent by reference, and stayed with their rollouts",
                "replay the reward service, or a run whose observations are small enough to be sent",
            )
        if kind == "rollout" and "RunEpisodes" in methods:
            raise user_error(
                "--service",
                "episodes depend on the simulators, whose steps pass between them and the rollout",
                "replay the trainer, whose episodes are recorded",
            )

    def _bodies_away(self) -> int:
        """Number of the tensors of Learn requests that are references."""
        requests = (
            trainer_pb2.LearnRequest.FromString(message.data)
            for call in self.all
            if call.method == "Learn"
            for message in call.messages
            if message.is_request
        )
        return sum(map(_references, requests))

    @property
    def epoch(self) -> int:
        """The coordinator's, as the first of the calls has it."""
        return int(self._header_of(self.all[0].incarnation).coordinator_epoch)

    # --- trainers

    def _begin_trainers(self) -> None:
        """Cuts the calls at the last Restore before the step; without one, the base is restored first."""
        header = self._recording.header
        restores = {
            call.incarnation: call
            for call in self.all
            if call.method == "Restore" and call.succeeded and not self._carried(call)
        }
        if restores:
            first = min(call.place for call in restores.values())
            opened = self._last_openings(first)
            self.all = [call for call in self.all if call.place >= first or call in opened]
            return
        if not header.base.checkpoint:
            raise CommandError(
                f"the trainer cannot be replayed: {header.incomplete}; record the step with headrace record RUN "
                "--step N before it begins, which makes a checkpoint of what it begins with",
                reason="INCOMPLETE",
            )
        name = self._place_checkpoint(header.base.checkpoint, self._run_directory)
        place = min(call.place for call in self.all if call.method not in OPENINGS)
        opened = self._last_openings(place)
        self.all = [
            call for call in self.all if call.method not in OPENINGS or call in opened or call.place > place
        ]
        for incarnation in self.incarnations:
            request = trainer_pb2.RestoreRequest(checkpoint=name, number=header.base.number)
            request.header.CopyFrom(self._header_of(incarnation))
            call = Call(-1, "trainer", incarnation, "Restore", 0, place, 0.0)
            call.messages.append(Message(place, 0.0, True, request.SerializeToString()))
            if incarnation == self.incarnations[0]:
                restored = trainer_pb2.RestoreResponse()
                restored.version.number, restored.version.digest = header.base.number, header.base.digest
                call.messages.append(Message(place, 0.0, False, restored.SerializeToString()))
            call.ended_at, call.end_place = 0.0, place
            self.all.append(call)
        self.all.sort(key=lambda call: (call.place, call.id))

    def _check_ranks(self) -> None:
        """Raises CommandError where the ranks changed behind the beginning: their state went from hand to hand."""
        first = min(call.place for call in self.all if call.method not in OPENINGS)
        if any(call.method == "JoinTrainerGroup" and call.place > first for call in self.all):
            raise CommandError(
                "the trainer cannot be replayed: its group changed its ranks between what the recording begins with "
                "and the step; record a later step with headrace record RUN --step N",
                reason="INCOMPLETE",
            )

    def _carried(self, call: Call) -> bool:
        return bool(call.messages) and trainer_pb2.RestoreRequest.FromString(call.messages[0].data).carried

    def _last_openings(self, place: int) -> list[Call]:
        """Of each instance, its last opening and joining before a place."""
        found: dict[tuple[str, str], Call] = {}
        for call in self.all:
            if call.method in OPENINGS and call.place < place and call.succeeded:
                found[call.incarnation, call.method] = call
        return list(found.values())

    def _header_of(self, incarnation: str) -> Any:
        first = next(
            call for call in self.all if call.incarnation == incarnation and call.method == "OpenRun"
        )
        header = method_of(self._kind, "OpenRun").request.FromString(first.messages[0].data).header
        header.lease_epoch = LEASE
        return header

    # --- rollouts

    def _begin_rollouts(self) -> None:
        """Versions are installed from the base, or from the model's files: the trainer's store is not here."""
        self.all = [call for call in self.all if call.succeeded or call.method == "Generate"]
        for call in self.all:
            if call.method != "Generate":
                continue
            opened = rollout_pb2.GenerateRequest.FromString(call.messages[0].data).open
            if opened.pools:
                raise user_error(
                    "--service",
                    "this rollout's answers depend on environments",
                    "replay the trainer or the reward service",
                )

    # --- what is changed

    def changed(self, call: Call, data: bytes) -> Any:
        """A request of a call, for this host."""
        message = method_of(self._kind, call.method).request.FromString(data)
        for holder in (message, getattr(message, "open", None), getattr(message, "reauthorize", None)):
            header = getattr(holder, "header", None)
            if header is not None and header.lease_epoch:
                header.lease_epoch = LEASE
        change: Callable[[Any], None] | None = getattr(self, f"_{call.method.lower()}", None)
        if change is not None:
            change(message)
        return message

    def _openrun(self, message: Any) -> None:
        config = json.loads(message.config_json)
        if self._model and "model" in config:
            config["model"]["path"] = self._model
        if self._kind == "trainer":
            message.run_directory = str(self._run_directory)
        message.config_json = json.dumps(config)

    def _jointrainergroup(self, message: Any) -> None:
        if message.rendezvous:
            message.rendezvous = self._rendezvous.setdefault(message.rendezvous, f"127.0.0.1:{free_port()}")

    def _restore(self, message: Any) -> None:
        if not message.checkpoint or message.carried:
            return
        directory = self._run_directory
        if message.source_run_directory:
            directory = self._directory / "runs" / Path(message.source_run_directory).name
            message.source_run_directory = str(directory)
        self._place_checkpoint(message.checkpoint, directory)

    def _recordstep(self, message: Any) -> None:
        message.publish = False  # Nobody takes the weights.

    def _installpolicy(self, message: Any) -> None:
        header, version = self._recording.header, message.version
        where = ""
        if header.base.number == version.number and header.base.checkpoint:
            name = self._place_checkpoint(header.base.checkpoint, self._run_directory)
            where = str(self._run_directory / "checkpoints" / name)
        elif version.ordinal:
            raise CommandError(
                f"the rollout cannot be replayed: it generated with version {version.number}, and the recording begins "
                f"with version {header.base.number}; its weights were never on disk. Record the step with headrace "
                "record RUN --step N before it begins",
                reason="INCOMPLETE",
            )
        message.ClearField("manifest")
        message.ClearField("sources")
        message.in_flight = False
        message.files.checkpoint = where

    def _place_checkpoint(self, name: str, run_directory: Path) -> str:
        """Puts a checkpoint where the service looks for it. Raises CommandError (exit code 2) where it is not here."""
        target = run_directory / "checkpoints" / name
        if target.is_dir():
            return name
        source = self._checkpoint or self._beside() or self._of_the_fleet(name)
        if source is None:
            raise user_error(
                "--checkpoint",
                f"the step begins with checkpoint {name} of {self._recording.header.run}, which is not in the "
                "recording and not on this machine",
                "download it with headrace record RUN --step N --with-checkpoint, or name its folder or tar file",
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, copy_function=_linked)
        else:
            _unpack(source, target)
        if not (target / "state.json").is_file():
            raise user_error(
                "--checkpoint", f"{source} is no checkpoint: it has no state.json", f"give {name}"
            )
        return name

    def _beside(self) -> Path | None:
        beside = checkpoint_beside(self._recording.path)
        return beside if beside.is_file() else None

    def _of_the_fleet(self, name: str) -> Path | None:
        """Where the run's own directory is on this machine: the recording still lies in it."""
        found = self._recording.path.absolute().parent.parent / "checkpoints" / name
        return found if found.is_dir() else None


def _references(request: trainer_pb2.LearnRequest) -> int:
    """Number of tensors that an episode's segments leave with their producer."""
    segments = (
        segment.actions
        for group in request.groups
        for member in group.members
        for segment in segments_of(member.trajectory)
        if segment.HasField("actions")
    )
    return sum(
        tensor.WhichOneof("body") == "blob"
        for segment in segments
        for tensor in [
            *segment.observation.values(),
            *segment.sampled.values(),
            *segment.final_observation.values(),
            segment.executed_action,
        ]
    )


def checkpoint_beside(recording: Path) -> Path:
    """Where the checkpoint of a recording lies that was downloaded with it."""
    return recording.with_suffix(".checkpoint.tar")


def _linked(source: str, target: str) -> None:
    """A hard link, since nothing writes to a checkpoint; a copy between file systems."""
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)


def _unpack(archive: Path, target: Path) -> None:
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                member.name = "/".join(Path(member.name).parts[1:])
                if member.isfile() and member.name:
                    tar.extract(member, target, filter="data")
    except (tarfile.TarError, OSError) as error:
        raise user_error(
            "--checkpoint", f"{archive} cannot be unpacked: {error}", "download it anew"
        ) from error
