"""Records which functions of ours a process calls, and when; `ci.walks` puts this file as sitecustomize.py before them.

Writes lines of JSON to $HEADRACE_WALKS/PID.jsonl: {"kind"}, {"function"}, {"calls"}, {"finished"} and {"stack"}. Times
are milliseconds since the epoch. Stacks hold our frames alone, the outermost first.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any, TextIO

OURS = re.compile(r"/(headrace_(?!cli|simulation)\w+)/(?!.*_pb2)(.+\.py)$")
FLUSH_S = 0.3
OPTIMIZED = 0x1
"""Flag of a function's code; a module's and a class's have none."""
BACKWARD = ("torch/_tensor.py", "torch/autograd/__init__.py")
_known: dict[int, tuple[CodeType, int]] = {}
_last: list[int] = []
_lines: list[dict[str, Any]] = []
_calls: list[tuple[int, int]] = []
_tasks: set[str] = set()


def _ours(code: CodeType) -> tuple[str, str] | None:
    """(file, function), if the code is a function of ours with a name."""
    found = OURS.search(code.co_filename)
    if found is None or not code.co_flags & OPTIMIZED or code.co_name.startswith("<"):
        return None
    return f"{found[1]}/{found[2]}", code.co_qualname


def _stack(frame: FrameType | None) -> list[tuple[str, str]]:
    """Our frames of a thread, or of a task where an event loop runs it; the outermost first."""
    frames = []
    while frame is not None and not (
        frame.f_code.co_name == "_run" and frame.f_code.co_filename.endswith("asyncio/events.py")
    ):
        if ours := _ours(frame.f_code):
            frames.append(ours)
        frame = frame.f_back
    return frames[::-1]


def _add(code: CodeType) -> int:
    """The number of a function that is called for the first time; -1 for one that is not ours."""
    ours = _ours(code)
    number = len(_last) if ours else -1
    if ours:
        _last.append(0)
        _lines.append({"function": number, "file": ours[0], "name": ours[1]})
    _known[id(code)] = code, number
    return number


def _called(frame: FrameType, now: int) -> None:
    """Notes hand-overs to other tasks and threads, and the call that computes gradients."""
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    noted: dict[str, Any] = {}
    if name == "backward" and file.endswith(BACKWARD):
        noted = {"stack": "backward", "thread": threading.current_thread().name}
    elif name == "submit" and file.endswith("concurrent/futures/thread.py"):
        noted = {"stack": "submit", "thread": frame.f_locals["self"]._thread_name_prefix}
    elif name == "create_task" and file.endswith("asyncio/base_events.py"):
        code = getattr(frame.f_locals["coro"], "cr_code", None)
        if code is None or (task := _ours(code)) is None:
            return
        noted = {"stack": "task", "task": task, "frames": _stack(frame)}
        if (key := json.dumps(noted)) in _tasks:
            return
        _tasks.add(key)
    if noted:
        _lines.append({"frames": _stack(frame), **noted, "at": now})


def _is_finished(value: Any) -> bool:
    """Whether a value that Generate yields holds a whole answer."""
    values = (value, *gc.get_referents(value))  # an async generator's value comes wrapped
    chunks = [chunk for each in values for chunk in getattr(each, "chunks", ())]
    return any(chunk.HasField("finished") for chunk in chunks)


NOTED = frozenset(("backward", "submit", "create_task"))


def profile(frame: FrameType, event: str, value: Any) -> None:
    """The profile function of every thread."""
    if event == "call":
        code = frame.f_code
        known = _known.get(id(code))
        number = known[1] if known is not None else _add(code)
        if number >= 0:
            now = int(time.time() * 1000)
            if _last[number] != now:
                _last[number] = now
                _calls.append((number, now))
        elif code.co_name in NOTED:
            _called(frame, int(time.time() * 1000))
    elif event == "return" and frame.f_code.co_name == "Generate" and _is_finished(value):
        _lines.append({"finished": int(time.time() * 1000)})


def _flush(file: TextIO) -> None:
    lines, _lines[:] = _lines[:], []
    calls, _calls[:] = _calls[:], []
    for line in (*lines, {"calls": calls}):
        file.write(json.dumps(line) + "\n")
    file.flush()


def _write(file: TextIO) -> None:
    sys.setprofile(None)
    while True:
        time.sleep(FLUSH_S)
        _flush(file)


def start(folder: str) -> None:
    """Traces this process and writes what it calls to a file in `folder`."""
    kind = re.search(r"headrace_(\w+)", " ".join(sys.orig_argv))
    file = open(f"{folder}/{os.getpid()}.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - as long as the process
    _lines.append({"kind": kind[1] if kind else ""})
    threading.Thread(target=_write, args=(file,), daemon=True).start()
    threading.setprofile(profile)
    sys.setprofile(profile)


if __name__ == "sitecustomize" and os.environ.get("HEADRACE_WALKS"):
    start(os.environ["HEADRACE_WALKS"])
