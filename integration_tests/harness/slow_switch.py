"""A switch in user space, where `tc` cannot delay: `python slow_switch.py MBIT DELAY_MS NAMESPACE=ADDRESS…`.

It puts a tun device `eth9` into each namespace and passes packets between them: each direction of each cable carries
MBIT, and a packet arrives DELAY_MS after it has been sent whole. It says "ready" and ends with its standard input,
where it takes faults of what one address sends another: "cut A B" loses it, "delay A B MS" holds it for longer, "reset
A B" ends each connection that sends something by a reset of both ends, "mend" ends all of these.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import selectors
import socket
import struct
import sys
import time
from ipaddress import ip_address

NEW_NETWORK = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
PACKET_BYTES = 65535
MTU = 65000
"""Large packets: a switch in Python passes ten thousand a second."""


def tun(namespace: str) -> int:
    """A new device in a namespace, as a file of packets."""
    libc, own = ctypes.CDLL(None, use_errno=True), os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH22x", b"eth9", IFF_TUN | IFF_NO_PI))
        with socket.socket() as probe:
            fcntl.ioctl(probe, 0x8922, struct.pack("16si20x", b"eth9", MTU))  # SIOCSIFMTU
        return handle
    finally:
        libc.setns(own, NEW_NETWORK)
        os.close(own)
        os.close(there)


Pair = tuple[bytes, bytes]
TCP, RST_ACK = 6, 0x14


class Faults:
    """What is wrong between pairs of addresses, one direction each."""

    def __init__(self) -> None:
        self.cut: set[Pair] = set()
        self.reset: set[Pair] = set()
        self.delay_s: dict[Pair, float] = {}

    def hear(self, line: str) -> None:
        """One line of standard input."""
        match line.split():
            case ["cut", a, b]:
                self.cut.add(_pair(a, b))
            case ["reset", a, b]:
                self.reset.add(_pair(a, b))
            case ["delay", a, b, milliseconds]:
                self.delay_s[_pair(a, b)] = float(milliseconds) / 1e3
            case ["mend"]:
                self.cut.clear(), self.reset.clear(), self.delay_s.clear()


def _pair(a: str, b: str) -> Pair:
    return ip_address(a).packed, ip_address(b).packed


def reset_of(packet: bytes, towards_sender: bool) -> bytes | None:
    """The reset of a TCP connection over IPv4, by a packet of it: for its sender or for its receiver."""
    if packet[0] >> 4 != 4 or packet[9] != TCP:
        return None
    length = (packet[0] & 15) * 4
    ports, (sequence, acknowledged) = (
        packet[length : length + 4],
        struct.unpack_from("!II", packet, length + 4),
    )
    if packet[length + 13] & 0x06:  # It opens, or is a reset.
        return None
    addresses = packet[12:20]
    if towards_sender:
        addresses, ports = addresses[4:] + addresses[:4], ports[2:] + ports[:2]
        sequence, acknowledged = acknowledged, sequence
    body = ports + struct.pack("!IIBBHHH", sequence, acknowledged, 0x50, RST_ACK, 0, 0, 0)
    total = _sum(addresses + struct.pack("!HH", TCP, len(body)) + body)
    body = body[:16] + struct.pack("!H", total) + body[18:]
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 0, 0, 64, TCP, 0) + addresses
    return head[:10] + struct.pack("!H", _sum(head)) + head[12:] + body


def _sum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def main() -> None:
    """Passes packets until standard input ends."""
    faults, said = Faults(), b""
    rate, delay_s = float(sys.argv[1]) * 1e6 / 8, float(sys.argv[2]) / 1e3
    ports: dict[bytes, int] = {}
    for word in sys.argv[3:]:
        namespace, _, address = word.partition("=")
        ports[ip_address(address).packed] = tun(namespace)
    sends, gets = dict.fromkeys(ports.values(), 0.0), dict.fromkeys(ports.values(), 0.0)
    waiting: list[tuple[float, int, int, bytes, bool]] = []
    """When, in order, to whom, the packet, and whether it has left its sender's cable."""
    selector, number = selectors.DefaultSelector(), 0
    for handle in ports.values():
        selector.register(handle, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        now = time.monotonic()
        for key, _ in selector.select(max(0.0, waiting[0][0] - now) if waiting else None):
            if key.fileobj is sys.stdin:
                if not (more := os.read(0, PACKET_BYTES)):
                    return
                *lines, said = (said + more).split(b"\n")
                for line in lines:
                    faults.hear(line.decode())
                continue
            packet = os.read(key.fd, PACKET_BYTES)
            v6 = packet[0] >> 4 == 6
            pair = (packet[8:24], packet[24:40]) if v6 else (packet[12:16], packet[16:20])
            to = ports.get(pair[1])
            if to is None or pair in faults.cut:
                continue
            if pair in faults.reset:
                for handle, packet_of in ((key.fd, True), (to, False)):
                    if reset := reset_of(packet, packet_of):
                        os.write(handle, reset)
            now = time.monotonic()
            sends[key.fd] = max(now, sends[key.fd]) + len(packet) / rate
            number += 1
            heapq.heappush(waiting, (sends[key.fd], number, to, packet, False))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            when, order, to, packet, sent = heapq.heappop(waiting)
            if not sent:
                # A packet is on the second cable while it still leaves the first one.
                gets[to] = max(when, gets[to] + len(packet) / rate)
                late_s = delay_s + faults.delay_s.get((packet[12:16], packet[16:20]), 0.0)
                heapq.heappush(waiting, (gets[to] + late_s, order, to, packet, True))
                continue
            try:
                os.write(to, packet)
            except OSError:  # The device is down, or its queue is full: a cable that is pulled.
                continue


if __name__ == "__main__":
    main()
