"""Runs the operations of one child's environments: one by one, or those that one call steps together. Knows no gRPC."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial

from headrace.common.v1 import common_pb2
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.memory.blobs import BlobStore

from headrace_simulator.batches import ChunkBatch, OutcomeBatch, is_valid, operations_of, outcome_of
from headrace_simulator.pipes import Kind
from headrace_simulator.pools.gathering import Authority, Gathering, Outcomes, Part
from headrace_simulator.pools.host import ChildHost, HostFault, HostLost, endpoint_of
from headrace_simulator.pools.ledger import Description, EnvironmentLedger, Operation, Outcome, length_of


class Shelf:
    """Keeps what a pool's children wrote of each environment's last outcome; `prefix` begins their files' names."""

    def __init__(self, blobs: BlobStore, prefix: str) -> None:
        self._blobs, self._prefix = blobs, prefix
        self._kept: dict[int, list[common_pb2.BlobRef]] = {}

    def place(self, outcome: simulator_pb2.EnvironmentOutcome) -> None:
        """Completes an outcome's references, and releases those of the environment's outcome before."""
        for reference in self._kept.pop(outcome.environment, []):
            self._blobs.release(reference)
        for tensors in (outcome.observation, outcome.final_observation):
            for tensor in tensors.values():
                if tensor.HasField("blob"):
                    reference = self._blobs.adopt(tensor.blob)
                    self._kept.setdefault(outcome.environment, []).append(reference)
                    tensor.blob.CopyFrom(reference)

    def clear(self) -> None:
        """Removes everything."""
        self._kept.clear()
        self._blobs.forget(self._prefix)


@dataclass(frozen=True)
class ChildRules:
    """How long a child may take, and what it holds."""

    step_timeout_s: float
    reset_timeout_s: float
    gather_s: float
    vectorized: bool
    agents: bool
    """Whether it holds agents, whose resets name an endpoint by the rollout's word; an item may look like it."""


class Child:
    """One child of a pool: it runs one batch of operations at a time."""

    def __init__(
        self,
        host: ChildHost,
        ledgers: Sequence[EnvironmentLedger],
        shared: Description,
        rules: ChildRules,
        shelf: Shelf,
        start: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        self._host, self._shared, self._rules, self._shelf = host, shared, rules, shelf
        self._ledgers = {ledger.environment: ledger for ledger in ledgers}
        self._gathering = Gathering(ledgers, self._run_parts, start, rules.gather_s)

    async def outcomes(
        self, operations: Sequence[Operation], batch: ChunkBatch | None, authority: Authority
    ) -> Outcomes:
        """The outcomes of a message's operations, once they have run, are repeated or refused."""
        if self._rules.vectorized:
            return await self._gathering.outcomes(operations, batch, authority)
        async with self._host.turn:
            outcomes, admitted = self._admitted(operations, authority)
            return outcomes + await self._run(admitted) if admitted else outcomes

    def go_on(self) -> None:
        """Waits no longer for operations that are missing."""
        self._gathering.go_on()

    def close(self) -> None:
        """Nothing that waits is run."""
        self._gathering.close()

    async def _run_parts(self, parts: Sequence[Part]) -> None:
        """Runs the operations of several messages as one batch."""
        async with self._host.turn:
            if len(parts) == 1 and self._is_plain(parts[0]):
                response = await self._run_plain(parts[0])
                if not parts[0].outcomes.done():  # who waited for it may be gone
                    parts[0].outcomes.set_result(response)
                return
            found = [(part, *self._admitted(part.each(), part.authority)) for part in parts]
            admitted = [operation for _, _, mine in found for operation in mine]
            acts = {each.environment: each.step_index for each in admitted if not each.HasField("reset")}
            self._gathering.abandon_but(acts, {each.environment for each in admitted})
            ran = {each.environment: each for each in await self._run(admitted)} if admitted else {}
        for part, outcomes, mine in found:
            if not part.outcomes.done():
                part.outcomes.set_result(outcomes + [ran[operation.environment] for operation in mine])

    def _is_plain(self, part: Part) -> bool:
        """Whether its batch runs as it is: valid next actions of episodes that go on here, maybe with resets."""
        space, batch = self._shared.action_space, part.batch
        return (
            batch is not None
            and space is not None
            and len(part.resets) == len(part.operations)
            and all(
                self._ledgers[each].acts_at(index) and self._ledgers[each].generation == self._host.generation
                for each, index in part.acts.items()
            )
            and is_valid(batch, space)
            and part.authority() is None
        )

    async def _run_plain(self, part: Part) -> simulator_pb2.StepResponse:
        """Runs a plain batch, and the resets beside it, as one message of the child's."""
        outcomes, resets = self._admitted(part.operations, part.authority)
        self._gathering.abandon_but(part.acts, part.resets)
        batch, generation = part.batch or ChunkBatch(), self._host.generation
        try:
            child = await self._host.ready()
            if self._host.generation != generation:  # on other devices: no episode is in the new process
                return _response(outcomes + await self._run([*resets, *operations_of(batch)]))
            begun = [self._ledgers[each.environment].effective(each, generation) for each in resets]
            request = simulator_pb2.StepRequest(operations=begun, batch=batch)
            child.send((Kind.OPERATE, request.SerializeToString()))
            limit_s = self._limit_s(batch.action_chunks.shape[1], resets=bool(resets))
            response = simulator_pb2.StepResponse.FromString(await self._host.answer(child, limit_s))
        except (HostLost, HostFault) as lost:
            everything = [*resets, *operations_of(batch)]
            return _response(outcomes + [self._lost(each, str(lost)) for each in everything])
        self._record_plain(response, resets, batch, generation)
        response.outcomes.extend(outcomes)
        return response

    def _record_plain(
        self,
        response: simulator_pb2.StepResponse,
        resets: Sequence[Operation],
        batch: ChunkBatch,
        generation: int,
    ) -> None:
        rows = {environment: row for row, environment in enumerate(batch.environments)}
        given = {each.environment: each for each in resets}
        for outcome in response.outcomes:
            operation = given.get(outcome.environment)
            operation = operation or operations_of(batch, [rows[outcome.environment]])[0]
            self._record(operation, outcome, generation)
        found = response.batch
        ends = zip(found.environments, found.terminated, found.truncated, strict=True)
        for row, (environment, terminated, truncated) in enumerate(ends):
            last = partial(_last, batch, rows[environment], found, row)
            self._ledgers[environment].record_row(terminated or truncated, last)

    def _admitted(
        self, operations: Sequence[Operation], authority: Authority
    ) -> tuple[list[Outcome], list[Operation]]:
        """Outcomes that are known without running the operations, and the operations that are to run."""
        outcomes, admitted = list[Outcome](), list[Operation]()
        for operation in operations:
            known = self._ledgers[operation.environment].admit(operation)
            if known is None:
                admitted.append(operation)
            else:
                outcomes.append(known)
        if admitted and (why_not := authority()) is not None:
            return outcomes + [_revoked(each, why_not) for each in admitted], []
        return outcomes, admitted

    async def _run(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Runs admitted operations; an episode that began in a past process is lost."""
        host = self._host
        try:
            child = await host.ready()
        except (HostLost, HostFault) as lost:
            return [self._lost(each, str(lost)) for each in operations]
        generation, outcomes, sent = host.generation, list[Outcome](), list[Operation]()
        for operation in operations:
            ledger = self._ledgers[operation.environment]
            # An episode stays in the process it began in; a reset takes whatever process there is.
            if operation.HasField("reset") or ledger.generation == generation:
                sent.append(ledger.effective(operation, generation))
            else:
                why = ledger.gone or "the process that held it ended"
                outcomes.append(self._lost(operation, why))
        if not sent:
            return outcomes
        for operation in sent if self._rules.agents else ():
            if child.outlet and operation.HasField("reset"):
                child.outlet.endpoint = endpoint_of(operation.reset.options_json)
        child.send((Kind.OPERATE, simulator_pb2.StepRequest(operations=sent).SerializeToString()))
        given = {operation.environment: operation for operation in operations}
        waiting = deque(given[each.environment] for each in sent)
        while waiting:
            try:
                answer = await host.answer(child, self._limit_of(waiting))
            except HostLost as lost:
                outcomes += [self._lost(each, str(lost)) for each in waiting]
                break
            for reply in simulator_pb2.StepResponse.FromString(answer).outcomes:
                outcomes.append(self._record(waiting.popleft(), reply, generation))
        return outcomes

    def _limit_of(self, waiting: Sequence[Operation]) -> float:
        """How long the next answer may take: the first operation's, or that of all which are stepped together."""
        next_ones = waiting if self._rules.vectorized else [waiting[0]]
        resets = any(each.HasField("reset") for each in next_ones)
        return self._limit_s(max(map(length_of, next_ones)), resets=resets)

    def _limit_s(self, actions: int, *, resets: bool) -> float:
        reset_s = self._rules.reset_timeout_s if resets or self._shared.auto_reset else 0.0
        return self._rules.step_timeout_s * actions + reset_s

    def _record(self, operation: Operation, outcome: Outcome, generation: int) -> Outcome:
        self._shelf.place(outcome)
        return self._ledgers[operation.environment].record(operation, outcome, generation)

    def _lost(self, operation: Operation, why: str) -> Outcome:
        ledger = self._ledgers[operation.environment]
        return self._record(operation, ledger.lost(operation, why), self._host.generation)


def _response(outcomes: Sequence[Outcome]) -> simulator_pb2.StepResponse:
    return simulator_pb2.StepResponse(outcomes=outcomes)


def _last(batch: ChunkBatch, row: int, found: OutcomeBatch, place: int) -> tuple[Operation, Outcome]:
    return operations_of(batch, [row])[0], outcome_of(found, place)


def _revoked(operation: Operation, why: str) -> Outcome:
    return Outcome(
        environment=operation.environment,
        step_index=operation.step_index,
        status=simulator_pb2.OUTCOME_STATUS_REVOKED,
        detail=why,
    )
