"""The process that holds SGLang: `python -m headrace_sglang.host`, started by the backend.

SGLang sets its own event loop policy and signal handlers, and kills the process that it lives in when one of its
schedulers ends; so that process is not the instance's. Speaks frames of JSON objects over stdin and stdout: a call is
{"id", "call", …}, its answers are {"id", "tokens"} while a request runs, then one {"id", "result"} or {"id", "failed"}
with a sentence.
"""

from __future__ import annotations

import os
from typing import BinaryIO

from headrace_servicekit.process.worker_pipes import (
    JsonMessage,
    become_worker,
    decode_json,
    encode_json,
    frame,
    read_frame,
)


def main() -> None:
    """Makes the engine that the first frame describes, then serves calls until stdin ends."""
    reader, writer = become_worker(trusted=True)
    body = read_frame(reader)
    if body is None:
        return
    start = decode_json(body)
    os.environ.update(start["environment"])  # before torch and SGLang are imported
    from headrace_sglang.serving import make_engine, serve

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


def _send(writer: BinaryIO, message: JsonMessage) -> None:
    writer.write(frame(encode_json(message)))
    writer.flush()


if __name__ == "__main__":
    main()
