"""Sites as conversations: the made shop, or a user's own class by PATH.py:NAME. Runs in child processes only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

from headrace_servicekit.registry import Options
from headrace_simulator.backends.base import BackendError, Message
from headrace_simulator.backends.options import parse, require, unknown
from headrace_simulator.backends.user_file import is_user_environment, load_factory
from headrace_simulator.values import awaited
from pydantic import Field, PositiveFloat

from headrace_environments.web.browser import NoAction, Window
from headrace_environments.web.shop import TASKS, Shop

WAY = (
    "pip install 'headrace-environments[web]' into the simulators' Python, or, in a checkout, "
    "`make simulators SIM=web`; then headrace up --sim web"
)
ANSWER = "answer"
"""The action that ends an episode with an answer."""
ERROR = "error: "
Side = Annotated[int, Field(ge=16, le=4096)]


class Site(Protocol):
    """A site, what is asked of it, and what an episode in it is worth. Made for each place of a pool."""

    def open(self, seed: int, item: Mapping[str, Any]) -> tuple[str, str]:
        """Begins an episode: the address of its first page, and what is asked."""
        ...

    def serve(self, method: str, url: str, body: str) -> str | None:
        """The HTML of an address that this class makes; None for one that the network has."""
        ...

    def judge(self, page: Any, answer: str | None) -> tuple[float, bool]:
        """What the last action was worth, and whether the episode is over. `page` is Playwright's; an `answer` is given
        where the model ended the episode by one.
        """
        ...


class WebOptions(Options):
    """Options of any site."""

    observe: Literal["list", "tree", "screenshot", "both"] = Field(
        "tree",
        description="what the model sees: the accessibility tree, a list of what may be used in it, a screenshot in "
        "which that is numbered, or screenshot and list",
    )
    width: Side = Field(1024, description="of the page, in pixels")
    height: Side = Field(768, description="of the page, in pixels")
    most_characters: Annotated[int, Field(ge=16)] = Field(
        8000, description="of a tree or a list that are shown"
    )
    allow: list[str] = Field(
        default_factory=list, description="hosts that pages may be asked from; every other one is refused"
    )
    action_timeout_s: PositiveFloat = Field(10.0, description="limit of one action")
    mistake: float = Field(0.0, description="reward of a turn that is no action")
    system: str = Field("", description="system message that the conversation begins with")
    site: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the site's class")


class Browsing:
    """Episodes in a site, one after the other."""

    def __init__(self, site: Site, options: WebOptions) -> None:
        for method in ("open", "serve", "judge"):
            if not callable(getattr(site, method, None)):
                kind = type(site).__name__
                raise BackendError(
                    "environment.name", f"{kind} has no method {method}; a site has open, serve, judge"
                )
        self._site, self._options = site, options
        self.images = options.observe in ("screenshot", "both")
        self._window = Window((options.width, options.height), options.action_timeout_s, options.allow)

    def reset(self, seed: int, item: Mapping[str, Any]) -> Sequence[Message]:
        """What is asked, and the first page."""
        url, asked = awaited(self._site.open(seed, item))
        self._window.open(url, self._site.serve)
        system = [{"role": "system", "content": self._options.system}] if self._options.system else []
        return [*system, self._seen(f"{asked}\n")]

    def step(self, message: Message) -> tuple[Sequence[Message], float, bool, Mapping[str, Any]]:
        """Does what the model says, and shows where it led."""
        said, told = message["content"].strip(), ""
        what, _, answer = said.partition(" ")
        if what != ANSWER:
            try:
                self._window.act(said)
            except NoAction as wrong:
                return [self._seen(f"{ERROR}{wrong}\n")], self._options.mistake, False, {}
        ended = what == ANSWER
        reward, done = awaited(self._site.judge(self._window.page, answer if ended else None))
        if done or ended:
            return [], float(reward), True, {"success": reward >= 1}
        return [self._seen(told)], float(reward), False, {}

    def _seen(self, before: str) -> Message:
        options, window = self._options, self._window
        shown = {"list": window.listed, "both": window.listed, "tree": window.tree}.get(options.observe)
        text = before + (_cut(shown(), options.most_characters) if shown else "")
        if not self.images:
            return {"role": "user", "content": text}
        picture = {"type": "image", "image": window.picture()}
        return {"role": "user", "content": [{"type": "text", "text": text}, picture]}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} [{len(text) - most} characters are left out]"


class Sites:
    """Sites by name, or as path/to/file.py:Class."""

    def environments(self) -> list[str]:
        """Tasks of the made shop."""
        return [f"shop/{task}" for task in TASKS]

    def converse(self, name: str, options: Mapping[str, Any]) -> Browsing:
        """Makes a site; its browser starts with the first episode."""
        chosen = parse(WebOptions, options)
        if chosen.observe in ("screenshot", "both"):
            require("vision", "PIL")
        if is_user_environment(name):
            return Browsing(load_factory(name, "Site")(**chosen.site), chosen)
        if name not in self.environments():
            raise unknown("site", name, self.environments())
        try:
            return Browsing(Shop(name.partition("/")[2], **chosen.site), chosen)
        except TypeError as error:
            raise BackendError("options_json.site", f"{name}: {error}") from error


def build(options: Options) -> Sites:
    """The backend; BackendError where Playwright is not here."""
    require("web", "playwright", way=WAY)
    return Sites()
