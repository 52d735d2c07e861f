"""A version between two processes with GPUs, without services: what gpu_check measures of it.

`python benchmarks/_gpu_weights.py lend|send SIZE` gives one of SIZE bytes from the first GPU and prints how it is had,
a line; `map|receive DEVICE SIZE` reads that line and prints its figures.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
from headrace_modelkit.broadcasting import NCCL, Broadcasts
from headrace_modelkit.device_memory import DeviceCopies, DeviceMaps, Handle, sums_of

HOST = "127.0.0.1"
FIRST = torch.device("cuda:0")


def body_of(size: int) -> Any:
    """The same bytes in every process."""
    torch.manual_seed(7)
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


def lend(size: int) -> None:
    """Lends a copy until standard input ends."""
    copies = DeviceCopies(lambda: FIRST)
    copy, handle = copies.lend("version", memoryview(body_of(size).numpy()), [(0, size)])
    told = {key: value.hex() if isinstance(value, bytes) else value for key, value in asdict(handle).items()}
    print(json.dumps({"handle": told, "sums": copy.sums}), flush=True)
    sys.stdin.read()


def map_lent(name: str, size: int) -> dict[str, float]:
    """Maps it, checks its sum, and copies it on the device."""
    told = json.loads(sys.stdin.readline())
    fields: dict[str, Any] = {
        k: bytes.fromhex(v) if k.endswith("handle") else v for k, v in told["handle"].items()
    }
    device = torch.device(name)
    began = time.perf_counter()
    flat = DeviceMaps(lambda: device).open(Handle(**fields), [(0, size)], told["sums"])
    assert flat is not None
    mapped = time.perf_counter()
    own = flat.clone()
    torch.cuda.synchronize(device)
    copied = time.perf_counter()
    whole = torch.equal(own.cpu(), body_of(size))
    return {
        "map_and_sum_s": mapped - began,
        "copy_gb_per_s": size / (copied - mapped) / 1e9,
        "whole": float(whole),
    }


def send(size: int) -> None:
    """Broadcasts it to one other."""
    groups = Broadcasts(lambda: FIRST)
    port, _store = groups.serve(HOST)
    print(json.dumps({"port": port}), flush=True)
    group = groups.join(HOST, port, "check", 0, 2, NCCL, HOST)
    body = memoryview(body_of(size).numpy())
    group.send(body[offset : offset + group.bucket] for offset in range(0, size, group.bucket))


def receive(name: str, size: int) -> dict[str, float]:
    """Takes part, and compares what came."""
    port = json.loads(sys.stdin.readline())["port"]
    device = torch.device(name)
    began = time.perf_counter()
    group = Broadcasts(lambda: device).join(HOST, port, "check", 1, 2, NCCL, HOST)
    joined = time.perf_counter()
    arrived, offset = torch.empty(size, dtype=torch.uint8), 0
    for piece in group.receive():
        arrived[offset : offset + len(piece)] = torch.frombuffer(piece, dtype=torch.uint8)
        offset += len(piece)
    ended = time.perf_counter()
    sums = sums_of(arrived, [(0, size)]) == sums_of(body_of(size), [(0, size)])
    return {"join_s": joined - began, "gb_per_s": size / (ended - joined) / 1e9, "whole": float(sums)}


if __name__ == "__main__":
    what, *options = sys.argv[1:]
    if what in ("lend", "send"):
        {"lend": lend, "send": send}[what](int(options[0]))
    else:
        found = {"map": map_lent, "receive": receive}[what](options[0], int(options[1]))
        print(json.dumps(found), flush=True)
