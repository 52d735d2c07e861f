"""From a whole model to FSDP2 shards, which are reduced, moved and released; `policy` is the root that is sharded.

Knows no loss and no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from headrace_trainer.backends.fsdp.experts import ExpertMesh
from headrace_trainer.backends.fsdp.gathering import NamedTensors, Root
from headrace_trainer.backends.fsdp.layouts.layout import Layout
from headrace_trainer.backends.fsdp.loading import materialise, materialise_whole
from headrace_trainer.group.group import TrainerGroup


class ShardedModel(NamedTensors):
    """A policy, and its critic if it has one, sharded over a trainer group: fp32 master shards, forward in
    `compute_dtype` (None: each weight in its own type), gradients in fp32.

    What a rank keeps between micro-batches is the layout's: with `shard: state` whole parameters in `compute_dtype`
    and whole sums of gradients in fp32, which are reduced in `finish_backward` alone.
    """

    def __init__(
        self,
        policy: Root,
        layers: Iterable[nn.Module],
        ranks: TrainerGroup,
        compute_dtype: torch.dtype | None,
        *,
        layout: Layout,
        experts: ExpertMesh | None = None,
    ) -> None:
        super().__init__(policy, ranks, experts)
        self.layout = layout
        self._on_host = layout.offload == "parameters"
        mixed = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # One rank has frozen weights whole already: sharded, it would compute with a copy of them.
        whole = ranks.world_size == 1 and not self._on_host
        frozen = {p for p in self.policy.parameters() if not p.requires_grad and whole}
        frozen = materialise_whole(self.policy, frozen, ranks.device)
        offload = (
            CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if self._on_host else OffloadPolicy()
        )

        def shard(module: nn.Module, mesh: DeviceMesh) -> None:
            sharded = fully_shard(
                module,
                mesh=mesh,
                mp_policy=mixed,
                reshard_after_forward=layout.shard == "weights",
                offload_policy=offload,
                ignored_params=frozen,
            )
            sharded.set_gradient_divide_factor(1.0)  # unnormalised sums over the ranks
            sharded.set_force_sum_reduction_for_comms(True)  # Gloo cannot scale inside a reduction

        if experts is not None:
            self._divided = experts.divide(self.model, shard)
        for module in [*layers, self.policy]:
            shard(module, ranks.mesh_of(layout.shard_ranks))
        if hasattr(self.policy, "probe"):  # a robot's policy has none
            register_fsdp_forward_method(self.policy, "probe")
        materialise(self.policy, torch.device("cpu") if self._on_host else ranks.device)
        root: Any = self.policy
        self._root: FSDPModule = root
        self._anchor = torch.zeros(1, device=ranks.device)
        self._accumulating()
        self.finish_backward()  # fixes the sharded parameters for good
        self._name_tensors()

    def finish_backward(self) -> None:
        """Reduces what was accumulated over the ranks into sharded gradients, and reshards.

        fully_shard reduces at the end of a backward, for every module that holds an accumulated gradient,
        also for those which that backward did not touch: so one through the root alone suffices.
        """
        self._accumulating(last=True)
        anchor = self._anchor.clone().requires_grad_()
        self.policy(None, anchor)[0].sum().backward()
        self._accumulating()

    def recover(self) -> None:
        """After an interrupted forward or backward: nothing is gathered, and nothing is accumulated."""
        self._root.reset_iter_state()
        for parameter in self._of_fully_shard():
            parameter.unsharded_accumulated_grad = None
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None
        self.drop_gradients()

    def release(self) -> None:
        """Frees whole parameters; the next forward gathers them again. Accumulated gradients stay."""
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Takes everything elsewhere: masters, buffers, and gradients that are being accumulated."""
        self.release()
        reduced = {name: p.grad for name, p in self.parameters.items()}
        self.drop_gradients()
        whole = list(self._accumulated())
        untyped: Any = self.policy
        with torch.no_grad():
            # fully_shard's own: it takes its shards anew. Those that are on the host stay there.
            stays = self._on_host
            untyped._apply(
                lambda tensor: (
                    (tensor if stays else _away(tensor, move(tensor.to_local())))
                    if isinstance(tensor, DTensor)
                    else move(tensor)
                )
            )
            for holder, gradient in whole:
                holder.unsharded_accumulated_grad = move(gradient)
        self._anchor = move(self._anchor)
        self._name_tensors()
        for name, shard in reduced.items():
            if isinstance(shard, DTensor):
                local = shard.to_local()
                self.parameters[name].grad = _away(shard, local if stays else move(local))

    def _accumulated(self) -> Iterator[tuple[Any, Tensor]]:
        """Whole gradients that wait for their reduction, each with what of fully_shard's keeps it."""
        for parameter in self._of_fully_shard():
            if parameter.unsharded_accumulated_grad is not None:
                yield parameter, parameter.unsharded_accumulated_grad
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None and whole.grad is not None:
                # The parameter that it belongs to is freed and stays where it is: this is where sums wait.
                gradient, whole.grad = whole.grad, None
                yield parameter, gradient

    def _of_fully_shard(self) -> Iterator[Any]:
        """Its own parameters, which know both the shard and the whole."""
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                group: Any = module._get_fsdp_state()._fsdp_param_group
                yield from group.fsdp_params if group is not None else ()

    def norm_square(self, gradients: Iterable[Tensor]) -> float:
        """The square of the norm of these shards over all ranks, each copy counted once."""
        norms = torch._foreach_norm(list(gradients))
        own = torch.stack(norms).double().square().sum().item()
        copies = self._ranks.world_size // self.layout.shard_ranks
        return self._ranks.sum({"square": own})["square"] / copies

    def _accumulating(self, *, last: bool = False) -> None:
        reduce = last or self.layout.shard != "state"
        self._root.set_requires_gradient_sync(reduce)
        self._root.set_reshard_after_backward(last or self.layout.shard == "weights")
        self._root.set_is_last_backward(reduce)


def _away(like: DTensor, local: Tensor) -> DTensor:
    """A tensor sharded like another whose shard stays where it is: `from_local` takes it to the mesh's device."""
    untyped: Any = DTensor
    found: DTensor = untyped(local, like._spec, requires_grad=False)
    return found
