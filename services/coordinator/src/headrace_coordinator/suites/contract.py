"""What every suite must hold, as a check that its author runs in a test of the own package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_servicekit.contract import check_plugin, require

from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.suites.base import SUITES, Suite, open_suite


def check_suite(name: str, options: Mapping[str, Any]) -> Suite:
    """The suite with these options. Raises AssertionError saying what does not hold.

    It must have items, the same ones each time, and choose from a reference what the reference says.
    """
    check_plugin(SUITES, name, options)
    suite, again = open_suite(name, dict(options)), open_suite(name, dict(options))
    items = Dataset.open(suite.data(), 0).asked()
    require(bool(items), "it has no items")
    require(items == Dataset.open(again.data(), 0).asked(), "it has other items the second time")
    require(bool(suite.reward().scorers), "it has no scorer")
    require(suite.extract("") == "", "an empty answer chooses something")
    return suite
