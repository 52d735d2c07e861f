"""What one stage costs: seconds and bytes by items, devices and memory budget. Knows no workflow and no plan."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace_planner.errors import refuse
from headrace_planner.profiling.lengths import Lengths


@dataclass(frozen=True)
class Memory:
    """Bytes that a stage needs.

    `state_bytes`: weights and what belongs to them, divided over the devices of one replica, or over all of the
    stage's devices when `sharded_over_all`. `device_bytes`: workspace on every device. `item_bytes`: one item in
    flight (KV cache of a sequence, activations of a training sample), divided over a replica's devices.
    """

    state_bytes: float = 0.0
    device_bytes: float = 0.0
    item_bytes: float = 0.0
    sharded_over_all: bool = False


@dataclass(frozen=True)
class Pace:
    """With n items in flight a replica takes `fixed + each * n ** power` seconds for one (mean) length of all of them.

    `concurrency`: the most in flight, a whole number; more items wait until one is finished.
    """

    fixed: float
    each: float
    concurrency: int
    power: float = 1.0

    def seconds(self, flying: float) -> float:
        """Seconds of one mean length with so many in flight."""
        return self.fixed + self.each * (flying if self.power == 1.0 else flying**self.power)

    def each_at(self, flying: float) -> float:
        """What `each` would be of a straight line through the pace with so many in flight, from `fixed` on."""
        return self.each if self.power == 1.0 else self.each * max(1.0, flying) ** (self.power - 1)


@dataclass(frozen=True)
class Profile:
    """The fitted cost of one stage on one kind of device.

    A stage's devices are replicas of `replica_devices`. A replica works on q = items / replicas items and takes
    `fixed_s * rounds + item_s * q * devices ** scaling_loss + host_item_s * items` seconds:

    - `fixed_s`: seconds whatever the number of items (a decode step's weight reads over one mean length).
    - rounds: expected longest of all items over mean length when the stage has `lengths`, else 1; and one more for
      every time that q exceeds what the memory budget or `max_concurrency` lets a replica have in flight.
    - `item_s`: seconds that one more item adds on one replica. `scaling_loss`: communication that grows with devices.
    - `batch_power`: with n in flight a replica takes `fixed_s + item_s * n ** batch_power` for one mean length. 1 is a
      straight line: each sequence's cache is read. Below 1 more sequences share what they cause to be read, such as
      experts; above 1 arithmetic takes over from reading weights.
    - `host_item_s`: seconds of an item that no device shortens (a simulator bound by the host's CPUs).

    `sizes`: device counts at which the stage can run (valid parallel sizes); every whole number of replicas if empty.
    `load_s`, `offload_s`: seconds to take and to give back the devices' memory.
    `error`: the fit's worst relative error.
    """

    stage: str
    kind: str = "gpu"
    fixed_s: float = 0.0
    item_s: float = 0.0
    host_item_s: float = 0.0
    scaling_loss: float = 0.0
    batch_power: float = 1.0
    replica_devices: int = 1
    sizes: tuple[int, ...] = ()
    max_concurrency: float = math.inf
    lengths: Lengths | None = None
    memory: Memory = Memory()
    load_s: float = 0.0
    offload_s: float = 0.0
    error: float = 0.0

    def __post_init__(self) -> None:
        """PlanError when a number is negative, not finite, or no valid size."""
        for name in ("fixed_s", "item_s", "host_item_s", "load_s", "offload_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise refuse(
                    f"stages.{self.stage}.{name}", f"{value} is no duration", "use seconds, at least 0"
                )
        if self.fixed_s + self.item_s + self.host_item_s <= 0:
            raise refuse(
                f"stages.{self.stage}", "the stage takes 0 seconds", "give fixed_s, item_s or points"
            )
        if not 0 <= self.scaling_loss < 1:
            key = f"stages.{self.stage}.scaling_loss"
            raise refuse(
                key, f"{self.scaling_loss} is not in 0..1", "use 0 (none) to below 1 (devices do not help)"
            )
        if not 0.1 <= self.batch_power <= 3:
            key = f"stages.{self.stage}.batch_power"
            raise refuse(key, f"{self.batch_power} is not in 0.1..3", "use 1 for a straight line")
        wrong = [
            size
            for size in (*self.sizes, self.replica_devices)
            if size < 1 or size % max(1, self.replica_devices)
        ]
        if wrong:
            problem = f"{wrong[0]} devices are no whole number of replicas of {self.replica_devices}"
            raise refuse(
                f"stages.{self.stage}.sizes", problem, f"use multiples of {max(1, self.replica_devices)}"
            )

    @property
    def smallest(self) -> int:
        """The fewest devices that the stage can run on."""
        return min(self.sizes, default=self.replica_devices)

    def used(self, items: float, devices: int) -> int:
        """The most devices, up to `devices`, of a valid size with at least one item a replica; 0 if none."""
        most = min(devices, max(1, math.floor(items + 1e-9)) * self.replica_devices)
        if self.sizes:
            fitting = [size for size in self.sizes if size <= most]
            return (
                max(fitting) if fitting else min((size for size in self.sizes if size <= devices), default=0)
            )
        return most // self.replica_devices * self.replica_devices

    def reserved_bytes(self, devices: int) -> float:
        """Bytes a device that the stage keeps while it is loaded, whether it runs or not."""
        shards = devices if self.memory.sharded_over_all else self.replica_devices
        return self.memory.state_bytes / shards + self.memory.device_bytes

    def concurrency(self, devices: int, budget_bytes: float) -> float:
        """Items that a replica may have in flight within `budget_bytes` a device; below 1 when it does not fit."""
        free = budget_bytes - self.reserved_bytes(devices)
        if free < 0:
            return 0.0
        fits = free * self.replica_devices / self.memory.item_bytes if self.memory.item_bytes else math.inf
        return min(fits, self.max_concurrency)

    def parts(self, items: float, devices: int) -> tuple[float, float, float]:
        """(items a replica, fixed seconds of a mean length, seconds that all items add) on `used` devices."""
        load = items * self.replica_devices / devices
        return load, self.fixed_s, self.item_s * load * devices**self.scaling_loss

    def pace(self, devices: int, budget_bytes: float = math.inf) -> Pace:
        """How fast replicas on `devices` used devices advance; `seconds` is its sum over a pass."""
        replicas = devices // self.replica_devices
        _, fixed, each = self.parts(replicas, devices)
        fits = self.concurrency(devices, budget_bytes)
        most = math.floor(fits + 1e-9) if math.isfinite(fits) else sys.maxsize
        return Pace(fixed, each + self.host_item_s * replicas, max(1, most), self.batch_power)

    def seconds(self, items: float, devices: int, budget_bytes: float = math.inf) -> float:
        """Seconds for `items` on up to `devices` devices; infinity when no valid size fits the memory."""
        used = self.used(items, devices)
        concurrency = self.concurrency(used, budget_bytes) if used else 0.0
        if concurrency < 1:
            return math.inf
        load, fixed, marginal = self.parts(items, used)
        marginal *= self._crowding(min(load, concurrency))
        rounds = self.lengths.expected_longest(items) if self.lengths else 1.0
        rounds += max(0.0, load / concurrency - 1)
        return fixed * rounds + marginal + self.host_item_s * items

    def _crowding(self, flying: float) -> float:
        """What the items' seconds are multiplied by where they grow otherwise than with their number."""
        if self.batch_power == 1.0:
            return 1.0
        fewer = self.lengths.crowd(self.batch_power) if self.lengths else 1.0
        return float(fewer * max(1.0, flying) ** (self.batch_power - 1))

    def arrivals(self, items: float, devices: int, group: int, chunks: int) -> tuple[float, ...]:
        """When each of `chunks` equal parts of the stage's output is complete, as shares of its time."""
        used = self.used(items, devices)
        if self.lengths is None or not used:
            return tuple((index + 1) / chunks for index in range(chunks))
        load, fixed, marginal = self.parts(items, used)
        marginal *= self._crowding(min(load, self.max_concurrency))
        return self.lengths.arrivals(fixed, marginal, group, chunks, items)

    def measured_as(self, seconds: float, items: float, devices: int) -> Profile:
        """The same law (ratio of fixed and item cost, scaling) through one measured point.

        How one mode's measurement becomes another mode's prediction: the shape is assumed, the size is measured.

        >>> law = Profile("train", item_s=1.0, scaling_loss=0.14)
        >>> round(law.measured_as(295.8, items=1536, devices=32).seconds(1536, 16))
        537
        """
        factor = seconds / self.seconds(items, devices)
        return replace(
            self,
            fixed_s=self.fixed_s * factor,
            item_s=self.item_s * factor,
            host_item_s=self.host_item_s * factor,
        )


def by_stage(profiles: Sequence[Profile]) -> dict[str, dict[str, Profile]]:
    """Profiles by stage and kind of device; PlanError when two describe the same."""
    found: dict[str, dict[str, Profile]] = {}
    for profile in profiles:
        kinds = found.setdefault(profile.stage, {})
        if profile.kind in kinds:
            raise refuse(f"stages.{profile.stage}", f"two profiles on {profile.kind}", "remove one")
        kinds[profile.kind] = profile
    return found
