"""Finding numbers in text."""

from __future__ import annotations

import re
from decimal import Decimal

# A sign counts only where it does not subtract: "9-3" holds 9 and 3, "= -3" holds -3.
_SIGN = r"(?:(?<![\w.)])[-+])?"
_NUMBER = re.compile(rf"{_SIGN}(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|{_SIGN}\.[0-9]+")


def last_number(text: str) -> str | None:
    """The last integer or decimal as written, without thousands separators; None where there is none."""
    found = _NUMBER.findall(text.replace("\u2212", "-"))
    return found[-1].replace(",", "") if found else None


def last_value(text: str) -> Decimal | None:
    """The last integer or decimal as an exact value, so that 6 equals 6.0."""
    number = last_number(text)
    return None if number is None else Decimal(number)
