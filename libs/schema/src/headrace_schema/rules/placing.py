"""Devices and numbers of processes that do not fit together in `placement`."""

from __future__ import annotations

from collections.abc import Iterator

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.generating import HOSTS, engine_gpus, engine_hosts
from headrace_schema.sections.run import RunSections
from headrace_schema.sections.running import is_every


def placement(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of the devices that are named."""
    section = spec.placement
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
    most = spec.trainer.max_ranks or spec.trainer.ranks
    engines = spec.rollout.instances * spec.engines
    for key, users in (("rollout", engines), ("trainer", max(most, spec.trainer.ranks))):
        devices: list[str] = getattr(section, key)
        if key == "trainer" and devices and section.mode == "hybrid":
            # Once answers are complete it has the others' too.
            devices = list(dict.fromkeys([*devices, *section.rollout, *section.simulator, *section.reward]))
        if len(set(devices)) < len(devices):
            yield problem(f"placement.{key}", "a device is named twice", "name each device once")
        elif devices and len(devices) < users and not any(map(is_every, devices)):
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


def processes(spec: RunSections) -> Iterator[KeyProblemView]:
    """Numbers of instances that make no whole engines over hosts, and of helpers beside them.

    A trainer checks as a run opens whether its algorithm takes help.
    """
    options, instances, placement = spec.rollout.engine_options, spec.rollout.instances, spec.placement
    hosts, gpus = engine_hosts(options), engine_gpus(options)
    if instances % hosts:
        reason = f"{instances} instances make no whole engines of {hosts} hosts"
        whole = max(hosts, instances - instances % hosts)
        yield problem("rollout.instances", reason, f"the nearest valid value is {whole}")
    if gpus % hosts:
        fix = "make tensor_parallel_size times pipeline_parallel_size a multiple of it"
        yield problem(HOSTS, f"{gpus} devices cannot be divided among {hosts} hosts", fix)
    # Beside owners that learn meanwhile, a rollout that decodes no more helps too: then all of them may.
    beside = placement.mode == "disaggregated" and placement.pipelined and not placement.share
    wanted = spec.trainer.helpers + (not beside)
    if spec.trainer.helpers and instances < wanted:
        reason = "a helper takes the devices of one rollout"
        if not beside:
            reason += " while another one decodes what is left"
        fix = f"set rollout.instances: {wanted}, or set trainer.helpers: 0"
        yield problem("trainer.helpers", reason, fix)
    if spec.rollout.helpers > spec.trainer.ranks:
        fix = f"use at most trainer.ranks: {spec.trainer.ranks}, or set rollout.helpers: 0"
        yield problem("rollout.helpers", "each decodes on the devices of one rank", fix)
