"""Reads what pytest wrote about a run."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Report:
    """Counts of one pytest run, and why tests were skipped."""

    passed: int = 0
    failed: int = 0
    skipped: list[str] = field(default_factory=list)


def read_report(file: Path) -> Report:
    """The counts in a JUnit file; zeros when it was never written, or not to its end, as after a crash."""
    report, reasons = Report(), Counter[str]()
    try:
        document = ElementTree.parse(file)  # nosec B314 - our own tests wrote it
    except (FileNotFoundError, ElementTree.ParseError):
        return report
    for case in document.iter("testcase"):
        verdicts = {child.tag for child in case}
        skip = case.find("skipped")
        if verdicts & {"failure", "error"}:
            report.failed += 1
        elif skip is not None:
            reasons[skip.get("message", "no reason given")] += 1
        else:
            report.passed += 1
    report.skipped = [f"{reason} ({count}x)" if count > 1 else reason for reason, count in reasons.items()]
    return report
