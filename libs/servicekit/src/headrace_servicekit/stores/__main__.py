"""The process that speaks with a store for a service: a command a line in, an answer a line out, until its input ends.

It takes the packages of stores, their hashing and their encryption off the service's interpreter.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from headrace_schema.progress import counter

from headrace_servicekit.process.spawn import die_with_parent
from headrace_servicekit.stores.checkpoints import RemoteRun, probe
from headrace_servicekit.stores.files import local, look
from headrace_servicekit.stores.problems import StoreProblem, explain
from headrace_servicekit.stores.process import PROGRESS

NICENESS = 10
TELL_S = 0.5
_WRITING = threading.Lock()
"""Held while a line is written: what is told of a command comes before its answer."""
_known: dict[str, tuple[int, int]] = {}
"""Files that were copied, by their names in the store."""


def _upload(asked: dict[str, Any]) -> Any:
    run = RemoteRun(asked["url"])
    remote = run.upload(Path(asked["root"]), asked["name"], asked["facts"])
    gone = run.prune(asked["keep"], asked["retained"])
    return {"name": remote.name, "size": remote.size, "removed": gone}


def _describe(asked: dict[str, Any]) -> Any:
    RemoteRun(asked["url"]).describe(asked["said"])


def _description(asked: dict[str, Any]) -> Any:
    return RemoteRun(asked["url"]).description()


def _copy(asked: dict[str, Any]) -> Any:
    return RemoteRun(asked["url"]).copy(Path(asked["folder"]), asked["name"], _known)


def _live(asked: dict[str, Any]) -> Any:
    return [dataclasses.asdict(each) for each in RemoteRun(asked["url"]).live()]


def _fetch(asked: dict[str, Any]) -> Any:
    run = RemoteRun(asked["url"])
    found, damaged = run.fetch_newest(Path(asked["root"]), lambda each: each.name in asked["names"])
    return {"found": dataclasses.asdict(found) if found else None, "damaged": damaged}


COMMANDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "probe": lambda asked: probe(asked["url"]),
    "look": lambda asked: look(asked["url"]),
    "local": lambda asked: str(local(asked["url"])),
    "upload": _upload,
    "describe": _describe,
    "description": _description,
    "copy": _copy,
    "live": _live,
    "fetch": _fetch,
}


def main() -> None:
    """Answers commands. The parent's id is the one argument."""
    die_with_parent(int(sys.argv[1]))
    os.nice(NICENESS)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What a package prints is no answer.
    threading.Thread(target=_tell, args=(answers,), daemon=True).start()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"answer": COMMANDS[asked["do"]](asked)}
        except StoreProblem as problem:
            answer = {"problem": _told(problem)}
        except Exception as error:  # noqa: BLE001 - an error of a disk or a package is an answer too
            answer = {"problem": _told(explain(error, asked["url"], asked["do"]))}
        counter().end()
        with _WRITING:
            answers.write(json.dumps(answer) + "\n")


def _tell(answers: TextIO) -> None:
    """Says how far the command in hand is, from time to time."""
    before = None
    while True:
        time.sleep(TELL_S)
        with _WRITING:
            if (now := counter().read()) is not None and now != before:
                answers.write(f"{PROGRESS.decode()}{json.dumps(now)}\n")
            before = now


def _told(problem: StoreProblem) -> dict[str, Any]:
    return {"reason": problem.reason, "fix": problem.fix, "lasting": problem.lasting, "code": problem.code}


if __name__ == "__main__":
    main()
