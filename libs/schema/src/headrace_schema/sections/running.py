"""Sections of how a run lives in the fleet: devices, turns, limits, where it continues from."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, model_validator

from headrace_schema.problems import Impossible, problem
from headrace_schema.sections.base import Bytes, Count, CountOrZero, Seconds, Section
from headrace_schema.stores import StoreUrl, checked, is_remote

Kept = Literal["checkpoints", "export", "recordings", "videos"]
"""What a run's store gets."""
MAX_DEVICES = 4096
EVERY = "all"
"""Stands for every device, or behind "HOST/" for every one of that host."""
SIDES = ("rollout", "trainer", "simulator", "reward")
"""Who holds devices, by the keys that name them."""
MEASURE_STEPS = 3
MEASURING_SHARE = 0.05
"""Of a run's steps: what measuring both modes may take where the spec does not ask for it."""
_RANGE = re.compile(r"(?P<stem>[^\n]*?)(?<!\d)(?P<first>\d{1,9})-(?P<last>\d{1,9})")
LONGEST_NAME = 256
"""Characters of a device's name with its host."""


def _devices(given: Any) -> Any:
    """Device names: a list, or one text with commas; "cpu:0-3" is a range of four. YAML reads `3` as a number."""
    if isinstance(given, int) and not isinstance(given, bool):
        given = str(given)
    listed = given.split(",") if isinstance(given, str) else given
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        return given
    found: list[str] = []
    for name in listed:
        _add(name.strip(), found)
    return found


def _side(key: str, given: Any) -> Any:
    """`_devices` of one side, whose key a refusal names."""
    try:
        return _devices(given)
    except ValueError as error:
        reason, _, fix = str(error).partition("; ")
        raise Impossible([problem(f"placement.{key}", reason, fix)]) from error


def _add(name: str, found: list[str]) -> None:
    """Appends what a name stands for, unless there are too many then: their number is known before they are made."""
    if len(name) > LONGEST_NAME:
        raise ValueError(
            f"{name[:40]!r}… has more than the {LONGEST_NAME} characters of a device's name; shorten it"
        )
    match = _RANGE.fullmatch(name)
    first, last = (int(match["first"]), int(match["last"])) if match else (0, 0)
    if len(found) + last - first + 1 > MAX_DEVICES and first <= last:
        raise ValueError(f"{name!r} makes them more than {MAX_DEVICES} devices; name fewer")
    if match is None:
        found.append(name)
        return
    if first > last:
        raise ValueError(f"{name!r} is no range of devices; write such as {match['stem']}0-3")
    found += [f"{match['stem']}{index}" for index in range(first, last + 1)]


def overlap(names: list[str], others: list[str]) -> bool:
    """Whether two sides have a name in common, or one of them is all devices."""
    return bool({*names} & {*others}) or EVERY in (*names, *others)


def is_every(name: str) -> bool:
    """Whether a name stands for all devices, of the fleet or of one host."""
    return name.rpartition("/")[2] == EVERY


Devices = Annotated[list[str], BeforeValidator(_devices), Field(max_length=MAX_DEVICES)]


Part = Annotated[float, Field(strict=True, gt=0, lt=1)]


class JointSection(Section):
    """What a rollout and a simulator that hold a device together may use of its memory."""

    rollout: Part = Field(description="a rollout's part of the device's memory")
    simulator: Part = Field(description="a simulator's; both together at most 1")


class PlacementSection(Section):
    """Which devices generate and learn. Names as `headrace instances` shows them.

    Devices are a list or a text such as "cpu:0-3,cpu:6": a name, its number alone, a range, or "all", each also
    behind "HOST/". A key such as `rollout,trainer` gives the same to each that it names.
    """

    mode: Literal["auto", "collocated", "disaggregated", "hybrid"] = Field(
        default="auto",
        description="take turns on the same devices, or side by side; hybrid: side by side while answers are made, "
        "then learn on all (on GPUs with a rank on each, of which some sleep until then); "
        "auto: in turns, and a run that is long enough tries both and goes on with what is faster; "
        "with algorithm.max_staleness above 0 side by side, and a run that is long enough tries other divisions. "
        "Where devices are named, the default is what they say: the same ones in turns, others side by side",
    )
    flow: Literal["pipelined", "sequential"] | None = Field(
        default=None,
        description="side by side: groups go to the trainer as they settle, or once the batch is complete; default: "
        "pipelined, and with mode: auto what is faster",
    )
    memory: Literal["offloaded", "resident"] | None = Field(
        default=None,
        description="who has no devices for a while gives its memory back, or stays loaded (on CPU slots); default: "
        "offloaded in collocated, resident in hybrid, and with mode: auto what is faster",
    )
    rollout: Devices = Field(default_factory=list, description="devices that generate; default: by the mode")
    trainer: Devices = Field(default_factory=list, description="devices that learn; default: by the mode")
    simulator: Devices = Field(
        default_factory=list,
        description="devices on which simulators act while rollouts generate; one that both name goes to one of them, "
        "or with placement.joint to both; default: simulators hold no devices",
    )
    joint: JointSection | None = Field(
        default=None,
        description="a rollout and a simulator hold each device together, each with its part of the memory: both "
        "sides name the same devices; default: a device has one holder",
    )
    reward: Devices = Field(
        default_factory=list,
        description="devices on which scorers, such as reward_model, compute while rollouts generate; those of the "
        "trainer too in turns; default: the reward service holds no devices, and scorers compute on its host's CPU",
    )
    share: bool = Field(
        default=False,
        description="hold only the devices of the side at work, so that other runs with placement.share can use the "
        "rest meanwhile; disaggregated: with placement.flow: sequential",
    )
    measure_steps: CountOrZero | None = Field(
        default=None,
        description="auto: steps measured in each mode, by turns, before one is chosen, 0 for none; "
        "default: 3 where that is at most a twentieth of the run, else 0",
    )
    replan: Literal["auto", "propose"] = Field(
        default="auto",
        description="auto: when steps take lastingly longer or shorter than predicted, change the plan at the "
        "next step, or only say what would be better",
    )

    @property
    def pipelined(self) -> bool:
        """Whether groups go to a trainer beside the rollouts as they settle."""
        return self.flow != "sequential"

    @property
    def resident(self) -> bool:
        """Whether a side that has no devices stays loaded."""
        return (self.memory or ("resident" if self.mode == "hybrid" else "offloaded")) == "resident"

    def measured_steps(self, steps: int) -> int:
        """Steps that a run of `steps` measures in each mode: 0 where its mode is given, or it is too short."""
        if self.mode != "auto":
            return 0
        if self.measure_steps is not None:
            return self.measure_steps
        # Each mode needs one step more, which pays for the change.
        return MEASURE_STEPS if MEASURING_SHARE * steps >= 2 * (MEASURE_STEPS + 1) else 0

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, given: Any) -> Any:
        """What other keys say of `flow` and `mode` where the spec does not."""
        made = cls._joined(given)
        if not isinstance(made, dict):
            return made
        if made.get("share") is True:  # It has no trainer beside it to stream to.
            made = {"flow": "sequential", "mode": "collocated", **made}
        if "mode" not in made and (made.get("rollout") or made.get("trainer")):
            both = ("rollout", "trainer")
            sides = {key: _side(key, made.get(key, None if key in both else [])) for key in SIDES}
            named = all(isinstance(side, list) for side in sides.values())
            learns = sides.pop("trainer")
            apart = named and not overlap(learns, [device for side in sides.values() for device in side])
            made = {**made, "mode": "disaggregated" if apart else "collocated"}
        return made

    @classmethod
    def _joined(cls, given: Any) -> Any:
        """`rollout,trainer: DEVICES` stands for both keys, and so do any others of SIDES."""
        if not isinstance(given, dict):
            return given
        made: dict[str, Any] = {}
        for key, value in given.items():
            parts = [part.strip() for part in key.split(",")] if isinstance(key, str) else [key]
            if len(parts) == 1 or not set(parts) <= {*SIDES}:
                made[key] = value
                continue
            if twice := sorted({*parts} & {*given}):
                raise ValueError(f"{twice[0]} is given twice, in {key!r} and alone; remove one")
            made |= dict.fromkeys(parts, value)
        return made


class SessionSection(Section):
    """A run whose steps a loop of the user's own asks for."""

    idle_s: Seconds = Field(
        default=600.0,
        description="without a call for so long, the run pauses and others get its devices; the next call resumes it",
    )


class SchedulingSection(Section):
    """Which run goes first when several want the same instances.

    Priority decides; among equal priorities the run with the least device-seconds over weight; then who came first.
    """

    priority: Annotated[int, Field(strict=True, ge=-100, le=100)] = Field(
        default=0, description="a run of higher priority goes before all runs of lower priority"
    )
    weight: PositiveFloat = Field(
        default=1.0,
        description="share among runs of equal priority: the run goes first whose used device-seconds "
        "divided by weight are least; equal ones go in the order of submission",
    )
    quantum_s: Seconds = Field(
        default=60.0,
        description="seconds that the run keeps instances that another run waits for; "
        "then it yields them at the end of its step",
    )


class LimitsSection(Section):
    """Bounds that fail a run rather than let it rot."""

    max_drop_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, description="share of slots that may be dropped"
    )
    max_mismatch_kl: PositiveFloat | None = Field(
        default=0.1,
        description="most KL(engine || trainer) in nats a token that a step may have, estimated from the tokens that "
        "the engine drew: above it the step is not recorded and the run fails; null: any. A step with tokens of older "
        "versions, which differ by what was learned since, is not judged",
    )
    step_timeout_s: Seconds = Field(default=1800.0, description="longest time of one step")
    instance_timeout_s: Seconds = Field(
        default=120.0, description="longest wait for a lease; a run that lacks an instance queues"
    )
    in_flight_bytes: Bytes = Field(
        default=64 * 1024 * 1024, description="bytes of trajectories that the coordinator relays at once"
    )
    recoveries: Count = Field(
        default=20, description="recoveries without a finished step before the run fails"
    )


class RecordingSection(Section):
    """What was said to the services in a step, kept as a file that `headrace replay` takes up."""

    keep: Literal["none", "failed", "all"] = Field(
        default="none",
        description="of which steps: failed (a service failed or was lost, a value was not finite, the run failed), "
        "all, or none but those that headrace record asks for",
    )
    max_bytes: Bytes = Field(
        default=2 * 1024**3,
        description="bytes of the run's recordings together; the oldest are dropped. What is kept to make one, the "
        "steps since the last checkpoint, takes at most as much again",
    )
    max_count: Count = Field(default=8, description="recordings of the run; the oldest are dropped")


def _run_or_address(given: str) -> str:
    return checked(given) if is_remote(given) else given


class StoreSection(Section):
    """Where copies of what the run keeps go: an object store, or another disk. They lie below URL/RUN.

    Checkpoints are written to the run's directory first, and uploaded beside the steps that follow. Credentials are
    found by the store's own conventions where the coordinator runs.
    """

    url: StoreUrl = Field(
        description="s3://BUCKET/FOLDER, gs://…, az://CONTAINER/FOLDER or file:///FOLDER, without credentials"
    )
    keep: Annotated[list[Kept], Field(min_length=1, max_length=len(get_args(Kept)))] = Field(
        default_factory=lambda: list(get_args(Kept)),
        description="what is copied; of checkpoints the newest checkpoint.keep stay there",
    )
    waiting: Count = Field(
        default=2,
        description="checkpoints that may wait on the disk for their upload; where there are more, uploads are slower "
        "than checkpoints, and the oldest that waits is not uploaded",
    )
    at_end_s: Seconds = Field(
        default=3600.0,
        description="longest wait, once the run is over or paused, for what is not uploaded yet",
    )


class FromCheckpointSection(Section):
    """A checkpoint of another run that this run continues from, in place of the model's weights.

    The run begins with the step after the checkpoint's and with the prompts of that step: `steps` counts the origin's
    steps too. `algorithm.group_size` and `algorithm.prompts_per_step` must be the origin's, the model and the optimizer
    of the same shape; everything else may differ. The supervised warm-up is not made again.
    """

    run: Annotated[str, Field(min_length=1), AfterValidator(_run_or_address)] = Field(
        description="id of the run that made the checkpoint, or where a store has it: URL/RUN, as in s3://BUCKET/F/RUN"
    )
    step: CountOrZero | None = Field(
        default=None,
        description="step of the checkpoint, as `GET /v1/runs/{run}/checkpoints` lists it; "
        "default: the newest valid one",
    )
