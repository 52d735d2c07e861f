"""Which connections of a container are carried, and where to: its endpoint, and hosts of its list by HTTP."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from headrace_servicekit.contained.proxy import BadHost, Hosts, host_and_port

from headrace_containers.network.channels import Channel, joined
from headrace_containers.provider import ENDPOINT_PORT, BadSpec, Network

KEY = "network.allow"


class Gate:
    """Of one container. Raises BadSpec for a network that is none."""

    def __init__(self, network: Network) -> None:
        try:
            self._hosts = Hosts(network.allow, KEY)
        except BadHost as error:
            raise BadSpec(KEY, str(error)) from error
        try:
            self._endpoint = host_and_port(network.endpoint) if network.endpoint else None
        except BadHost as error:
            raise BadSpec("network.endpoint", str(error)) from error
        if self._endpoint and not self._endpoint[1]:
            raise BadSpec("network.endpoint", f"{network.endpoint!r} has no port")

    async def opened(self, channel: Channel, port: int) -> None:
        """Serves a connection that came in at a port of the container's."""
        try:
            if port != ENDPOINT_PORT:
                found = await self._hosts.request(channel.read, channel.write)
            else:
                found = await asyncio.open_connection(*self._endpoint) if self._endpoint else None
            if found is None:
                await channel.end()
            else:
                await joined(channel, *found)
        except (ConnectionError, OSError):
            pass
        finally:
            with suppress(ConnectionError, OSError):
                await channel.close()
