"""The process of a template: imports the heavy libraries, and forks a service for each request that it reads.

`python -m headrace_servicekit.process.template_process ROOM`, started by `Template` with one end of a socket as its
input. A request is a packet with the descriptor of the outputs: `{"command": ["-m", MODULE, …], "environment": {…}}`.
It says `{"pid": …}` of each start, in order, and `{"pid": …, "status": …}` of each end. Imports no gRPC: its threads
do not live through a fork.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from headrace_servicekit.process.spawn import die_with_parent

LIBRARIES = (
    *("torch", "torch.distributed.tensor", "transformers", "transformers.conversion_mapping"),
    *("transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
    *("transformers.tokenization_utils_tokenizers", "safetensors.torch"),
)
"""What is imported, as far as this Python has it. None may start a thread that a fork would miss."""
ROOM = " " * 4096
"""An argument that leaves room for the command lines of what is forked."""
MAX_BYTES = 1 << 20
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46  # in /proc/self/stat, counted behind the name


def main() -> None:
    """Imports, serves until the socket or the parent ends; in a forked process, runs its service."""
    channel = socket.socket(fileno=os.dup(0))
    gc.disable()  # what is imported stays: walks through it are a tenth of the imports' time
    for name in LIBRARIES:
        with suppress(ImportError):  # what the service itself says of it counts
            if find_spec(name.partition(".")[0]):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or the first collection in each process would copy all pages
    gc.enable()
    command = _serve(channel)
    if command:
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)


def _serve(channel: socket.socket) -> list[str]:
    """Forks for each request. Returns twice: the command in a forked process, and nothing when the socket ended."""
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not channel:
                    selector.unregister(key.fileobj)
                    _tell_end(channel, int(key.fd), key.data)
                    continue
                data, outputs, _, _ = socket.recv_fds(channel, MAX_BYTES, 1)
                if not data:
                    return []
                request = json.loads(data)
                pid = os.fork()
                if pid == 0:
                    for each in [*selector.get_map().values()]:
                        os.close(each.fd)
                    channel.detach()
                    return _become(request["command"], request["environment"], outputs[0])
                os.close(outputs[0])
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                _tell(channel, {"pid": pid})


def _tell_end(channel: socket.socket, handle: int, pid: int) -> None:
    os.close(handle)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _tell(channel, {"pid": pid, "status": status})


def _tell(channel: socket.socket, what: dict[str, int]) -> None:
    with suppress(OSError):  # the supervisor ends, and the kernel this process
        channel.send(json.dumps(what).encode())


def _become(command: Sequence[str], environment: dict[str, str], output: int) -> list[str]:
    """Makes a forked process what `start_child` would have started, as far as its service can tell."""
    os.setsid()
    die_with_parent(_PID)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for target in (1, 2):
        os.dup2(output, target)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    _set_arguments([sys.executable, *command])
    if _cuda_is_lost():
        os.execv(sys.executable, [sys.executable, *command])
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python's own generator does so by itself
    return list(command)


def _cuda_is_lost() -> bool:
    """Whether an import used CUDA before the fork: it would refuse to work here. So it is where torch cannot say."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    asked = getattr(torch.cuda, "_is_in_bad_fork", None)
    return asked is None or bool(asked())


def _set_arguments(arguments: Sequence[str]) -> None:
    """Shows a command line of one's own to ps(1) and the like, in place of the template's; cut at its length."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
    text = b"\0".join(os.fsencode(each) for each in arguments)[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


_PID = os.getpid()

if __name__ == "__main__":
    main()
