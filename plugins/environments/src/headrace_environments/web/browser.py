"""A browser's page as a model sees and uses it. Knows neither sites nor rewards.

Playwright drives the Chromium of this host; its snapshots of the accessibility tree name each element.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headrace_simulator.backends.base import BackendError

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Route

NAMES = ("chromium", "chromium-browser", "google-chrome")
USED = (
    "button",
    "checkbox",
    "combobox",
    "link",
    "menuitem",
    "option",
    "radio",
    "searchbox",
    "slider",
    "spinbutton",
)
"""Roles of elements that are numbered, beside those that text is typed into, switches and tabs."""
ROLES = (*USED, "switch", "tab", "textbox")
_ELEMENT = re.compile(r'- (\w+)(?: "((?:[^"\\]|\\.)*)")?.*?\[ref=(\w+)\](?:.*?\[box=([\d.,-]+)\])?')
_BOX = re.compile(r" \[box=[^\]]*\]")
_REF = re.compile(r"e\d+|f\d+e\d+")
Serve = Callable[[str, str, str], str | None]
"""The page that a site makes of a request's method, address and body; None: it is not the site's."""


class NoAction(Exception):
    """What was said is nothing that can be done: the model is told."""


@dataclass(frozen=True)
class Element:
    """Something that may be clicked, typed into or chosen from."""

    role: str
    name: str
    ref: str
    box: tuple[float, ...]

    @property
    def shown(self) -> str:
        """In words; a link or a button by its name alone."""
        return (
            self.name
            if self.role in ("link", "button") and self.name
            else f"{self.role} {self.name}".rstrip()
        )


class Window:
    """One page, in a context of its own: no other sees its cookies and storage."""

    def __init__(self, size: tuple[int, int], timeout_s: float, allowed: Sequence[str]) -> None:
        self._size, self._timeout_ms, self._allowed = size, timeout_s * 1e3, allowed
        self._context: BrowserContext | None = None
        self._serve: Serve = lambda method, url, body: None
        self._tree = ""
        self.elements: list[Element] = []

    @property
    def page(self) -> Page:
        """The newest page: a link may open another."""
        assert self._context is not None
        return self._context.pages[-1]

    def open(self, url: str, serve: Serve) -> None:
        """A new context at an address; what the site serves comes from this process, the rest from allowed hosts."""
        if self._context is not None:
            self._context.close()
        self._serve = serve
        width, height = self._size
        self._context = browser().new_context(
            viewport={"width": width, "height": height}, service_workers="block", accept_downloads=False
        )
        self._context.set_default_timeout(self._timeout_ms)
        self._context.route("**/*", self._answer)
        self._context.new_page().goto(url, wait_until="domcontentloaded")
        self._look()

    def tree(self) -> str:
        """The accessibility tree as text, with a name for each element."""
        return _BOX.sub("", self._tree)

    def listed(self) -> str:
        """The title, and what may be used, numbered from 1."""
        return "\n".join(
            [self.page.title(), *(f"{at} {each.shown}" for at, each in enumerate(self.elements, 1))]
        )

    def picture(self) -> Any:
        """The visible part as an image of Pillow; numbers mark what may be used."""
        from PIL import Image, ImageDraw

        image = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
        draw = ImageDraw.Draw(image)
        for at, each in enumerate(self.elements, 1):
            if each.box:
                x, y = each.box[:2]
                around = draw.textbbox((x, y), str(at))
                draw.rectangle(around, fill="yellow")
                draw.text((x, y), str(at), fill="black")
        return image

    def act(self, said: str) -> None:
        """Does what was said: click X, type X TEXT, choose X OPTION, press KEY, scroll up, scroll down, back, or X
        alone, which clicks. X is a number of the list, or a name of the tree. Raises NoAction.
        """
        from playwright.sync_api import Error

        what, _, rest = said.strip().partition(" ")
        try:
            if what in ACTIONS:
                ACTIONS[what](self, rest.strip())
            elif what.isdecimal() or _REF.fullmatch(what):
                self._click(said.strip())
            else:
                raise NoAction(
                    f"there is no action {what[:40]!r}; actions: {', '.join(ACTIONS)}, or a number to click"
                )
            self.page.wait_for_load_state("domcontentloaded")
            self._look()
        except Error as error:
            raise NoAction(error.message.splitlines()[0]) from error

    def _look(self) -> None:
        self._tree, self.elements = self.page.locator("body").aria_snapshot(mode="ai", boxes=True), []
        for role, name, ref, box in _ELEMENT.findall(self._tree):
            if role in ROLES:
                told = re.sub(r"\\(.)", r"\1", name)
                sides = tuple(map(float, box.split(","))) if box else ()
                self.elements.append(Element(role, told, ref, sides))

    def _at(self, which: str) -> Any:
        """What a number, or a name of the tree, means."""
        if which.isdecimal() and 0 < int(which) <= len(self.elements):
            which = self.elements[int(which) - 1].ref
        elif not _REF.fullmatch(which):
            raise NoAction(f"there is no {which[:40]!r}; there are 1 to {len(self.elements)}")
        found = self.page.locator(f"aria-ref={which}")
        if not found.count():
            raise NoAction(f"there is no {which!r} on this page")
        return found

    def _click(self, rest: str) -> None:
        self._at(rest).click()

    def _type(self, rest: str) -> None:
        which, _, text = rest.partition(" ")
        self._at(which).fill(text)

    def _choose(self, rest: str) -> None:
        which, _, option = rest.partition(" ")
        self._at(which).select_option(option)

    def _press(self, rest: str) -> None:
        self.page.keyboard.press(rest or "Enter")

    def _scroll(self, rest: str) -> None:
        if rest not in ("up", "down"):
            raise NoAction("scroll up, or scroll down")
        self.page.mouse.wheel(0, self._size[1] * (1 if rest == "down" else -1))

    def _back(self, rest: str) -> None:
        self.page.go_back()

    def _answer(self, route: Route) -> None:
        request = route.request
        made = self._serve(request.method, request.url, request.post_data or "")
        if made is not None:
            route.fulfill(content_type="text/html; charset=utf-8", body=made)
        elif (urlsplit(request.url).hostname or "") in self._allowed:
            route.continue_()
        else:
            route.abort()


ACTIONS: Mapping[str, Callable[[Window, str], None]] = {
    "click": Window._click,
    "type": Window._type,
    "choose": Window._choose,
    "press": Window._press,
    "scroll": Window._scroll,
    "back": Window._back,
}


@cache
def browser() -> Browser:
    """The one browser of this process, without a sandbox of its own where it runs as root."""
    from playwright.sync_api import Error, sync_playwright

    program = _program()
    arguments = ["--disable-gpu", "--disable-dev-shm-usage"] + ["--no-sandbox"] * (os.geteuid() == 0)
    try:
        return sync_playwright().start().chromium.launch(executable_path=program, args=arguments)
    except Error as error:
        raise BackendError(
            "environment.backend", f"{program} does not start: {error.message[:500]}"
        ) from error


def _program() -> str:
    """The Chromium of this host: what CHROMIUM says, or the first of `NAMES`."""
    for name in filter(None, (os.environ.get("CHROMIUM"), *NAMES)):
        if found := shutil.which(name):
            return found
    fix = "install one (Debian: apt-get install chromium), or set CHROMIUM=/path/to/chromium"
    raise BackendError("environment.backend", f"there is no Chromium on the simulator's host; {fix}")
