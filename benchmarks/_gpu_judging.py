"""What gpu_check wants of figures: pure functions, so that tests say when an entry fails without a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

LEAST_SHARE = 0.35
"""Of the GPU's dense bf16 peak, for 6 FLOPs a parameter and token: recomputation and attention count for nothing."""
PLAN_TOLERANCE = 0.10
PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "GH200": 989.0,
    "GB200": 2500.0,
    "H200": 989.0,
    "H100": 989.0,
    "H20": 148.0,
    "B200": 2250.0,
    "B300": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 150.0,
    "A10": 125.0,
    "4090": 165.0,
    "5090": 210.0,
    "MI300X": 1307.0,
    "MI325X": 1307.0,
    "MI250X": 383.0,
}
"""Dense bf16 of its maker's data sheet, by a part of the GPU's name; the first that fits counts."""


def peak_tflops(name: str, measured: float) -> float:
    """A GPU's peak: its data sheet's, or of an unknown one what a large product of matrices reached."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), measured)


def largest_wrong(ranks: Sequence[Mapping[str, float]], tflops: float, peak: float) -> list[str]:
    """Of the largest model: memory against the plan, of each rank, and the rate against the peak of all GPUs."""
    wrong = []
    for rank, each in enumerate(ranks):
        ratio = each.get("peak_device_bytes", 0.0) / max(each["planned_device_bytes"], 1.0)
        if abs(ratio - 1) > PLAN_TOLERANCE:
            wrong.append(
                f"rank {rank} took {ratio:.2f} times the memory that was planned, "
                f"{each['planned_device_bytes']:.4g} bytes"
            )
    share = tflops / (peak * len(ranks))
    if share < LEAST_SHARE:
        wrong.append(
            f"{tflops:.0f} TFLOPS are {share:.2f} of the peak of {len(ranks)} GPUs ({peak:.0f} each), "
            f"{LEAST_SHARE} are wanted"
        )
    return wrong


def same_norms_wrong(
    what: str, ours: Sequence[float], theirs: Sequence[float], tolerance: float = 0.0
) -> list[str]:
    """Gradient norms of two ways to compute the same; with no tolerance to the last bit."""
    if (
        not ours
        or len(ours) != len(theirs)
        or not all(math.isfinite(norm) and norm > 0 for norm in (*ours, *theirs))
    ):
        return [f"{what}: norms {list(ours)} and {list(theirs)} are not of the same steps, or none"]
    if all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(ours, theirs, strict=True)):
        return []
    return [f"{what}: gradient norms {list(ours)} and {list(theirs)} differ"]


def asleep_wrong(found: Mapping[str, float], most_bytes: float) -> list[str]:
    """Of an engine that sleeps between its leases: that it was started once, and what it keeps."""
    wrong = []
    if found.get("engine_starts") != 1:
        wrong.append(f"the engine was started {found.get('engine_starts', 0):.0f} times in one run")
    if (kept := found.get("engine_asleep_bytes", 0.0)) > most_bytes:
        wrong.append(
            f"a sleeping engine keeps {kept / 2**20:.0f} MiB of its GPUs, {most_bytes / 2**20:.0f} may stay"
        )
    return wrong
