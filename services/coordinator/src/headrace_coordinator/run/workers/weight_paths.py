"""Which way a version goes: each host gets it once, from a host that has it or receives it. Pure.

Hosts form chains, and bytes are passed on as they arrive: a chain of n hosts takes as long as one, and n - 1 times the
delay of a piece; a host that fed two others at once would take twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.common.v1 import common_pb2 as common

from headrace_coordinator.domain.state import InstanceState

CHAIN = 16
"""Most hosts of one chain; the trainer feeds all chains."""
PEERS = 2
"""Instances of a host that are asked, one after the other."""


def sources_of(
    receivers: Sequence[InstanceState],
    holders: Sequence[InstanceState],
    origin: common.WeightSource,
    origin_host: str,
) -> dict[str, list[common.WeightSource]]:
    """By incarnation of a receiver, whom it asks, best first; the last one is the trainer's own store, `origin`.

    It says how many hosts are told with it.

    `holders` have the version already. Receivers on the trainer's host map its memory, and ask nobody else.
    """
    hosts: dict[str, list[InstanceState]] = {}
    for receiver in sorted(receivers, key=lambda each: (each.host, each.instance)):
        hosts.setdefault(receiver.host, []).append(receiver)
    here = hosts.pop(origin_host, [])
    told = common.WeightSource()
    told.CopyFrom(origin)
    told.receivers = max(1, len(hosts) + bool(here and origin.parts))  # Of parts nobody maps the whole.
    away = [holder for holder in holders if holder.host != origin_host]
    found = {receiver.incarnation: [told] for receiver in here}
    names = list(hosts)
    for place, name in enumerate(names):
        peers: list[common.WeightSource] = []
        if place % CHAIN:
            peers = [_peer(each, relay=True) for each in hosts[names[place - 1]][:PEERS]]
        elif away:
            peers = [_peer(away[place // CHAIN % len(away)], relay=False)]
        found |= {receiver.incarnation: [*peers, told] for receiver in hosts[name]}
    return found


def _peer(instance: InstanceState, *, relay: bool) -> common.WeightSource:
    return common.WeightSource(
        address=instance.address,
        incarnation=instance.incarnation,
        transports=[common.WEIGHT_TRANSPORT_GRPC],
        relay=relay,
    )
