"""What every data source must hold, as a check that its author runs in a test of the own package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_servicekit.contract import check_plugin, require

from headrace_coordinator.data.sources import SOURCES, DataSource, open_source


def check_source(name: str, options: Mapping[str, Any]) -> DataSource:
    """The source with these options. Raises AssertionError saying what does not hold.

    It must yield items, the same ones each time; runs of yesterday are resumed tomorrow.
    """
    check_plugin(SOURCES, name, options)
    source, again = open_source(name, dict(options)), open_source(name, dict(options))
    items = list(source.items())
    require(bool(items), "it yields no items")
    require(items == list(again.items()), "it yields other items the second time")
    require(source.fingerprint() == again.fingerprint(), "its fingerprint changes although its items do not")
    return source
