"""Expert parallel in fsdp: each rank of a group has a share of every layer's experts, and tokens go to them.

Ranks that have the same experts shard them among each other with fully_shard; everything else is sharded over all
ranks as usual. An expert's gradient is the sum over the tokens that came to it, from whichever rank, so that the sum
over the ranks that shard it is the whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from headrace_modelkit.families.mixtures import expert_blocks, expert_shape, no_shape
from headrace_modelkit.families.routing import Routing
from headrace_modelkit.loading import load_architecture
from headrace_schema.openings import TrainerConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from headrace_trainer.algorithms._base import Algorithm
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.backends.shared.exchange import PaddedAllToAll, Room
from headrace_trainer.backends.shared.losses import Forward
from headrace_trainer.errors import invalid
from headrace_trainer.group.group import TrainerGroup

KEY = "trainer.backend_options.expert_parallel"
_meshes: WeakKeyDictionary[TrainerGroup, dict[int, DeviceMesh]] = WeakKeyDictionary()
"""Process groups are made once in a generation of ranks."""


def check_experts(options: FsdpOptions, config: TrainerConfig, algorithm: Algorithm) -> None:
    """Raises Refusal INVALID, naming the key, for expert parallelism that does not divide; and ModelNotReadable."""
    ranks = options.expert_parallel
    if ranks == 1:
        return
    architecture = load_architecture(config.model)
    shape = expert_shape(architecture)
    if shape is None:
        raise invalid(
            f"{KEY}: {config.model.path!r} {no_shape(architecture)}, so that there is nothing to divide; leave it out",
            key=KEY,
        )
    if shape.experts % ranks:
        fits = max(count for count in range(1, ranks) if shape.experts % count == 0)
        raise invalid(
            f"{KEY}: {shape.experts} experts of a layer (model.path) cannot be divided over {ranks} ranks; the nearest "
            f"lower value that divides them is {fits}",
            key=KEY,
        )


class ExpertMesh:
    """`size` neighbouring ranks divide the experts; every `size`-th rank has the same ones."""

    def __init__(self, ranks: TrainerGroup, size: int) -> None:
        made = _meshes.setdefault(ranks, {})
        if size not in made:
            shape = (ranks.world_size // size, size)
            made[size] = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("same", "experts"))
        self.size = size
        self.place = ranks.rank % size
        """Which share this rank has."""
        self.same = made[size]["same"]
        """The ranks that have the same experts."""
        self._group = made[size].get_group("experts")
        self._room, self._ranks = Room(size), ranks

    def divide(self, model: PreTrainedModel, shard: Callable[[nn.Module, DeviceMesh], None]) -> set[str]:
        """Leaves this rank its experts, sharded by `shard` over those that have the same; their names."""
        divided: set[str] = set()
        names = {module: name for name, module in model.named_modules()}
        for block in expert_blocks(model):
            experts: Any = block.experts
            total = experts.num_experts
            for name, parameter in list(experts.named_parameters()):
                owner = experts.get_submodule(name.rpartition(".")[0])
                own = parameter.data.chunk(self.size)[self.place].clone()
                setattr(
                    owner, name.rpartition(".")[2], nn.Parameter(own, requires_grad=parameter.requires_grad)
                )
                divided.add(f"{names[experts]}.{name}")
            experts.total_experts, experts.num_experts = total, total // self.size
            experts.exchange = PaddedAllToAll(self._group, self._room)
            shard(experts, self.same)
        return divided

    def forward(
        self, tokens: int, chosen: int, routing: Routing | None, compute: Callable[[], Forward]
    ) -> Forward:
        """What a forward of so many tokens on this rank gives; all ranks call it.

        Once more with more room where one rank's experts were wanted more often than there was room for: the host waits
        for the device once, behind all layers.
        """
        sent = int(self._ranks.maximum({"rows": tokens})["rows"]) * chosen
        before = routing.noted() if routing is not None else None
        while True:
            self._room.begin(sent)
            found = compute()
            own = 0 if self._room.needed is None else int(self._room.needed.item())
            needed = int(self._ranks.maximum({"rows": own})["rows"])
            if needed <= self._room.rows:
                return found
            self._room.grow(needed, sent)
            if routing is not None and before is not None:
                routing.forget(before)

    def whole(self, own: Tensor) -> Tensor:
        """All experts' of this rank's experts'."""
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own.contiguous(), group=self._group)
        return torch.cat(parts)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's experts' of all experts'."""
        return whole.chunk(self.size)[self.place]

    def shape(self, parameter: DTensor) -> tuple[int, ...]:
        """Of a whole parameter."""
        return (parameter.shape[0] * self.size, *parameter.shape[1:])
