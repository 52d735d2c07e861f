"""docs/at-size.md has the table that the defaults of now make."""

import sys

from harness.processes import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import defaults_at_size


def test_the_table_of_defaults_is_the_scripts():
    found = defaults_at_size.PAGE.read_text(encoding="utf-8")
    assert defaults_at_size.page(found) == found, "run: python benchmarks/defaults_at_size.py --write"
    rows = [line for line in defaults_at_size.table().splitlines() if "GB" in line]
    assert len(rows) == len(defaults_at_size.NAMES) * len(defaults_at_size.CLUSTERS)
