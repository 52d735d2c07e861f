"""What holds for every side that acts beside the rollouts on devices of its own, whatever it does there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.running import PlacementSection, overlap


def unnamed(placement: PlacementSection, key: str) -> Iterator[KeyProblemView]:
    """The first of the other sides whose devices are left out, where `key` names some."""
    for side in ("rollout", "trainer"):
        if not getattr(placement, side):
            reason = f"{key} is given: what is left for the others is not guessed"
            yield problem(f"placement.{side}", reason, f"name devices, or remove {key}")
            return


def given_away(placement: PlacementSection, key: str, lost: str) -> Iterator[KeyProblemView]:
    """Devices that other runs may take while `lost` is under way."""
    if placement.share:
        reason = f"runs that share give their devices away while they generate, and {lost} would be lost"
        yield problem("placement.share", reason, f"remove it, or {key}")


def also_learns(key: str, devices: Collection[str], mode: str) -> KeyProblemView:
    """What is said of devices that the trainer is to have at the same time."""
    reason = f"{', '.join(devices)} learns too; {mode} placement needs disjoint devices"
    return problem(key, reason, "name other devices, or set placement.mode: collocated")


def learns_elsewhere(
    placement: PlacementSection, key: str, devices: Sequence[str], does: str
) -> Iterator[KeyProblemView]:
    """A collocated trainer none of whose devices generates, or does what the side of `key` does."""
    if placement.mode == "collocated" and not overlap(placement.trainer, [*placement.rollout, *devices]):
        yield problem(
            "placement.trainer",
            f"collocated placement takes turns on the same devices, and these neither generate nor {does}",
            f"name devices of placement.rollout or {key}, or set placement.mode: disaggregated",
        )
