"""Why vLLM refuses: its errors as sentences, and what its processes log when they do not start. Imports vLLM.

vLLM's front end says only that its engine core did not start; the reason is an error in the core's or a worker's log.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from vllm.logger import DEFAULT_LOGGING_CONFIG

CONFIG_PATH = "VLLM_LOGGING_CONFIG_PATH"
OPERATORS = (CONFIG_PATH, "VLLM_CONFIGURE_LOGGING")
"""Variables with which an operator configures vLLM's log; it is left alone then."""
_RECORD = "\x1e"
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+", re.MULTILINE)
_REFUSED_VALUE = re.compile(r"Value error, (.+?)(?: \[type=|\n|$)")


@dataclass(frozen=True)
class StartErrors:
    """The errors that processes started with `variables` log; none where the operator configures vLLM's log."""

    variables: dict[str, str]
    file: Path

    def reason(self) -> str:
        """The error that was logged first: a worker's comes before the core's, which only says that one failed."""
        records = self.file.read_text().split(_RECORD) if self.file.exists() else []
        found = (_ERROR.findall(record) for record in records)
        return next((errors[-1] for errors in found if errors), "")


@contextmanager
def logged_errors() -> Iterator[StartErrors]:
    """For the time of a start: what is logged later goes on into a file that has no name."""
    with tempfile.TemporaryDirectory(prefix="headrace-vllm-") as directory:
        file = Path(directory) / "errors"
        if any(name in os.environ for name in OPERATORS):
            yield StartErrors({}, file)
            return
        config = deepcopy(DEFAULT_LOGGING_CONFIG)
        config["formatters"]["record"] = {"format": f"{_RECORD}%(message)s"}
        handler = {"class": "logging.FileHandler", "filename": str(file), "level": "ERROR"}
        config["handlers"]["errors"] = {**handler, "formatter": "record"}
        config["loggers"]["vllm"]["handlers"].append("errors")
        settings = Path(directory) / "logging.json"
        settings.write_text(json.dumps(config))
        yield StartErrors({CONFIG_PATH: str(settings)}, file)


def one_line(error: BaseException) -> str:
    """An error of vLLM in one line; pydantic's say what was refused behind a heading."""
    cause = error.__cause__
    words = str(error) or (str(cause) if cause is not None else "")
    if refused := _REFUSED_VALUE.search(words):
        return refused[1]
    return f"{type(error).__name__}: {words}".strip(": ")


def start_failed(error: BaseException, reason: str) -> str:
    """Why a start failed, and which settings of the run to change where that is known."""
    words = reason.partition(": ")[2] or one_line(error)
    if "KV cache" in words or "cache blocks" in words:
        fix = (
            "raise rollout.engine_options.kv_cache_gib or gpu_memory_utilization, or lower model.max_context"
        )
        return f"{words.partition(' See http')[0].rstrip('.')}; {fix}"
    return f"{words}; see this instance's log for the engine's own words"
