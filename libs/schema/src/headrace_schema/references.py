"""References to secrets: `env:NAME` and `file:PATH` stand in a spec where a secret would.

Knows by the names of keys which of them hold a secret, not what it is for. Who uses a secret reads it, last of all.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from functools import lru_cache
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator

from headrace_schema.problems import Impossible, path, problem
from headrace_schema.resources.views import KeyProblemView

OWN_PREFIX = "HEADRACE_"
"""Of the services' own settings, which no spec can name."""
MOST_BYTES, MOST_HIDDEN = 1 << 16, 6
"""Of a file with a secret; a shorter secret than this many characters is not looked for in texts."""
FIX = "write env:NAME (a variable of the service that uses it) or file:PATH (a file that this service reads)"
_REFERENCE = re.compile(
    r"(?P<scheme>(?:Bearer|Basic|Token) )?(?:env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)|file:(?P<path>/(?!/)[^\n\0]*))"
)
_TRIED = re.compile(r"(?:(?:Bearer|Basic|Token) )?(env|file):(.*)", re.DOTALL)
_ASSIGNED = re.compile(r"-{0,2}(?P<name>[A-Za-z_][\w.-]*)(?:=|:\s*)(?P<value>.+)", re.DOTALL)
_LOGIN = re.compile(r"\w://[^/\s@]{0,500}:[^/\s@]{1,500}@")
_PLACEHOLDERS = ("", "none", "empty", "null", "dummy", "none-yet")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_IN_ENVIRONMENTS = ("env", "envs", "environ", "headers", "header", "cookies")
_IN_COMMANDS = ("command", "commands", "cmd", "args", "argv")
_ENDS = re.compile(
    r"(?:token|secret|secrets|password|passwords|passwd|passphrase|passcode|pwd|jwt|"
    r"authorization|credential|credentials|apikey|apikeys|accesskey|secretkey|privatekey|bearer|"
    r"cookie)$"
)
"""Ends of the last word of a key that holds a secret."""
_KEYS_OF = re.compile(
    r"api|access|secret|private|signing|encryption|ssh|account|subscription|license|master|"
    r"service|shared|auth|deploy|storage|admin|client|hmac"
)
"""What stands before `key` where that is a secret, and no column or choice."""
_TOKENS_OF = ("api", "access", "auth", "bearer", "refresh", "session")
"""The same before `tokens`, which most often are counted."""
_TEXT_BEFORE = re.compile(
    r"eos|bos|pad|unk|sep|cls|mask|stop|start|end|begin|eot|fim|image|video|audio|vision|"
    r"think|thinking|special|per|max|min|next|first|last|new|prompt|answer|completion|"
    r"response|text|tool|action|state|separator|newline|delimiter|marker|trigger|bad|padding|"
    r"unknown|placeholder|role|added|extra|by"
)
"""What stands before `token` where that is a piece of text."""
_AFTER = ("value", "values", "text", "string", "plain", "literal")
"""Words at a key's end that say nothing of what it holds."""
_ABOUT = re.compile(
    r"file|files|path|dir|folder|env|var|variable|name|id|type|length|len|count|header|"
    r"field|column|policy|format|url|uri|level|hint|min|max"
)
"""Words at a key's end that make it say something about a secret."""


class Unread(Exception):
    """A secret that is not there; `key` is where its reference stands in the value that was given."""

    def __init__(self, reason: str, fix: str, key: str = "") -> None:
        super().__init__(f"{reason}; {fix}")
        self.reason, self.fix, self.key = reason, fix, key


class SecretText(str):
    """A text of a plug-in's options that may be a reference; the plug-in itself reads it, whenever it needs it."""


SecretOption = Annotated[str, AfterValidator(SecretText)]
"""Of an option that `resolved` leaves as it is."""


class _Kind(Enum):
    PLAIN = auto()
    ENVIRONMENT = auto()
    """Variables or headers, whose names are other programs'."""
    VARIABLE = auto()
    """One of them."""
    SECRET = auto()
    COMMAND = auto()
    FLAGGED = auto()
    """The argument behind a flag that takes a secret."""


def holds_secret(key: str, *, of_others: bool = False) -> bool:
    """Whether a key holds a secret, by its name; `of_others`: it is a variable or a header."""
    words = [word.lower() for word in _WORD.findall(key)]
    while words and words[-1] in _AFTER:
        words.pop()
    if not words:
        return False
    before, last = words[-2] if len(words) > 1 else "", words[-1]
    if last == "tokens":
        return before in _TOKENS_OF
    if last == "token" and _TEXT_BEFORE.fullmatch(before):
        return False
    if "webhook" in words and last in ("webhook", "url", "uri"):
        return True
    if _ENDS.search(last) or (
        last in ("key", "keys") and (_KEYS_OF.fullmatch(before) or (of_others and last == "key"))
    ):
        return True
    if of_others and last in ("auth", "pass", "pin", "otp"):
        return True
    within = "_".join(words)
    return not _ABOUT.fullmatch(last) and any(
        each in within for each in ("api_key", "apikey", "password", "passwd")
    )


def is_reference(given: object) -> bool:
    """Whether a value is a reference, and not what it stands for."""
    return isinstance(given, str) and _REFERENCE.fullmatch(given) is not None


def variables(given: object) -> list[str]:
    """Variables that the references in a value name."""
    return [found["name"] for found in _references(given) if found["name"]]


def secret_file(given: str) -> str:
    """The file that a text names as a reference; empty for any other text."""
    found = _REFERENCE.fullmatch(given)
    return (found["path"] or "") if found else ""


def literals(given: object) -> list[KeyProblemView]:
    """The secrets that stand in a value as they are, and references that are none, by key."""
    found: list[KeyProblemView] = []

    def look(at: tuple[str | int, ...], value: Any, kind: _Kind) -> Any:
        if (wrong := _wrong(value, kind)) and not _names_file(at, value):
            found.append(problem(path(at), *wrong))
        return value

    _mapped(given, look)
    return found


def refuse_literals(given: object) -> None:
    """Raises Impossible where a spec has secrets in it, before anything else that is said of it shows them."""
    if wrong := literals(given):
        raise Impossible(wrong)


def resolved(given: Any) -> Any:
    """A value with what its references stand for; itself where it has none. Raises Unread with the key."""
    if not _references(given):
        return given

    def look(at: tuple[str | int, ...], value: Any, kind: _Kind) -> Any:
        if kind in (_Kind.COMMAND, _Kind.FLAGGED) or type(value) is not str or not is_reference(value):
            return value
        try:
            return read(value)
        except Unread as error:
            raise Unread(error.reason, error.fix, path(at)) from error

    return _mapped(given, look)


def read(reference: str) -> str:
    """What a reference stands for, without space around it; any other text as it is. Raises Unread."""
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        return reference
    secret = (_content(found["path"]) if found["path"] else _variable(found["name"])).strip()
    _known[secret] = reference.removeprefix(found["scheme"] or "")
    return (found["scheme"] or "") + secret


def redacted(given: Any) -> Any:
    """Texts, also in lists and mappings, with references in place of the secrets that this process has read."""
    secrets = sorted((each for each in _known if len(each) >= MOST_HIDDEN), key=len, reverse=True)
    if not secrets:
        return given

    def look(at: tuple[str | int, ...], value: Any, kind: _Kind) -> Any:
        if isinstance(value, str):
            for secret in secrets:
                value = value.replace(secret, _known[secret])
        return value

    return _mapped(given, look)


def keep_closed(own: Iterable[str | os.PathLike[str]]) -> None:
    """From now on no reference reads these files and folders of the service's own."""
    _closed[:] = [os.path.realpath(each) for each in own]


def is_closed(name: str | os.PathLike[str]) -> bool:
    """Whether a path leads, by whatever link, to one of those."""
    real = os.path.realpath(name)
    return any(real == each or real.startswith(each.rstrip("/") + "/") for each in _closed)


_known: dict[str, str] = {}
"""Secrets that this process has read, with their references."""
_closed: list[str] = []


def _mapped(
    given: Any,
    look: Callable[[tuple[str | int, ...], Any, _Kind], Any],
    at: tuple[str | int, ...] = (),
    kind: _Kind = _Kind.PLAIN,
) -> Any:
    """A value made again of what `look` returns for each place, value and kind that is no list or mapping."""
    if isinstance(given, dict | Mapping):
        return {
            key: _mapped(each, look, (*at, str(key)), _below(kind, str(key))) for key, each in given.items()
        }
    if not isinstance(given, list | tuple):
        return look(at, given, kind)
    made, flagged = [], False
    for index, each in enumerate(given):
        made.append(_mapped(each, look, (*at, index), _Kind.FLAGGED if flagged else kind))
        flag = each.lstrip("-") if isinstance(each, str) and each.startswith("-") else ""
        flagged = kind is _Kind.COMMAND and "=" not in flag and holds_secret(flag)
    return made


@lru_cache(maxsize=1024)
def _below(kind: _Kind, key: str) -> _Kind:
    """The kind of what a key of a mapping of some kind holds."""
    if kind is _Kind.SECRET or holds_secret(key, of_others=kind is _Kind.ENVIRONMENT):
        return _Kind.SECRET
    last = "".join(word.lower() for word in _WORD.findall(key)[-1:])
    if last in _IN_ENVIRONMENTS:
        return _Kind.ENVIRONMENT
    if last in _IN_COMMANDS:
        return _Kind.COMMAND
    return _Kind.VARIABLE if kind is _Kind.ENVIRONMENT else _Kind.PLAIN


def _references(given: object) -> list[re.Match[str]]:
    found: list[re.Match[str]] = []

    def look(at: tuple[str | int, ...], value: Any, kind: _Kind) -> Any:
        if kind not in (_Kind.COMMAND, _Kind.FLAGGED) and type(value) is str:
            found.extend(filter(None, [_REFERENCE.fullmatch(value)]))

    _mapped(given, look)
    return found


def _wrong(value: object, kind: _Kind) -> tuple[str, str] | None:
    """Why a value is not what may stand there, and the fix; never the value."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    text = str(value)
    if kind in (_Kind.COMMAND, _Kind.FLAGGED):
        return _in_command(text, kind)
    if found := _REFERENCE.fullmatch(text):
        name = found["name"] or ""
        own = f"{name} is a setting of the services' own", "name another variable"
        return own if name.startswith(OWN_PREFIX) else None
    if kind is _Kind.SECRET and text.lower() not in _PLACEHOLDERS:
        return _no_reference(text) or ("holds a secret as it is", FIX)
    assigned = _ASSIGNED.fullmatch(text) if kind is _Kind.ENVIRONMENT else None
    if assigned and holds_secret(assigned["name"], of_others=True):
        return "holds a secret as it is", f"write a mapping, {assigned['name']}: env:NAME, or the name alone"
    if kind in (_Kind.ENVIRONMENT, _Kind.VARIABLE) and (wrong := _no_reference(text)):
        return wrong
    if _in_address(text):
        return (
            "holds a secret in an address",
            f"leave it out there, or put the whole address elsewhere: {FIX}",
        )
    return None


def _names_file(at: Sequence[str | int], value: object) -> bool:
    """Whether a value is the path of a file of credentials, as Google's variable is."""
    return str(at[-1]).lower().endswith("credentials") and str(value).startswith(("/", "~/", "./", "../"))


def _no_reference(text: str) -> tuple[str, str] | None:
    """Why a text that begins like a reference is none."""
    if (tried := _TRIED.fullmatch(text)) is None:
        return None
    if tried[1] == "env":
        return "is no reference: it names no variable", "write env:NAME, of letters, digits and _"
    if tried[2].startswith("//"):
        return "is an address, and no reference", "write file:PATH, without //"
    reason = "names no file beside the spec, nor by its whole path"
    return reason, "write file:PATH with a path that begins with /, of the host of the service that uses it"


def _in_command(text: str, kind: _Kind) -> tuple[str, str] | None:
    assigned = _ASSIGNED.fullmatch(text)
    literal = kind is _Kind.FLAGGED and not text.startswith("-") and text.lower() not in _PLACEHOLDERS
    if assigned and holds_secret(assigned["name"], of_others=not text.startswith("-")):
        literal = assigned["value"].lower() not in _PLACEHOLDERS
    referred = _REFERENCE.fullmatch(text)
    literal = literal or (referred is not None and bool(referred["name"]))
    if not literal and not _in_address(text) and not _LOGIN.search(text):
        return None
    fix = "let the program read it from a variable: of an MCP server by env: {NAME: env:NAME}, else environment.env"
    return "gives a secret to a process as an argument, which all users of its machine see", fix


def _in_address(text: str) -> bool:
    """Whether an address has a password, or a parameter that holds a secret."""
    if "://" not in text or any(each.isspace() for each in text.strip()):
        return False
    try:
        url = urlsplit(text.strip())
        user = bool(url.username) and url.scheme.endswith(("http", "https"))
        given = [*parse_qsl(url.query), *parse_qsl(url.fragment)]
    except ValueError:
        return False
    asked = (name for name, value in given if value.lower() not in _PLACEHOLDERS and not is_reference(value))
    return (
        bool(url.password)
        or user
        or any(holds_secret(each) or each in ("sig", "signature") for each in asked)
    )


def _variable(name: str) -> str:
    if name.startswith(OWN_PREFIX):
        raise Unread(f"{name} is a setting of the services' own", "name another variable")
    if not os.environ.get(name, "").strip():
        raise Unread(f"the service that uses it has no variable {name}", "start it with the secret in there")
    return os.environ[name]


def _content(name: str) -> str:
    real = os.path.realpath(name)
    if is_closed(real):
        raise Unread(f"{name} is a file of the fleet's own", "name one outside of the data directory")
    try:
        with open(real, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            content = file.read(MOST_BYTES + 1) if stat.S_ISREG(found.st_mode) and found.st_size else b""
        if not content.strip() or len(content) > MOST_BYTES:
            raise Unread(f"{name} is no file with a secret", f"write it there, in 1 to {MOST_BYTES:,} bytes")
        return content.decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        fix = "write the secret there, readable by the service that uses it"
        raise Unread(f"{name} cannot be read ({reason})", fix) from error
