"""The process that holds SGLang: `python -m headrace_rollout.engines.sglang.host`, started by the backend.

SGLang sets its own event loop policy and signal handlers, and kills the process that it lives in when one of its
schedulers ends; so that process is not the instance's. Speaks frames over stdin and stdout (`messages`).
"""

from __future__ import annotations

import os
from typing import BinaryIO

from headrace_servicekit.process.worker_pipes import become_worker, frame, read_frame

from headrace_rollout.engines.sglang.messages import Message, decode, encode


def main() -> None:
    """Makes the engine that the first frame describes, then serves calls until stdin ends."""
    reader, writer = become_worker()
    body = read_frame(reader)
    if body is None:
        return
    start = decode(body)
    os.environ.update(start["environment"])  # before torch and SGLang are imported
    from headrace_rollout.engines.sglang.serving import make_engine, serve

    try:
        engine, limit = make_engine(start["arguments"])
    except (
        ValueError,
        RuntimeError,
        OSError,
        ImportError,
        AssertionError,
        TypeError,
        NotImplementedError,
    ) as error:
        _send(writer, {"id": start["id"], "failed": f"{type(error).__name__}: {error}"})
        return
    _send(writer, {"id": start["id"], "result": limit})
    serve(engine, reader, writer)


def _send(writer: BinaryIO, message: Message) -> None:
    writer.write(frame(encode(message)))
    writer.flush()


if __name__ == "__main__":
    main()
