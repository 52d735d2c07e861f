"""Calls of tools in what a model says, by the form in which its family writes them.

A turn's text comes without special tokens, so that marks which are such tokens (Llama's `<|python_tag|>`, Mistral's
`[TOOL_CALLS]` and `[ARGS]`) may be there or not.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_DEEPSEEK = re.compile(
    r"<｜tool▁calls▁begin｜>(.*?)(?:<｜tool▁calls▁end｜>|$)"
    r"|<｜DSML｜(?:tool|function)_calls>(.*?)(?:</｜DSML｜(?:tool|function)_calls>|$)",
    re.DOTALL,
)
_DEEPSEEK_CALL = re.compile(
    r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)(<｜tool▁call▁end｜>|$)", re.DOTALL
)
_DEEPSEEK_FENCE = re.compile(r"^(.*?)\n```json\n(.*?)\n```$", re.DOTALL)
_MINIMAX = re.compile(r"<minimax:tool_call>(.*?)(?:</minimax:tool_call>|$)", re.DOTALL)
_INVOKE = re.compile(r'<(?:｜DSML｜)?invoke name="([^"]+)">(.*?)(</(?:｜DSML｜)?invoke>|$)', re.DOTALL)
_GIVEN = re.compile(
    r'<(?:｜DSML｜)?parameter name="([^"]+)"(?: string="(true|false)")?>(.*?)</(?:｜DSML｜)?parameter>',
    re.DOTALL,
)
_PYTHON = re.compile(
    r"<function_calls>(.*?)(?:</function_calls>|$)|<\|tool_call_start\|>(.*?)(?:<\|tool_call_end\|>|$)"
    r"|<\|python_start\|>(.*?)(?:<\|python_end\|>|$)",
    re.DOTALL,
)
_FENCE = re.compile(r"^```(?:json)?\s*(.*?)\s*```$", re.DOTALL)
_LLAMA_MARKS = re.compile(r"<\|(?:python_tag|eom_id|eot_id)\|>")
_MISTRAL_MARKS = re.compile(r"\[TOOL_CALLS\]|</s>")
_MISTRAL_CALL = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(?:\[CALL_ID\](\w*))?(?:\[ARGS\])?\s*(?=\{)")
_BETWEEN = re.compile(r"[\s;]*")
_NAME = re.compile(r'[\[{\s]*"name"\s*:\s*"([^"\\]*)"')


@dataclass(frozen=True)
class Call:
    """A call as the model wrote it; `problem` says why it is none."""

    name: str = ""
    arguments: Any = None
    problem: str = ""
    texts: bool = field(default=False, repr=False)
    """The arguments are texts, and the tool's schema says what each is: see `tool_arguments`."""
    given: bool = field(default=True, repr=False, compare=False)
    """It has arguments, whether or not there are any."""
    id: str = field(default="", repr=False, compare=False)
    """What the model calls it by, where its family does so."""


def hermes_calls(text: str) -> list[Call]:
    """Calls of Hermes, Qwen 2.5 and Qwen 3: JSON objects in <tool_call> tags, among other text.

    >>> hermes_calls('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [Call(name='add', arguments={'a': 1}, problem='')]
    """
    found = []
    for inner, end in _HERMES.findall(text):
        found.append(_call(inner) if end else Call(problem="a <tool_call> has no </tool_call>"))
    return found


def json_calls(text: str) -> list[Call]:
    """Calls of models that say nothing else in the turn: one JSON object with a name, or a list of them.

    The object's arguments may be called `parameters`, as Llama 3 does.

    >>> json_calls('{"name": "add", "parameters": {"a": 1}}'), json_calls("It is 4.")
    ([Call(name='add', arguments={'a': 1}, problem='')], [])
    """
    text = text.strip()
    if fenced := _FENCE.match(text):
        text = fenced[1]
    if text[:1] not in ("{", "["):
        return []
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return [_call(text)] if '"name"' in text else []
    listed = found if isinstance(found, list) else [found]
    named = all(isinstance(each, dict) and "name" in each for each in listed)
    return [_of_object(each) for each in listed] if named else []


def llama3_calls(text: str) -> list[Call]:
    """Calls of Llama 3.1 to 3.3: JSON objects with `name` and `parameters`, behind each other or with ; between.

    >>> llama3_calls('<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}')
    [Call(name='add', arguments={'a': 1}, problem=''), Call(name='now', arguments={}, problem='')]
    """
    text = _LLAMA_MARKS.sub("", text).strip()
    found: list[Call] = []
    place = 0
    while text.startswith("{", place):
        try:
            value, place = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError):
            return [*found, _call(text[place:])] if '"name"' in text[place:] else found
        if not (isinstance(value, dict) and "name" in value):
            return found
        found.append(_of_object(value))
        place = _after(_BETWEEN, text, place)
    return found


def mistral_calls(text: str) -> list[Call]:
    """Calls of Mistral: a list of objects behind [TOOL_CALLS], or in newer models NAME[ARGS]{…} for each call.

    >>> mistral_calls('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]')
    [Call(name='add', arguments={'a': 1}, problem='')]
    >>> mistral_calls('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}')
    [Call(name='add', arguments={'a': 1}, problem=''), Call(name='now', arguments={}, problem='')]
    """
    _, mark, after = text.partition("[TOOL_CALLS]")  # other text may stand before it
    text = _MISTRAL_MARKS.sub("", after if mark else text).strip()
    if text.startswith("["):
        return json_calls(text)
    found: list[Call] = []
    place = 0
    while named := _MISTRAL_CALL.match(text, place):
        try:
            value, place = json.JSONDecoder().raw_decode(text, named.end())
        except (ValueError, RecursionError) as error:
            return [*found, Call(named[1], problem=f"the arguments of {named[1]} are no JSON ({error})")]
        found.append(Call(named[1], value, id=named[2] or ""))
    return found


def qwen3_coder_calls(text: str) -> list[Call]:
    """Calls of Qwen3-Coder, Qwen 3.5 and later and Nemotron 3: a tag for the function and for each argument, as text.

    >>> qwen3_coder_calls("<tool_call><function=add><parameter=a>1</parameter></function></tool_call>")
    [Call(name='add', arguments={'a': '1'}, problem='')]
    """
    found = []
    for inner, end in _HERMES.findall(text):
        named = _FUNCTION.fullmatch(inner.strip())
        if not end:
            found.append(Call(problem="a <tool_call> has no </tool_call>"))
        elif named is None:
            found.append(Call(problem="the call is not <function=NAME>…</function>"))
        else:
            given = {name: _unwrapped(value) for name, value in _PARAMETER.findall(named[2])}
            found.append(Call(named[1], given, texts=True))
    return found


def glm_calls(text: str) -> list[Call]:
    """Calls of GLM-4.5 and later: the function's name, then a tag for each argument's name and its text.

    >>> glm_calls("<tool_call>add\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>")
    [Call(name='add', arguments={'a': '1'}, problem='')]
    """
    found = []
    for inner, end in _HERMES.findall(text):
        name, mark, rest = inner.partition("<arg_key>")
        if not end or not name.strip() or "<" in name:
            problem = "has no name of a function" if end else "has no </tool_call>"
            found.append(Call(problem=f"a <tool_call> {problem}"))
        else:
            found.append(Call(name.strip(), dict(_ARGUMENT.findall(mark + rest)), texts=True))
    return found


def deepseek_calls(text: str) -> list[Call]:
    """Calls of DeepSeek: V3 and R1 with a fence of JSON, V3.1 without, V3.2 and V4 in tags of its markup DSML."""
    found = []
    for older, newer in _DEEPSEEK.findall(text):
        for name, given, end in _DEEPSEEK_CALL.findall(older):
            if fenced := _DEEPSEEK_FENCE.match(given.strip()):
                name, given = fenced[1], fenced[2]
            whole = _arguments(name.strip(), given)
            found.append(whole if end else Call(name.strip(), problem="a call has no <｜tool▁call▁end｜>"))
        found += _invoked(newer)
    return found


def minimax_calls(text: str) -> list[Call]:
    """Calls of MiniMax M2: tags with names for the function and for each argument, as text."""
    return [call for inner in _MINIMAX.findall(text) for call in _invoked(inner)]


def pythonic_calls(text: str) -> list[Call]:
    """Calls of Llama 4, OLMo 3 and LFM2: Python's calls with literals by keyword, in a list or one a line.

    >>> pythonic_calls('[add(a=1, b="x"), now()]')
    [Call(name='add', arguments={'a': 1, 'b': 'x'}, problem=''), Call(name='now', arguments={}, problem='')]
    """
    marked = _PYTHON.search(text)
    inner = next((each for each in marked.groups() if each is not None), "") if marked else text
    if marked is None and not inner.strip().startswith("["):
        return []
    try:
        body = ast.parse(inner.strip() if len(inner) <= _LONGEST else "").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [Call(problem=f"the calls are no Python ({error})")] if marked else []
    values = [each.value if isinstance(each, ast.Expr) else each for each in body]
    listed = [one for each in values for one in (each.elts if isinstance(each, ast.List) else [each])]
    found = [_of_python(each) for each in listed]
    return found if marked or all(call.name for call in found) else []


def _of_python(node: ast.AST) -> Call:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        return Call(problem="the call is not NAME(KEY=VALUE, …)")
    name = ast.unparse(node.func)
    try:
        given = {str(each.arg): _literal(each.value) for each in node.keywords if each.arg is not None}
    except (ValueError, TypeError, RecursionError) as error:
        return Call(name, problem=f"the arguments of {name} are no literals ({error})")
    if node.args or len(given) < len(node.keywords):
        return Call(name, problem=f"the arguments of {name} have no names: write {name}(KEY=VALUE)")
    return Call(name, given)


def _literal(node: ast.expr) -> Any:
    """Also of JSON's constants, which OLMo 3 writes."""
    constants = {"true": True, "false": False, "null": None}

    class Constants(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return ast.Constant(constants[node.id]) if node.id in constants else node

    return ast.literal_eval(Constants().visit(node))


def _invoked(text: str) -> list[Call]:
    """Tags of functions with their arguments: texts, but where a tag says that it is none."""
    found = []
    for name, inner, end in _INVOKE.findall(text):
        given = {key: read(value) if kind == "false" else value for key, kind, value in _GIVEN.findall(inner)}
        said = any(kind for _, kind, _ in _GIVEN.findall(inner))
        found.append(Call(name, given, "" if end else "an <invoke> has no </invoke>", texts=not said))
    return found


def _arguments(name: str, text: str) -> Call:
    try:
        return Call(name, json.loads(text))
    except (ValueError, RecursionError) as error:
        return Call(name, problem=f"the arguments of {name} are no JSON ({error})")


def read(text: str) -> Any:
    """What a text is as JSON; the text where it is none."""
    try:
        return json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return text


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _unwrapped(text: str) -> str:
    """Without the line breaks that stand behind the opening and before the closing tag."""
    return text.removeprefix("\n").removesuffix("\n")


PARSERS: Mapping[str, Callable[[str], list[Call]]] = {
    "hermes": hermes_calls,
    "json": json_calls,
    "llama3": llama3_calls,
    "mistral": mistral_calls,
    "qwen3_coder": qwen3_coder_calls,
    "glm": glm_calls,
    "deepseek": deepseek_calls,
    "minimax": minimax_calls,
    "pythonic": pythonic_calls,
}
_TAGS = {
    "hermes": _HERMES,
    "qwen3_coder": _HERMES,
    "glm": _HERMES,
    "deepseek": _DEEPSEEK,
    "minimax": _MINIMAX,
}
TAGGED = frozenset(_TAGS)
"""Forms whose calls stand in tags."""
_MARKS = ("<|python_tag|>", "[TOOL_CALLS]")
_LONGEST = 65_536
"""Characters of calls that Python's parser is given."""


def beside_calls(form: str, text: str, names: Container[str]) -> tuple[str, list[Call]]:
    """What a turn says beside its calls, and these; `names` are those of the tools that the model was given.

    JSON without a mark is a call where it names one of them with an object of arguments, else it is an answer.

    >>> beside_calls("hermes", 'Let me see. <tool_call>{"name": "add", "arguments": {}}</tool_call>', {"add"})
    ('Let me see.', [Call(name='add', arguments={}, problem='')])
    >>> beside_calls("json", '{"name": "Ann", "age": 3}', {"add"})
    ('{"name": "Ann", "age": 3}', [])
    """
    calls = PARSERS[form](text)
    tags = _TAGS.get(form) or (_PYTHON if form == "pythonic" and _PYTHON.search(text) else None)
    marked = tags is not None or any(mark in text for mark in _MARKS)
    if not calls or not (marked or all(_meant(call, names) for call in calls)):
        return text, []
    if tags is not None:
        return tags.sub("", text).strip(), calls
    before, mark, _ = text.partition("[TOOL_CALLS]")
    return before.strip() if form == "mistral" and mark else "", calls


def _meant(call: Call, names: Container[str]) -> bool:
    """Whether JSON that no mark stands before is a call."""
    return call.name in names and (bool(call.problem) or (call.given and isinstance(call.arguments, Mapping)))


def _after(pattern: re.Pattern[str], text: str, place: int) -> int:
    matched = pattern.match(text, place)
    return matched.end() if matched else place


def _call(text: str) -> Call:
    try:
        return _of_object(json.loads(text))
    except (ValueError, RecursionError) as error:
        named = _NAME.match(text)
        return Call(named[1] if named else "", problem=f"the call is no JSON ({error})")


def _of_object(found: Any) -> Call:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Call(problem='the call is no object with a name: {"name": NAME, "arguments": {…}}')
    arguments = found.get("arguments", found.get("parameters"))
    given = "arguments" in found or "parameters" in found
    return Call(found["name"], arguments if given else {}, given=given, id=str(found.get("id") or ""))
