"""A backward pass in Python. torch's own runs on no device that its build lacks, and a build for CPUs lacks CUDA.

Nodes are called in the order in which torch's engine calls them, and gradients are checked as it checks them: against
shape, type and device of what they belong to. Knows no model and no device.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

Hook = Callable[[Tensor], Tensor | None]
LAST = 1 << 62
"""Place of a node that adds up a leaf's gradient: as soon as it can."""


class WrongDevice(AssertionError):
    """A gradient is on another device than what it belongs to."""


class PythonEngine:
    """Stands for torch's engine inside `running`."""

    def __init__(self) -> None:
        self._hooks: dict[tuple[Any, int], list[Hook]] = defaultdict(list)
        self._callbacks: list[Callable[[], None]] = []
        self._tasks = count(1)
        self._task = -1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Whatever goes backward in the body goes backward here."""
        with (
            patch.object(torch.autograd.Variable, "_execution_engine", self),
            patch.object(torch.Tensor, "register_hook", lambda tensor, hook: self._register(tensor, hook)),
            patch.object(torch._C, "_current_graph_task_id", lambda: self._task),
        ):
            yield

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Calls it at the end of the backward pass."""
        self._callbacks.append(callback)

    def _register(self, tensor: Tensor, hook: Hook) -> None:
        self._hooks[tensor.grad_fn, tensor.output_nr].append(hook)

    def run_backward(
        self,
        roots: tuple[Tensor, ...],
        given: tuple[Tensor, ...],
        _keep: bool,
        _create: bool,
        inputs: tuple[Tensor, ...],
        *_: Any,
        accumulate_grad: bool,
        **__: Any,
    ) -> tuple[Tensor | None, ...]:
        """As torch's engine is called by `torch.autograd`; the graph is used once, and `inputs` are leaves."""
        outer, self._task = self._task, next(self._tasks)
        found: dict[int, Tensor] | None = None if accumulate_grad else {}
        try:
            with torch.no_grad():
                self._go(list(roots), list(given), found)
                while outer < 0 and self._callbacks:
                    self._callbacks.pop(0)()
        finally:
            self._task = outer
            if outer < 0:
                self._hooks.clear()
        return tuple((found or {}).get(id(each)) for each in inputs)

    def _go(self, roots: list[Tensor], given: list[Tensor], found: dict[int, Tensor] | None) -> None:
        """Leaves' gradients are added to them, or put into `found` by the leaf's id."""
        waits = _incoming([root.grad_fn for root in roots])
        gradients: dict[Any, list[Tensor | None]] = {}
        order = count()
        ready: list[tuple[int, int, Any]] = []
        for root, own in zip(roots, given, strict=True):
            _add(gradients, root.grad_fn, root.output_nr, own)
        for node in {root.grad_fn for root in roots}:
            if not waits[node]:
                heapq.heappush(ready, (-_place(node), next(order), node))
        while ready:
            _, _, node = heapq.heappop(ready)
            passed = self._called(node, gradients.pop(node, None), found)
            for (following, index), gradient in zip(node.next_functions, passed, strict=True):
                if following is None:
                    continue
                if gradient is not None:
                    _add(gradients, following, index, gradient)
                waits[following] -= 1
                if not waits[following]:
                    heapq.heappush(ready, (-_place(following), next(order), following))

    def _called(
        self, node: Any, given: list[Tensor | None] | None, found: dict[int, Tensor] | None
    ) -> list[Tensor | None]:
        """What a node passes on to each of those behind it."""
        nothing: list[Tensor | None] = [None] * len(node.next_functions)
        if given is None:
            return nothing
        for index, own in enumerate(given):
            if own is None:
                continue
            for hook in self._hooks.get((node, index), ()):
                changed = hook(own)
                own = own if changed is None else changed
            given[index] = own
        if _is_leaf(node):
            [own] = given
            leaf = node.variable
            if own is not None and found is not None:
                found[id(leaf)] = own
            elif own is not None:
                leaf.grad = own if leaf.grad is None else leaf.grad + own
            return nothing
        if not isinstance(node, BackwardCFunction):
            passed = node(*given)
            return list(passed) if isinstance(passed, tuple) else [passed]
        whole = [_zeros(node, index) if own is None else own for index, own in enumerate(given)]
        untyped: Any = node
        returned = untyped.apply(*whole)
        listed = returned if isinstance(returned, tuple) else (returned,)
        wanted = iter([own for own, needed in zip(listed, node.needs_input_grad, strict=True) if needed])
        return [None if following is None else next(wanted) for following, _ in node.next_functions]


def _incoming(roots: list[Any]) -> dict[Any, int]:
    """How many nodes give each one its gradient."""
    found: dict[Any, int] = dict.fromkeys(roots, 0)
    open_ = list(found)
    while open_:
        for following, _ in open_.pop().next_functions:
            if following is None:
                continue
            if following not in found:
                found[following] = 0
                open_.append(following)
            found[following] += 1
    return found


def _add(gradients: dict[Any, list[Tensor | None]], node: Any, index: int, own: Tensor) -> None:
    """Adds to what comes to a node, after the checks of torch's engine."""
    wanted = [node.variable] if _is_leaf(node) else node._input_metadata
    like = wanted[index]
    dtype = like.grad_dtype if _is_leaf(node) else like.dtype
    if own.device != like.device:
        raise WrongDevice(f"{node.name()} has tensors on {like.device} and a gradient on {own.device}")
    if own.shape != like.shape:
        own = own.sum_to_size(like.shape)
    if dtype is not None and own.dtype != dtype:
        own = own.to(dtype)
    known = gradients.setdefault(node, [None] * len(wanted))
    before = known[index]
    known[index] = own if before is None else before + own


def _zeros(node: Any, index: int) -> Tensor:
    like = node._input_metadata[index]
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")


def _place(node: Any) -> int:
    return LAST if _is_leaf(node) else int(node._sequence_nr())
