"""What an answer chooses, read from its text. Pure."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

BOX = "\\boxed{"
CHOICE = r"(?:[Aa]nswer(?: is)?:?\s*\**\(?|\\boxed\{(?:\\text\{)?\(?)([A-D])\b"
"""The letter of a choice: after "Answer:", or in a box."""

# As `last_number` of the reward service reads it: a sign counts only where it does not subtract.
_SIGN = r"(?:(?<![\w.)])[-+])?"
_NUMBER = re.compile(rf"{_SIGN}(?:[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|{_SIGN}\.[0-9]+")
_CHOICE = re.compile(CHOICE)
_SPARE = re.compile(r"\\(?:left|right|displaystyle|[!,;: ])|\\[()\[\]]|\$|\s|\^\{?\\circ\}?|\\?%")
"""LaTeX that does not change an expression's value, and units of an angle or a share."""
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?[0-9]+)\}\{(-?[0-9]+)\}|(-?)([0-9]+)/([0-9]+)")
_WHOLE = re.compile(r"[-+]?(?:[0-9]{1,3}(?:(?:,|\{,\})[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?(?<=[0-9])")


def last_box(text: str) -> str:
    r"""The content of the last \boxed{…} without blanks, else the last number; "" where there is neither."""
    start = text.rfind(BOX)
    depth, first = 0, start + len(BOX)
    for place in range(first, len(text)) if start >= 0 else ():
        if text[place] == "}" and depth == 0:
            return "".join(text[first:place].split())
        depth += {"{": 1, "}": -1}.get(text[place], 0)
    return last_number(text)


def last_number(text: str) -> str:
    """The last integer or decimal in its shortest form, so that 6.0 is 6; "" where there is none."""
    found = _NUMBER.findall(text.replace("\u2212", "-"))
    if not found:
        return ""
    value = Decimal(found[-1].replace(",", ""))
    return f"{value.normalize():f}"


def plain_math(text: str) -> str:
    r"""An expression in one of its spellings: a number as a fraction in lowest terms, so that 0.5, 1/2 and \frac{1}{2}
    are one choice; anything else without what only sets it.
    """
    bare = (
        _SPARE.sub("", text).replace("\u2212", "-").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    )
    bare = re.sub(r"^[A-Za-z]=", "", bare).removesuffix(".")
    if found := _FRACTION.fullmatch(bare):
        sign, over, under = found.group(1, 2, 3) if found[2] else found.group(4, 5, 6)
        if int(under):
            return str(Fraction(int(f"{sign}1") * int(over), int(under)))
    if _WHOLE.fullmatch(bare):
        return str(Fraction(bare.replace("{,}", "").replace(",", "")))
    return bare


def last_choice(text: str) -> str:
    """The letter of the last choice that the answer states; "" where it states none."""
    found: list[str] = _CHOICE.findall(text)
    return found[-1] if found else ""
