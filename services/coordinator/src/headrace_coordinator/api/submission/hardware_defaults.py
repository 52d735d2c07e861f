"""What a spec leaves out and the fleet's hardware decides; see `headrace_schema.gpu_defaults`. On CPU slots nothing."""

from __future__ import annotations

from headrace_schema.gpu_defaults import Default, Gpus, gpu_defaults
from headrace_schema.model_size import text_config
from headrace_schema.spec import RunSpec

from headrace_coordinator.api.submission.fleet_view import FleetView, has_gpus
from headrace_coordinator.domain.devices.leases import is_gpu
from headrace_coordinator.domain.devices.places import named_devices


def hardware_defaults(spec: RunSpec, engine: str, fleet: FleetView) -> list[Default]:
    """Defaults of a run that has GPUs, of keys that its spec does not name; none for robot policies."""
    if spec.workflow == "embodied" or not has_gpus(spec, fleet):
        return []
    return gpu_defaults(spec, engine, text_config(spec.model.path), gpus_of(spec, fleet))


def gpus_of(spec: RunSpec, fleet: FleetView) -> Gpus:
    """Those that a run may generate on: the ones it names, or all."""
    named = named_devices(spec.placement.rollout, fleet.devices, fleet.hosts)
    sizes = [fleet.gpu_bytes.get(device, 0) for device in named or fleet.devices if is_gpu(device)]
    seen = [count for count in (len(named), max(fleet.rollouts_see, default=0)) if count]
    return Gpus(min(sizes, default=0), min(seen, default=0))
