"""What there is to run on, which engine a run takes of it, and the defaults that its hardware decides.

Pure but for one read: a model's config.json, of this host or of the hub.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_schema.gpu_defaults import Default, Gpus, gpu_defaults
from headrace_schema.model_size import text_config
from headrace_schema.resources.fleet import InstanceView
from headrace_schema.sections.generating import ModelSection, quantized
from headrace_schema.spec import RunSpec
from headrace_servicekit.lease.gpus import GPU_MEMORY, WEIGHTS_MEMORY, read_gpu_memory
from headrace_servicekit.registry import read_capabilities

from headrace_coordinator.domain.devices.leases import BUILT_IN, is_gpu
from headrace_coordinator.domain.devices.placement import placement_of
from headrace_coordinator.domain.devices.places import named_devices

AUTO = "auto"
EXTRAS = ("vllm", "sglang")
"""Engines that are an extra of headrace-rollout, the one that `auto` prefers first."""
SMALLEST_HEAD = 32
"""Numbers of a head that vLLM's and SGLang's kernels take."""
LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv", "mamba"}
LAYERS |= {"hybrid", "attention", "moe", "mlp"}
"""Kinds of layers that the built-in engine runs (`headrace_modelkit.attending`)."""


@dataclass(frozen=True)
class FleetView:
    """What there is to run on. Capabilities by kind and facet: trainer → algorithms → {grpo, …}."""

    capabilities: Mapping[str, Mapping[str, frozenset[str]]]
    instances: Mapping[str, int]
    devices: Sequence[str]
    hosts: Mapping[str, set[str]] = field(default_factory=dict)
    """Device → hosts of the instances that see it."""
    simulate: Collection[str] = ()
    """Devices that simulators see."""
    score: Collection[str] = ()
    """Devices that reward instances see."""
    rollouts_see: Sequence[int] = ()
    """How many devices each rollout instance sees; empty: not known."""
    rollout_hosts: Sequence[str] = ()
    """Hosts with rollout instances."""
    gpu_bytes: Mapping[str, int] = field(default_factory=dict)
    """Memory of GPUs, where their instances know it."""
    weights_bytes: Mapping[str, int] = field(default_factory=dict)
    """Of the instances of a kind, the least room for published weights, where they know it."""

    @classmethod
    def of(cls, instances: Iterable[InstanceView]) -> FleetView:
        """The union over instances that are at work, silent ones included."""
        at_work = [each for each in instances if each.state in ("READY", "SILENT")]
        capabilities: dict[str, dict[str, frozenset[str]]] = {each.kind: {} for each in at_work}
        hosts: dict[str, set[str]] = {}
        weights: dict[str, int] = {}
        for instance in at_work:
            for name in instance.devices:
                hosts.setdefault(name, set()).add(instance.host)
            for text in instance.capabilities.get(WEIGHTS_MEMORY, ()):
                weights[instance.kind] = min(weights.get(instance.kind, int(text)), int(text))
            facets = capabilities[instance.kind]
            for facet, names in instance.capabilities.items():
                facets[facet] = facets.get(facet, frozenset()) | set(names)
        memory = (text for facets in capabilities.values() for text in facets.get(GPU_MEMORY, ()))
        rollouts = [each for each in at_work if each.kind == "rollout"]
        return cls(
            capabilities,
            Counter(each.kind for each in at_work),
            list(hosts),
            hosts,
            simulate={name for each in at_work if each.kind == "simulator" for name in each.devices},
            score={name for each in at_work if each.kind == "reward" for name in each.devices},
            rollouts_see=[len(each.devices) for each in rollouts],
            rollout_hosts=list(dict.fromkeys(each.host for each in rollouts)),
            gpu_bytes=read_gpu_memory(memory),
            weights_bytes=weights,
        )

    def names(self, kind: str, facet: str) -> frozenset[str]:
        """Capabilities of one kind and facet."""
        return self.capabilities.get(kind, {}).get(facet, frozenset())

    def instead(self, kind: str, sort: str, name: str, needs: str) -> list[str] | None:
        """Plug-ins of a sort (engine, algorithm) that can do what one cannot; None where it can, or it is not known."""
        known, listed = self.names(kind, f"{sort}s"), self.names(kind, f"{sort}_features")
        if not listed or name not in known or f"{name}:{needs}" in listed:
            return None
        return sorted(each for each in known if f"{each}:{needs}" in listed)

    def schemas(self, kind: str, facet: str, name: str) -> list[Mapping[str, Any]]:
        """JSON Schemas of a plug-in's options; instances of two releases may register two."""
        listed = (text for text in sorted(self.names(kind, facet)) if text.startswith(f"{name}="))
        found = (read_capabilities([text]).get(name) for text in listed)
        return [schema for schema in found if schema is not None]


def choose_engine(spec: RunSpec, fleet: FleetView) -> tuple[str, str]:
    """(engine, why it is that one) where `rollout.engine` is auto, else (the named engine, "").

    A run that has GPUs and names no engine leaves it to the fleet, too.
    """
    engine, named = spec.rollout.engine, {"engine", "engine_options"} & spec.rollout.model_fields_set
    plain = spec.trains_robots or not has_gpus(spec, fleet)
    if not spec.generates or (engine != AUTO and (named or plain)):
        return engine, ""
    name, why = _preferred(spec, fleet)
    return name, f"rollout.engine: {AUTO} takes {name}: {why}"


def _preferred(spec: RunSpec, fleet: FleetView) -> tuple[str, str]:
    known = fleet.names("rollout", "engines")
    extras = [name for name in EXTRAS if name in known]
    if not extras:
        return BUILT_IN, f"no rollout instance has {' or '.join(EXTRAS)} installed"
    if spec.deterministic:
        return BUILT_IN, f"deterministic: true, which {' and '.join(extras)} cannot promise"
    if spec.model.gguf_file is not None:
        return BUILT_IN, "the model is a GGUF file"
    if other := _unusual_layers(spec.model):
        return extras[0], f"the model has {', '.join(sorted(other))} layers, which {BUILT_IN} cannot run"
    if 0 < (numbers := _head_size(spec.model)) < SMALLEST_HEAD:
        return (
            BUILT_IN,
            f"the model's heads have {numbers} numbers, and {extras[0]} takes {SMALLEST_HEAD} or more",
        )
    if not has_gpus(spec, fleet):
        return BUILT_IN, f"the run has no GPU, and without one {extras[0]} takes longer to start"
    return extras[0], "it is installed and the run has GPUs"


def has_gpus(spec: RunSpec, fleet: FleetView) -> bool:
    """Whether a run may generate on GPUs: on those that it names, or on any."""
    named = named_devices(spec.placement.rollout, fleet.devices, fleet.hosts)
    devices = named or fleet.devices
    return any(device.rpartition("/")[2].startswith("gpu") for device in devices)


def _unusual_layers(model: ModelSection) -> set[str]:
    kinds = text_config(model).get("layer_types")
    return {str(kind) for kind in kinds} - LAYERS if isinstance(kinds, list) else set()


def _head_size(model: ModelSection) -> int:
    config = text_config(model)
    width, heads, size = (config.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    if type(size) is int:
        return size
    return width // heads if type(width) is int and type(heads) is int and heads > 0 else 0


def hardware_defaults(spec: RunSpec, engine: str, fleet: FleetView) -> list[Default]:
    """Defaults of a run that has GPUs, of keys that its spec does not name; none for robot policies."""
    if spec.trains_robots or not has_gpus(spec, fleet):
        return []
    found = gpu_defaults(spec, engine, text_config(spec.model), gpus_of(spec, fleet))
    return [each for each in found if spec.generates or each.key.startswith("trainer.")]


def gpus_of(spec: RunSpec, fleet: FleetView) -> Gpus:
    """Those that a run may generate on: the ones it names, or all, less its ranks' where it never takes turns."""
    named = named_devices(spec.placement.rollout, fleet.devices, fleet.hosts)
    gpus = [device for device in named or fleet.devices if is_gpu(device)]
    sizes = [fleet.gpu_bytes.get(device, 0) for device in gpus]
    seen = [count for count in (len(named), max(fleet.rollouts_see, default=0)) if count]
    found = placement_of(spec.placement, ahead=spec.algorithm.max_staleness > 0, gpus=True)
    apart = found.apart and not found.spans and not named
    on_host = Counter(host for device in gpus for host in fleet.hosts.get(device, ()))
    return Gpus(
        min(sizes, default=0),
        min(seen, default=0),
        max(0, len(gpus) - spec.trainer.ranks * apart),
        max(on_host.values(), default=0),
    )


def correction(spec: RunSpec, fleet: FleetView) -> list[Default]:
    """Truncated importance sampling for rollouts that are quantised, or merge adapters into a base of few bits, in each
    policy's algorithm that names no correction of its own: the engine's distribution is not the trainer's then.
    """
    if not spec.generates:
        return []
    what = quantized(spec.rollout.engine_options)
    why = f"the engine computes with {what}, and the trainer without"
    trainers = [spec.trainer, *(each.trainer for each in spec.policies.values())]
    merges = any(own is not None and own.lora for own in trainers) and not spec.rollout.enable_lora
    if not what and merges and spec.model.dtype != "float32" and not spec.deterministic:
        what = f"adapters merged into {spec.model.dtype} weights"
        why = f"the engine computes with {what}, which rounds small changes away, and the trainer beside them"
    return [
        Default(f"{key}.options.correction", "truncate", why)
        for key, algorithm in spec.algorithms.items()
        if what
        and "correction" not in algorithm.options
        and algorithm.options.get("old_log_probs") != "engine"
        and any(
            "correction" in schema.get("properties", {})
            for schema in fleet.schemas("trainer", "algorithm_options", algorithm.name)
        )
    ]
