"""Bounds on figures of steps (`tracking.alerts`): which of them are passed now. Knows no events and no messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace_schema.sections.tracking import AlertSection


class Alerts:
    """Counts for each alert in how many steps one after the other its bound was passed."""

    def __init__(self, alerts: Sequence[AlertSection]) -> None:
        self._alerts = alerts
        self._passed = [0] * len(alerts)

    def of(self, scalars: Mapping[str, float]) -> dict[str, str]:
        """All that hold after one more step with these figures; one whose figure is missing stays as it is."""
        found = {}
        for index, alert in enumerate(self._alerts):
            value = scalars.get(alert.figure)
            if value is None:
                continue
            bound = alert.passed(value)
            self._passed[index] = self._passed[index] + 1 if bound else 0
            if self._passed[index] >= alert.steps:
                since = f" for {self._passed[index]} steps" if alert.steps > 1 else ""
                found[f"alert {index}"] = (
                    f"{alert.figure} is {value:.4g}, {bound}{since} (tracking.alerts[{index}])"
                )
        return found
