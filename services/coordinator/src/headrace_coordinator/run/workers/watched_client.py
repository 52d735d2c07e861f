"""A port whose silence is a named wait: a run that stands still says whose answer is missing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Any

from headrace_coordinator.fleet.instance_client import InstanceClient
from headrace_coordinator.waits import Waits

SILENCE_S = 10.0
"""Answers take seconds in a healthy run; only what lasts longer is worth a line."""


class WatchedInstanceClient:
    """A `InstanceClient` for one run's calls to the instance `name`."""

    def __init__(self, client: InstanceClient, waits: Waits, run: str, name: str) -> None:
        self._client = client
        self._waits = waits
        self._run = run
        self._name = name

    async def call(self, method: str, request: Any, timeout: float) -> Any:
        """See `InstanceClient.call`."""
        with self._silence(method):
            return await self._client.call(method, request, timeout)

    def stream(self, method: str, requests: AsyncIterator[Any], timeout: float) -> AsyncIterator[Any]:
        """See `InstanceClient.stream`."""
        return self._watched(method, self._client.stream(method, requests, timeout))

    def listen(self, method: str, request: Any, timeout: float) -> AsyncIterator[Any]:
        """See `InstanceClient.listen`."""
        return self._watched(method, self._client.listen(method, request, timeout))

    async def _watched(self, method: str, responses: AsyncIterator[Any]) -> AsyncIterator[Any]:
        while True:
            with self._silence(method):
                try:
                    response = await anext(responses)
                except StopAsyncIteration:
                    return
            yield response

    async def close(self) -> None:
        """See `InstanceClient.close`."""
        await self._client.close()

    def _silence(self, method: str) -> AbstractContextManager[None]:
        return self._waits.named(self._run, f"{self._name} to answer {method}", after=SILENCE_S)
