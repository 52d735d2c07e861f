"""What routes read from a request: bodies within a limit, keys, pages of lists. Knows no resource."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Header, Query, Request, Response
from headrace_schema.access import Visibility
from headrace_schema.problems import MOST, choose, explain, problem
from headrace_schema.yaml_text import YamlProblem, read_yaml
from headrace_servicekit.http_server import Bodies, BodyRefused
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import from_json

from headrace_coordinator.api.http.errors import invalid, unknown_parameter
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.aside import PARSING
from headrace_coordinator.domain.run_states import STATES

BODIES = Bodies(1 << 20, 64 << 20)
CALLS = Bodies(32 << 20, 256 << 20)
"""Of sessions: a call holds the sequences of a step. Their values are not counted, for no key of theirs is a tree."""
MOST_VALUES = 50_000
JSON = "application/json"
MEDIA_TYPES = (JSON, "application/yaml")
BODY_REASONS = {
    400: "INVALID",
    408: "TOO_SLOW",
    413: "TOO_LARGE",
    415: "UNSUPPORTED_MEDIA_TYPE",
    503: "UNAVAILABLE",
}
KEY_PATTERN = r"^[\x21-\x7e]{1,200}$"
Model = TypeVar("Model", bound=BaseModel)

PageSize = Annotated[int, Query(ge=1, le=1000, description="most entries of a page")]
PageToken = Annotated[str, Query(max_length=200, description="next_page_token of the page before")]
STATE_FILTER = Query(description="only those in this state; may be repeated")
RunStateName = Annotated[str, Field(json_schema_extra={"enum": [*STATES]})]
MAX_EVENT_ID = 2**63 - 1
States = Annotated[list[RunStateName] | None, STATE_FILTER]
# `?now` and `?now=true` mean the same.
Flag = Annotated[bool, BeforeValidator(lambda value: True if value == "" else value)]
VisibilityOfRun = Annotated[
    Visibility,
    Query(description="who sees it: private (its owner), team (the owner's), or fleet (everybody)"),
]
Key = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        default_factory=lambda: uuid.uuid4().hex,
        pattern=KEY_PATTERN,
        description="repeating a request with its key repeats its answer; generated, and returned, if absent",
    ),
]


def body_of(model: str, *media_types: str) -> dict[str, Any]:
    """What the API's description says of a body that a route reads itself, by default as JSON or YAML."""
    schema = {"schema": {"$ref": f"#/components/schemas/{model}"}}
    return {"requestBody": {"required": True, "content": dict.fromkeys(media_types or MEDIA_TYPES, schema)}}


def view_response(view: BaseModel, status: int = 200) -> Response:
    """A view as JSON; numbers that JSON lacks become null."""
    return Response(view.model_dump_json(), status, media_type="application/json")


def keyed_response(view: BaseModel, key: str, status: int = 200) -> Response:
    """A view with the Idempotency-Key that the write was made under."""
    response = view_response(view, status)
    response.headers["Idempotency-Key"] = key
    return response


def known_states(given: list[str] | None, known: Collection[str] = STATES) -> frozenset[str]:
    """The states that a list is filtered by, by default runs'; refuses one that none of its things can have."""
    for name in given or ():
        if name not in known:
            raise invalid([problem("state", f"there is no state {name[:40]!r}", choose(name, known))])
    return frozenset(given or ())


async def known_parameters(request: Request) -> None:
    """Refuses query parameters that the route does not have: a mistyped dry_run must not start a run."""
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    wrong = [name for name in request.query_params if name not in known]
    if wrong:
        raise invalid([unknown_parameter(name, known) for name in wrong[:MOST]])


async def read_model(request: Request, model: type[Model], what: str, bodies: Bodies = BODIES) -> Model:
    """The JSON or YAML body as a model; refusals name every key that is wrong."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in MEDIA_TYPES:
        given = media_type[:80] or "of no type"
        types = " or ".join(MEDIA_TYPES)
        message = f"the body must be JSON or YAML and is {given}; send Content-Type: {types}"
        raise Refused("UNSUPPORTED_MEDIA_TYPE", message)
    try:
        body = await bodies.read(request.scope["headers"], request.receive)
    except BodyRefused as refused:
        raise Refused(BODY_REASONS[refused.status], str(refused)) from refused
    counted = bodies is not CALLS
    return await PARSING.run(lambda: _parsed(body, media_type, model, what, counted=counted))


def _parsed(body: bytes, media_type: str, model: type[Model], what: str, *, counted: bool) -> Model:
    """In a thread: the largest body takes a second."""
    try:
        if media_type == JSON and not counted:
            return model.model_validate_json(body)
        return model.model_validate(_from_json(body, what) if media_type == JSON else _from_yaml(body, what))
    except ValidationError as error:
        raise invalid(explain(error, model), what) from error


def _from_json(body: bytes, what: str) -> Any:
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid([problem("", f"{what} is not JSON: {error}", "send one JSON object")], what) from error
    count, finite = _counted(data)
    if count > MOST_VALUES:
        reason = f"{what} holds {count:,} values, and {MOST_VALUES:,} is the most"
        raise invalid([problem("", reason, "put data into files that the spec names")], what)
    if not finite:
        raise invalid([problem("", f"{what} holds a number beyond 1e308", "write a finite number")], what)
    return data


def _from_yaml(body: bytes, what: str) -> Any:
    try:
        return read_yaml(body.decode())
    except UnicodeDecodeError as error:
        fix = "send UTF-8"
        raise invalid([problem("", f"{what} is not UTF-8 at byte {error.start}", fix)], what) from error
    except YamlProblem as error:
        raise invalid([problem("", f"{what}: {error}", error.fix)], what) from error


def _counted(data: Any) -> tuple[int, bool]:
    """(values of JSON data, lists and objects among them; whether its numbers are finite)."""
    count, finite, left = 0, True, [data]
    while left:
        value = left.pop()
        count += 1
        finite = finite and not (isinstance(value, float) and not math.isfinite(value))
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return count, finite


Item = TypeVar("Item")


def foreign_token(token: str) -> Refused:
    """The refusal of a token that this list did not give, or whose entry is gone."""
    reason = f"{token[:40]!r} names no entry of this list"
    return invalid([problem("page_token", reason, "take next_page_token of a page, or begin without one")])


def page(
    items: Sequence[Item],
    key: Callable[[Item], str],
    size: int,
    token: str,
    wanted: Callable[[Item], bool] = lambda _: True,
) -> tuple[list[Item], str]:
    """(entries, token of the next page) of the `wanted` entries of a list whose entries have unique keys.

    A token stays valid when its entry is wanted no more.
    """
    start = 0
    if token:
        last = next((index for index, item in enumerate(items) if key(item) == token), None)
        if last is None:
            raise foreign_token(token)
        start = last + 1
    found = [item for item in items[start:] if wanted(item)]
    shown = found[:size]
    return shown, key(shown[-1]) if len(found) > size else ""


def place_of(token: str) -> int:
    """The position that a token of a list of past entries names; -1 before the first."""
    if not token:
        return -1
    if not (token.isascii() and token.isdigit() and len(token) < 20):
        raise foreign_token(token)
    return int(token)


def token_of(place: int | str | None) -> str:
    """The token of the next page; empty at the end."""
    return "" if place is None else str(place)
