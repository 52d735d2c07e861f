"""The broker: `python -m headrace_containers.broker`. Serves until its parent closes the pipe, or ends.

Its parent's end is no signal to it, as a worker's would be: it removes its containers first.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from headrace_servicekit.config import settings_from_environment
from headrace_servicekit.process.worker_pipes import JSON_CODEC, PARENT_VARIABLE, frame, read_frame
from headrace_servicekit.rpc.errors import ServiceError

from headrace_containers.broker.serving import Server, Settings


def main() -> None:
    """Listens in the folder that it is told, then waits for its parent's end."""
    os.environ.pop(PARENT_VARIABLE, None)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(os.dup(0), "rb") as reader, os.fdopen(os.dup(1), "wb") as writer:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        body = read_frame(reader)
        if body is None:
            return
        told = JSON_CODEC.decode(body)
        try:
            settings = settings_from_environment(Settings, "HEADRACE_CONTAINERS_")
        except ServiceError as error:
            writer.write(frame(JSON_CODEC.encode({"error": error.message})))
            return
        server = Server(settings, Path(told["folder"]), told["users"])
        server.start()
        writer.write(frame(JSON_CODEC.encode({"listening": True})))
        writer.flush()
        while read_frame(reader) is not None:
            pass
        server.close()


if __name__ == "__main__":
    main()
