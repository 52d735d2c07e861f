"""A simulated simulator: pools that are open or not, and steps that some of them take under a lease alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from headrace.common.v1 import common_pb2 as common
from headrace.simulator.v1 import simulator_pb2 as simulator

from headrace_simulation.fleet.instances import Instance, nothing

STATE = 3


@dataclass
class Simulator(Instance):
    """Opens pools of environments with three numbers of state and one of action, or of conversations."""

    KIND: ClassVar[str] = "simulator"
    pools: dict[str, str] = field(default_factory=dict)
    """Run by open pool."""
    leased: set[str] = field(default_factory=set)
    """Pools whose steps need a lease."""
    asked: dict[str, simulator.OpenPoolResponse] = field(default_factory=dict)

    async def OpenPool(self, request: simulator.OpenPoolRequest) -> simulator.OpenPoolResponse:
        run = request.header.run
        await self.open_run(request.header, None, nothing, lambda: self._end(run))
        known = self.asked.get(request.header.request_id)
        if known is None or known.pool not in self.pools:
            known = self.asked[request.header.request_id] = self._describe(
                len(self.asked), conversation=request.environment.backend == "conversation"
            )
            self.pools[known.pool] = run
            if request.leased:
                self.leased.add(known.pool)
            await self.take_time()
        return known

    async def ClosePool(self, request: simulator.ClosePoolRequest) -> simulator.ClosePoolResponse:
        if not request.pool:
            await self.close_run(request.header)
        else:
            self.fence(request.header, lease=False, opening=False)
            run = self.pools.pop(request.pool, "")
            if run and run not in self.pools.values():
                await self.open_runs.close(common.CommandHeader(run=run))
        return simulator.ClosePoolResponse()

    def stands(self, pool: str, header: common.CommandHeader) -> bool:
        """Whether it takes a step in a pool under this authority."""
        if not self.alive or self.cut_off or pool not in self.pools:
            return False
        needed = pool in self.leased or header.lease_epoch
        return not needed or header.lease_epoch in self.live_leases()

    async def _end(self, run: str) -> None:
        self.pools = {pool: owner for pool, owner in self.pools.items() if owner != run}

    def _describe(self, number: int, *, conversation: bool) -> simulator.OpenPoolResponse:
        pool, incarnation = f"pools/{number}", f"{self.incarnation}/{number}"
        if conversation:
            return simulator.OpenPoolResponse(pool=pool, pool_incarnation=incarnation, conversation=True)
        kind = common.DATA_TYPE_FLOAT32
        return simulator.OpenPoolResponse(
            pool=pool,
            pool_incarnation=incarnation,
            observation_spaces=[simulator.Space(data_type=kind, shape=[STATE])],
            action_space=simulator.Space(data_type=kind, shape=[1]),
        )
