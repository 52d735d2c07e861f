"""What cannot work of `placement`, and of devices that change roles within a step."""

from __future__ import annotations

from collections.abc import Iterator

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.generating import HOSTS, engine_gpus, engine_hosts
from headrace_schema.sections.run import RunSections
from headrace_schema.sections.running import EVERY, SIDES


def placement(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of the mode and of the devices that it takes."""
    section = spec.placement
    named = next((key for key in SIDES if getattr(section, key)), None)
    if section.mode == "auto" and named:
        yield problem(
            f"placement.{named}",
            "with placement.mode: auto the run chooses its devices",
            f"remove placement.{named}, or set placement.mode: collocated, disaggregated or hybrid",
        )
    shared = sorted(set(section.rollout) & set(section.trainer))
    uneven = sorted(section.rollout) != sorted(section.trainer)
    if section.mode == "collocated" and uneven and not (section.simulator or section.reward):
        yield problem(
            "placement.trainer",
            "collocated placement takes turns on the same devices",
            "make placement.rollout and placement.trainer equal, or set placement.mode: disaggregated",
        )
    if section.mode == "disaggregated" and shared:
        yield problem(
            "placement.trainer",
            f"{', '.join(shared)} generates too; {section.mode} placement needs disjoint devices",
            "name other devices, or set placement.mode: collocated or hybrid",
        )
    if section.mode == "disaggregated" and section.memory == "offloaded":
        yield problem(
            "placement.memory",
            "in disaggregated placement both sides have their devices all the time, and stay loaded",
            "remove placement.memory, or set placement.mode: collocated or hybrid",
        )
    most = spec.trainer.max_ranks or spec.trainer.ranks
    engines = spec.rollout.instances * spec.engines
    for key, users in (("rollout", engines), ("trainer", max(most, spec.trainer.ranks))):
        devices: list[str] = getattr(section, key)
        if (
            key == "trainer" and devices and section.mode == "hybrid"
        ):  # Once answers are complete it has the others' too.
            devices = list(dict.fromkeys([*devices, *section.rollout, *section.simulator, *section.reward]))
        if len(set(devices)) < len(devices):
            yield problem(f"placement.{key}", "a device is named twice", "name each device once")
        elif devices and len(devices) < users and not any(_is_every(name) for name in devices):
            own = "trainer.max_ranks" if most > spec.trainer.ranks else "trainer.ranks"
            what = "rollout.instances" if key == "rollout" else own
            reason, fix = f"{what}: {users}", f"set {what}: {len(devices)}"
            if key == "rollout" and spec.engines > 1:
                reason = f"{spec.rollout.instances} rollout instances, each of {spec.engines} models with own devices"
                fix = "leave own_devices out"
            yield problem(
                f"placement.{key}",
                f"{len(devices)} devices are too few for {reason}",
                f"name at least {users} devices, or {fix}",
            )


def _is_every(name: str) -> bool:
    return name.rpartition("/")[2] == EVERY


def engine_over_hosts(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of an engine that spans hosts: it has equal parts, and devices of its own for whole stages."""
    options, instances = spec.rollout.engine_options, spec.rollout.instances
    hosts, gpus = engine_hosts(options), engine_gpus(options)
    if hosts == 1:
        return
    whole = max(hosts, instances - instances % hosts)
    if instances % hosts:
        reason = f"{instances} instances make no whole engines of {hosts} hosts"
        yield problem("rollout.instances", reason, f"the nearest valid value is {whole}")
    if gpus % hosts:
        reason = f"{gpus} devices cannot be divided among {hosts} hosts"
        yield problem(
            HOSTS, reason, "make tensor_parallel_size times pipeline_parallel_size a multiple of it"
        )
    fix = f"or leave {HOSTS} out"
    if spec.placement.mode not in ("collocated", "disaggregated") or spec.placement.share:
        reason = "its hosts change devices together, at the ends of stages"
        key, value = ("share", "false") if spec.placement.share else ("mode", "collocated or disaggregated")
        yield problem(f"placement.{key}", reason, f"set {value}, {fix}")
    used = {
        "environment": spec.environment is not None,
        "agent": spec.agent is not None,
        "policies": bool(spec.policies),
        "rollout.enable_lora": spec.rollout.enable_lora,
        "rollout.helpers": bool(spec.rollout.helpers),
        "trainer.helpers": bool(spec.trainer.helpers),
    }
    for key in (key for key, there in used.items() if there):
        yield problem(key, "an engine over hosts answers prompts alone", f"leave it out, {fix}")


def share(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of `placement.share`."""
    placement = spec.placement
    if not placement.share:
        return
    fix = ", or set placement.share: false"
    if placement.mode == "hybrid":
        reason = "a run that shares holds the devices of one side at a time, and hybrid holds both"
        yield problem("placement.share", reason, f"set placement.mode: collocated or disaggregated{fix}")
    if placement.mode == "auto":
        reason = "a run that measures placements needs its devices to itself"
        yield problem("placement.share", reason, f"set placement.mode: collocated or disaggregated{fix}")
    if placement.memory == "resident":
        reason = "what other runs wait for is the devices and their memory"
        yield problem("placement.memory", reason, f"set placement.memory: offloaded{fix}")
    if placement.mode == "disaggregated" and placement.pipelined:
        reason = (
            "a run that shares holds the devices of one side at a time, so nothing can stream to the other"
        )
        yield problem("placement.flow", reason, f"set placement.flow: sequential{fix}")
    if spec.trainer.helpers:
        reason = "a helper's devices are the run's own until the step ends"
        yield problem("trainer.helpers", reason, f"set trainer.helpers: 0{fix}")


def trainer_helpers(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of `trainer.helpers`; a trainer checks as a run opens whether its algorithm takes help."""
    if not spec.trainer.helpers:
        return
    fix = ", or set trainer.helpers: 0"
    if spec.deterministic:
        reason = "devices that move when the tail decodes make no two runs alike"
        yield problem("trainer.helpers", reason, f"set deterministic: false{fix}")
    placement = spec.placement
    if placement.mode == "hybrid":
        reason = "the trainer group takes the rollouts' devices itself when the tail ends"
        yield problem("trainer.helpers", reason, f"set placement.mode: disaggregated or collocated{fix}")
    if placement.mode == "auto" and placement.measure_steps:
        reason = "steps in which devices move say nothing of another placement"
        yield problem("trainer.helpers", reason, f"set placement.mode: disaggregated or collocated{fix}")
    # Beside owners that learn meanwhile, a rollout that decodes no more helps too: then all of them may.
    beside = placement.mode == "disaggregated" and placement.pipelined and not placement.share
    wanted = spec.trainer.helpers + (not beside)
    if spec.rollout.instances < wanted:
        reason = "a helper takes the devices of one rollout"
        if not beside:
            reason += " while another one decodes what is left"
        yield problem("trainer.helpers", reason, f"set rollout.instances: {wanted}{fix}")


def rollout_helpers(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of rollouts that decode on the trainer's devices at the begin of a step."""
    if not spec.rollout.helpers:
        return
    fix = ", or set rollout.helpers: 0"
    if spec.deterministic:
        reason = "devices that move while answers are made make no two runs alike"
        yield problem("rollout.helpers", reason, f"set deterministic: false{fix}")
    if spec.placement.mode != "disaggregated" or spec.placement.share:
        reason = "they decode on devices that the trainer has for itself, which only disaggregated placement gives it"
        yield problem(
            "rollout.helpers",
            reason,
            f"set placement.mode: disaggregated and placement.share: false{fix}",
        )
    if spec.rollout.helpers > spec.trainer.ranks:
        reason = "each decodes on the devices of one rank"
        yield problem("rollout.helpers", reason, f"use at most trainer.ranks: {spec.trainer.ranks}{fix}")
