"""Suites of an evaluation: what is asked, how it is judged, what an answer chooses."""

from headrace_coordinator.suites.base import SUITES, Suite, open_suite

__all__ = ["SUITES", "Suite", "open_suite"]
