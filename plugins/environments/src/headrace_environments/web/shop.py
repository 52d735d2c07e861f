"""A made shop: things with prices, a page for each, and an order. Its words are of the tiny model's few letters."""

from __future__ import annotations

import random
from collections.abc import Mapping
from html import escape
from typing import Any
from urllib.parse import parse_qs, urlsplit

TASKS = ("find", "cheapest", "several")
THINGS = ("car", "cat", "cord", "dart", "dot", "pad", "pot", "rod", "stop", "story", "toad", "toy", "tray")
ADDRESS = "http://shop.test"


class Shop:
    """`find`: open the page of a thing. `cheapest`: order whatever costs least. `several`: order so many of a thing.

    What is right is worth 1, an order of another number of the right thing 0.5, whatever else is opened or ordered 0.2.
    """

    def __init__(self, task: str, things: int = 3) -> None:
        if not 2 <= things <= len(THINGS):
            raise TypeError(f"things: {things} is not between 2 and {len(THINGS)}")
        self._task, self._count = task, things
        self._prices: dict[str, int] = {}
        self._wanted, self._number, self._chosen = "", 1, ("", 0)

    def open(self, seed: int, item: Mapping[str, Any]) -> tuple[str, str]:
        """What is on offer, and what is asked, follow from the seed."""
        draw = random.Random(seed)
        names = draw.sample(THINGS, self._count)
        self._prices = dict(zip(names, draw.sample(range(1, 20), self._count), strict=True))
        self._wanted, self._number, self._chosen = draw.choice(names), 1, ("", 0)
        if self._task == "cheapest":
            self._wanted = min(self._prices, key=self._prices.__getitem__)
            return f"{ADDRESS}/", "?"
        if self._task == "several":
            self._number = draw.randint(2, 9)
            return f"{ADDRESS}/", f"{self._number} {self._wanted}"
        return f"{ADDRESS}/", self._wanted

    def serve(self, method: str, url: str, body: str) -> str | None:
        """The list, the page of a thing, or the order."""
        asked = urlsplit(url)
        if asked.hostname != "shop.test":
            return None
        name = asked.path.strip("/")
        if not name:
            links = (f'<li><a href="/{each}">{each} {price}</a></li>' for each, price in self._prices.items())
            return _page("shop", f"<ul>{''.join(links)}</ul>")
        if name not in self._prices:
            return _page("no", "")
        if self._task == "find":
            self._chosen = name, 1
        if method == "POST":
            number = parse_qs(body).get("number", ["1"])[0]
            self._chosen = name, int(number) if number.isdecimal() else 0
            return _page("yes", f"{escape(number)} {name}")
        field = '<input aria-label="too" name="number" value="1">' if self._task == "several" else ""
        return _page(
            name,
            f'<p>{name} {self._prices[name]}</p><form method="post">{field}<button>pay</button></form>'
            '<a href="/">shop</a>',
        )

    def judge(self, page: Any, answer: str | None) -> tuple[float, bool]:
        """The first thing that is opened, or ordered, ends it."""
        name, number = self._chosen
        if not name:
            return 0.0, False
        if name != self._wanted:
            return 0.2, True
        return (1.0 if number == self._number else 0.5), True


def _page(title: str, inner: str) -> str:
    return f"<!doctype html><title>{title}</title><body>{inner}</body>"
