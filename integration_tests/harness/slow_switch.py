"""A switch in user space, where `tc` cannot delay: `python slow_switch.py MBIT DELAY_MS NAMESPACE=ADDRESS…`.

It puts a tun device `eth9` into each namespace and passes packets between them: each direction of each cable carries
MBIT, and a packet arrives DELAY_MS after it has been sent whole. Nothing is lost. It says "ready" and ends with its
standard input.
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


def main() -> None:
    """Passes packets until standard input ends."""
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
                return
            packet = os.read(key.fd, PACKET_BYTES)
            to = ports.get(packet[24:40] if packet[0] >> 4 == 6 else packet[16:20])
            if to is None:
                continue
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
                heapq.heappush(waiting, (gets[to] + delay_s, order, to, packet, True))
                continue
            try:
                os.write(to, packet)
            except OSError:  # The device is down, or its queue is full: a cable that is pulled.
                continue


if __name__ == "__main__":
    main()
