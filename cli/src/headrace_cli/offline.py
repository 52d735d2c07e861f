"""What a fleet of this installation would refuse of a spec, found without one: by the rules of a submission.

Where `headrace[local]` is installed. Knows no instance, so it judges no devices and tries no code of users.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_schema.references import is_reference

if TYPE_CHECKING:
    from headrace_schema.resources.fleet import InstanceView
    from headrace_schema.resources.views import KeyProblemView
    from headrace_schema.spec import RunSpec

FILES = ("path", "dataset", "critic_path", "model", "name", "gguf_file")
"""Last parts of keys whose values name files."""
_LOG = logging.getLogger(__name__)


def problems_without_a_fleet(
    spec: RunSpec,
) -> tuple[list[KeyProblemView], list[KeyProblemView]] | None:
    """Problems that any fleet would find, and those of files that are not on this machine and may be on the fleet's.

    None where the services are not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # What is on the hub is not asked for here.
    try:
        from headrace_coordinator.api.submission.fleet_view import FleetView
        from headrace_coordinator.api.submission.imitating import imitating
        from headrace_coordinator.api.submission.rules import WITHOUT_INSTANCES, problems_of
        from headrace_coordinator.api.submission.submission import Submission
        from headrace_coordinator.data.dataset import Dataset, open_dataset
        from headrace_schema.problems import Impossible

        fleet = FleetView.of(_installed(spec))
    except ImportError:
        return None
    data: Dataset | Impossible
    try:
        data = asyncio.run(open_dataset(spec))
        spec = asyncio.run(imitating(spec))
    except Impossible as error:
        data = error
    found = [*problems_of(Submission(spec, fleet, data), WITHOUT_INSTANCES), *_missing_files(spec)]
    document = spec.model_dump(mode="json")
    elsewhere = [each for each in found if _is_elsewhere(document, each.key)]
    return [each for each in found if each not in elsewhere], elsewhere


def _is_elsewhere(document: Any, key: str) -> bool:
    """Whether a key's value names a file, a directory, a set of the hub or a secret that is not on this machine."""
    parts = key.replace("[", ".").replace("]", "").split(".")
    for part in parts:
        try:
            document = document[int(part) if isinstance(document, list) else part]
        except (LookupError, TypeError, ValueError):
            return False
    if is_reference(document):
        return True
    return (
        parts[-1] in FILES and isinstance(document, str) and not Path(document.partition(".py:")[0]).exists()
    )


def _installed(spec: RunSpec) -> Iterator[InstanceView]:
    """Instances that offer every plug-in that is known here, installed in full or not. Raises ImportError."""
    from headrace_reward.child import catalogue
    from headrace_rollout.engines import ENGINES
    from headrace_servicekit.registry import capability
    from headrace_simulator.backends import BACKENDS as SIMULATORS
    from headrace_trainer.backends import BACKENDS
    from headrace_trainer.offered import capabilities

    yield _instance("trainer", {**capabilities(), "backends": BACKENDS.names()})
    scorers = catalogue()
    options = [capability(each["name"], each["options_schema"]) for each in scorers]
    yield _instance("reward", {"scorers": [each["name"] for each in scorers], "scorer_options": options})
    # The options' schemas are read where they matter alone: that imports torch.
    engines = ENGINES.capabilities(_LOG.warning) if spec.rollout.engine_options else []
    yield _instance("rollout", {"engines": ENGINES.names(), "engine_options": engines})
    yield _instance("simulator", {"backends": SIMULATORS.names()})


def _instance(kind: str, capabilities: dict[str, list[str]]) -> InstanceView:
    from headrace_schema.resources.fleet import InstanceView

    return InstanceView(
        name=f"{kind}-0",
        incarnation="",
        kind=kind,
        state="READY",
        host="",
        address="",
        devices=[],
        capabilities=capabilities,
        run="",
        resident_memory_bytes=0,
        last_heartbeat_age_s=0.0,
    )


def _missing_files(spec: RunSpec) -> Iterator[KeyProblemView]:
    """Scorers of the user's whose file is not on this machine; what is in the file only a reward instance tries."""
    from headrace_schema.problems import problem

    for part, scorers in spec.reward.sets().items():
        for index, scorer in enumerate(scorers):
            file, colon, _ = scorer.name.rpartition(":")
            if colon and file.endswith(".py") and not Path(file).is_file():
                fix = "paths are relative to the spec's folder, or absolute"
                yield problem(f"reward.{part}[{index}].name", f"{scorer.name}: no such file {file}", fix)
