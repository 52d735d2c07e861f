"""Fits a stage's profile to measured points and reports the fit's error. Knows no file and no service."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace_planner.errors import refuse
from headrace_planner.profiling.profiles import Memory, Profile

MIN_POINTS = 3
LOSSES = tuple(step / 100 for step in range(51))


@dataclass(frozen=True)
class Point:
    """One measurement of a stage.

    `items` in `seconds` on `devices` devices, at most `concurrency` in flight on a replica; `bytes_used` is the
    memory of one device at its peak, if it was measured.
    """

    items: float
    devices: int
    seconds: float
    concurrency: float = math.inf
    bytes_used: float | None = None


def fit(template: Profile, points: Sequence[Point]) -> Profile:
    """The template with `fixed_s`, `item_s`, `scaling_loss`, `error` and, where bytes were measured, memory fitted.

    Least squares of the relative errors; costs are at least 0. Three points choose between a fixed cost and a
    `scaling_loss`; more fit both. A loss needs three device counts; a stage with `lengths` has none, since its
    replicas are independent. `error` is the worst relative error over the points. PlanError for fewer than three
    points, and for points whose replicas all have the same number of items.

    >>> points = [Point(8192, 64, 367.7), Point(8192, 128, 200.3), Point(8192, 256, 111.5)]
    >>> found = fit(Profile("learn", item_s=1.0), points)
    >>> found.scaling_loss, round(found.error, 3)
    (0.14, 0.007)
    """
    _check(template, points)
    fitted = [_costs(template, points)]
    if template.lengths is None and len({point.devices for point in points}) >= MIN_POINTS:
        fitted += [_costs(replace(template, scaling_loss=loss), points, False) for loss in LOSSES]
        if len(points) > MIN_POINTS:
            fitted += [_costs(replace(template, scaling_loss=loss), points) for loss in LOSSES]
    best = min(fitted, key=lambda profile: _squares(profile, points))
    return replace(best, memory=_memory(template, points), error=max(_errors(best, points)))


def _check(template: Profile, points: Sequence[Point]) -> None:
    key = f"stages.{template.stage}.points"
    if len(points) < MIN_POINTS:
        raise refuse(
            key, f"{len(points)} points", f"measure at least {MIN_POINTS}: two for the law, one for its error"
        )
    for number, point in enumerate(points):
        if not (point.seconds > 0 and point.items > 0 and template.used(point.items, point.devices)):
            problem = f"{point.items:g} items on {point.devices} devices in {point.seconds:g} s"
            raise refuse(
                f"{key}[{number}]",
                problem,
                f"give at least {template.replica_devices} devices, 1 item, > 0 s",
            )
    if len({_row(template, point) for point in points}) < 2:
        load = points[0].items / points[0].devices
        raise refuse(
            key, f"all have {load:g} items a device", "measure another number of items or of devices"
        )


def _row(profile: Profile, point: Point) -> tuple[float, float]:
    """What `fixed_s` and `item_s` are multiplied by in the predicted seconds of a point."""
    limited = replace(
        profile, max_concurrency=min(profile.max_concurrency, point.concurrency), memory=Memory()
    )
    unit = replace(limited, fixed_s=1.0, item_s=0.0, host_item_s=0.0).seconds(point.items, point.devices)
    one = replace(limited, fixed_s=0.0, item_s=1.0, host_item_s=0.0).seconds(point.items, point.devices)
    return unit, one


def _costs(profile: Profile, points: Sequence[Point], with_fixed: bool = True) -> Profile:
    host = [profile.host_item_s * point.items / point.seconds for point in points]
    rows = [
        (a / p.seconds if with_fixed else 0.0, b / p.seconds) for p in points for a, b in [_row(profile, p)]
    ]
    fixed, item = two_costs(rows, [1 - part for part in host])
    return replace(profile, fixed_s=fixed, item_s=item)


def two_costs(rows: Sequence[tuple[float, float]], targets: Sequence[float]) -> tuple[float, float]:
    """Non-negative x, y with the least sum of (a x + b y - target) squared."""
    aa, bb = sum(a * a for a, _ in rows), sum(b * b for _, b in rows)
    ab = sum(a * b for a, b in rows)
    at = sum(a * t for (a, _), t in zip(rows, targets, strict=True))
    bt = sum(b * t for (_, b), t in zip(rows, targets, strict=True))
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        x, y = (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant
        if x >= 0 and y >= 0:
            return x, y
    only_x, only_y = max(0.0, at / aa) if aa else 0.0, max(0.0, bt / bb) if bb else 0.0
    options = [(only_x, 0.0), (0.0, only_y)]
    return min(
        options,
        key=lambda xy: sum((a * xy[0] + b * xy[1] - t) ** 2 for (a, b), t in zip(rows, targets, strict=True)),
    )


def _errors(profile: Profile, points: Sequence[Point]) -> list[float]:
    fixed = [_row(profile, point) for point in points]
    return [
        abs((a * profile.fixed_s + b * profile.item_s + profile.host_item_s * p.items) / p.seconds - 1)
        for p, (a, b) in zip(points, fixed, strict=True)
    ]


def _squares(profile: Profile, points: Sequence[Point]) -> float:
    return sum(error * error for error in _errors(profile, points))


def _memory(template: Profile, points: Sequence[Point]) -> Memory:
    """Workspace and bytes an item from the measured peaks; the state's bytes are the template's."""
    rows, kept = [], []
    for point in points:
        if point.bytes_used is None:
            continue
        used = template.used(point.items, point.devices)
        flight = min(
            point.items * template.replica_devices / used, point.concurrency, template.max_concurrency
        )
        shards = used if template.memory.sharded_over_all else template.replica_devices
        rows.append((1.0, flight / template.replica_devices))
        kept.append(max(0.0, point.bytes_used - template.memory.state_bytes / shards))
    if len(set(rows)) < 2:
        return template.memory
    workspace, item = two_costs(rows, kept)
    return replace(template.memory, device_bytes=workspace, item_bytes=item)
