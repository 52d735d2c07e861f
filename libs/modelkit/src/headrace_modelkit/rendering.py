"""Renders chat templates in a process of its own, which is killed when one comes to no end or takes too much memory.

A template is code of whoever made the model: jinja's sandbox bounds what it reaches, and not how long it takes. Knows
no tokenizer. `python -m headrace_modelkit.rendering` is the process: a request and an answer a line, as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

CPU_S, PATIENCE_S = 2.0, 60.0
"""Seconds of a core that one text may take; seconds that its process, which may have to start, is waited for."""
MOST_MEMORY = 2 << 30
MOST_TEXT = 64 << 20
KEPT, KEPT_CHARACTERS = 32, 1 << 21
"""Texts that are kept, the last ones, in case they are asked for again; none that is longer."""
_PASSED = ("PATH", "PYTHONPATH", "HOME", "LANG", "LC_ALL", "VIRTUAL_ENV")


class Endless(ValueError):
    """A chat template that was killed."""


class Renderer:
    """The process, started when the first text is asked for, and again when it has ended. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._kept: OrderedDict[str, str] = OrderedDict()

    def render(self, template: str, chat: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The text. Raises Endless, or ValueError with the template's own reason."""
        request = json.dumps({"template": template, "chat": list(chat), "variables": variables}, default=str)
        with self._lock:
            text = self._kept.pop(request, None)
            if text is None:
                text = self._asked(request)
            if len(request) + len(text) <= KEPT_CHARACTERS:
                self._kept[request] = text
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        return text

    def _asked(self, request: str) -> str:
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(request.encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(self._line(process))
        except (OSError, EOFError, TimeoutError) as error:
            process.kill()
            process.wait()
            self._process = None
            if process.returncode in (-signal.SIGPROF, -signal.SIGKILL):
                reason = f"it had not ended after {CPU_S:g} s of a core"
            else:
                reason = f"its process ended with {process.returncode}"
            raise Endless(f"{reason}, and was killed") from error
        if "text" not in answer:
            raise ValueError(answer["error"])
        text: str = answer["text"]
        return text

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
            environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            self._owner = os.getpid()
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        return self._process

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        descriptor, deadline, found = process.stdout.fileno(), time.monotonic() + PATIENCE_S, bytearray()
        while not found.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready or len(found) > 2 * MOST_TEXT:
                raise TimeoutError
            piece = os.read(descriptor, 1 << 20)
            if not piece:
                raise EOFError
            found += piece
        return bytes(found)


RENDERER = Renderer()
"""Of this process."""


def answer(request: Mapping[str, Any]) -> dict[str, str]:
    """The text of a request, or why the template refuses it."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template(
            conversations=[request["chat"]],
            chat_template=request["template"],
            **{"add_generation_prompt": True, **request["variables"]},
        )
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        return {"error": str(error) or type(error).__name__}
    except (RecursionError, MemoryError) as error:
        return {"error": f"{type(error).__name__} {error}"}
    text: str = rendered[0][0]
    if len(text) > MOST_TEXT:
        return {"error": f"it makes a text of {len(text)} characters, and {MOST_TEXT} is the most"}
    return {"text": text}


def main() -> None:
    """Answers requests until there are no more."""
    import transformers.utils.chat_template_utils  # noqa: F401  # before the first text's time begins

    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # whose signal ends the process
        told = json.dumps(answer(request)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(told + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
