"""What a fleet of this installation would refuse of a spec, found without one: by the rules of a submission.

Where `headrace[local]` is installed. Knows no instance, so it judges no devices and tries no code of users.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_schema.resources.fleet import InstanceView
    from headrace_schema.resources.views import KeyProblemView
    from headrace_schema.spec import RunSpec

_LOG = logging.getLogger(__name__)


def problems_without_a_fleet(spec: RunSpec) -> list[KeyProblemView] | None:
    """Every problem that no fleet of this installation would mend; None where the services are not installed."""
    try:
        from headrace_coordinator.api.submission.fleet_view import FleetView
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
    except Impossible as error:
        data = error
    found = problems_of(Submission(spec, fleet, data), WITHOUT_INSTANCES)
    return [*found, *_missing_files(spec)]


def _installed(spec: RunSpec) -> Iterator[InstanceView]:
    """Instances that offer what every installation has; engines, backends and simulators differ. Raises ImportError."""
    from headrace_reward.child import catalogue
    from headrace_servicekit.registry import capability
    from headrace_trainer.offered import capabilities

    offered = capabilities()
    yield _instance("trainer", {facet: names for facet, names in offered.items() if facet != "backends"})
    scorers = catalogue()
    options = [capability(each["name"], each["options_schema"]) for each in scorers]
    yield _instance("reward", {"scorers": [each["name"] for each in scorers], "scorer_options": options})
    if spec.rollout.engine_options:  # Their schemas are read where they matter alone: that imports torch.
        from headrace_rollout.engines import ENGINES

        yield _instance("rollout", {"engine_options": ENGINES.capabilities(_LOG.warning)})


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
