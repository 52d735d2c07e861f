"""Messages about a run to people: a bound of `tracking.alerts` that is passed, and the run's end.

`http(s)://` addresses get a POST of JSON; every other kind (mailto:, slack:, discord:, …) is apprise's.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

from headrace_schema.sections.base import FEW
from headrace_schema.sections.tracking import TrackingSection
from headrace_servicekit.registry import Options
from pydantic import Field, field_validator
from typing_extensions import override

from headrace_coordinator.domain.alerts import Alerts
from headrace_coordinator.trackers.tracker import TrackedRun, Tracker

INSTALL = "headrace-coordinator[notify]"
LIMIT_S = 15.0
TRIES = 3
WEBHOOKS = ("http://", "https://")


class NotifyOptions(Options):
    """Whom it tells."""

    urls: list[str] = Field(
        min_length=1,
        max_length=FEW,
        description="http(s) addresses, which get a POST of JSON, or addresses of apprise such as "
        "mailto://…, slack://…; with secrets as references (env:NAME, file:PATH)",
    )
    ends: bool = Field(default=True, description="also tell of the run's end")

    @field_validator("urls")
    @classmethod
    def _can_be_sent(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if url.startswith(WEBHOOKS):
                continue
            if find_spec("apprise") is None:
                raise ValueError(
                    f"only http(s) addresses can be told of without apprise: run pip install '{INSTALL}' where the "
                    "coordinator is, or name a webhook"
                )
            import apprise

            if apprise.Apprise.instantiate(url) is None:
                raise ValueError(
                    f"apprise knows no address of the kind {url.partition(':')[0]}: see its wiki"
                )
        return urls


class NotifyTracker(Tracker):
    """Tells people by a webhook, mail or chat when a bound of tracking.alerts is passed, and of the run's end."""

    options = NotifyOptions

    def __init__(
        self, options: NotifyOptions, run: TrackedRun, wait: Callable[[float], None] = time.sleep
    ) -> None:
        self._options, self._run, self._wait = options, run, wait
        self._alerts = Alerts(TrackingSection.model_validate(run.spec.get("tracking", {})).alerts)
        self._told: set[str] = set()
        self._newest = 0

    @override
    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if not any(name.startswith(("train/", "speed/")) for name in scalars):
            return  # An evaluation: bounds are on figures of steps.
        self._newest = max(self._newest, step)
        found = self._alerts.of(scalars)
        for name in sorted(found.keys() - self._told):
            self._tell(f"{self._run.id}, step {step}: {found[name]}", "alert", step)
        self._told = set(found)

    @override
    def finish(self, state: str) -> None:
        if state and self._options.ends:
            self._tell(f"{self._run.id} is {state} after step {self._newest}", "end", self._newest)

    def _tell(self, text: str, kind: str, step: int) -> None:
        body = {"run": self._run.id, "kind": kind, "step": step, "text": text}
        for url in self._options.urls:
            hook = url.startswith(WEBHOOKS)
            self._again(partial(_post, url, body) if hook else partial(_send, url, text))

    def _again(self, send: Callable[[], None]) -> None:
        """Tries a few times. Raises OSError, which ends the tracker: the run's events say so."""
        for tried in range(1, TRIES + 1):
            try:
                return send()
            except OSError:
                if tried == TRIES:
                    raise
                self._wait(2.0**tried)
        return None


def _post(url: str, body: Mapping[str, Any]) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "headrace"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S):
        pass


def _send(url: str, text: str) -> None:
    import apprise

    channel = apprise.Apprise()
    channel.add(url)
    if not channel.notify(title="Headrace", body=text):
        raise OSError(f"{url.partition(':')[0]} took no message; its address or its service is wrong")
