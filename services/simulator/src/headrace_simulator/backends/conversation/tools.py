"""A conversation in which the model may call tools until it answers: `environment.tasks: [tools]`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from headrace_servicekit.registry import Options
from headrace_servicekit.tool_calls import PARSERS
from pydantic import Field, PositiveFloat, PositiveInt

from headrace_simulator.backends.base import BackendError, Message
from headrace_simulator.backends.base import Tool as ToolSchema
from headrace_simulator.backends.conversation.calls import Limits, Tool, answers
from headrace_simulator.backends.options import unknown
from headrace_simulator.backends.user_file import is_user_environment, load_factory

LARGEST_BITS = 4096
"""Of a whole number that the calculator makes."""
LONGEST_EXPRESSION = 1000
OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class ToolOptions(Options):
    """Options of `tools`."""

    tools: list[str] = Field(
        default_factory=lambda: ["calculator"],
        min_length=1,
        description="built-in tools (calculator), and functions as path/to/file.py:function",
    )
    parser: Literal["hermes", "json"] = Field(
        "hermes", description="form of calls: hermes (Hermes, Qwen 2.5, Qwen 3) or json (a JSON object alone)"
    )
    system: str = Field("", description="system message that the conversation begins with")
    deadline_s: PositiveFloat = Field(5.0, description="seconds that the calls of one turn may take together")
    most_calls: PositiveInt = Field(8, description="calls of one turn that are answered")
    most_characters: PositiveInt = Field(4000, description="characters of an answer that are kept")


class ToolConversation:
    """A question, calls with their answers, and the turn without a call, which ends it.

    It gives no reward: scorers judge the last turn, and may read the calls in `messages`.
    """

    def __init__(self, options: ToolOptions) -> None:
        self._options = options
        self._tools = {tool.name: tool for tool in map(_tool, options.tools)}
        self._limits = Limits(options.deadline_s, options.most_calls, options.most_characters)

    def reset(self, seed: int, item: Mapping[str, Any]) -> tuple[Sequence[Message], Sequence[ToolSchema]]:
        """The item's question, or its conversation."""
        asked = item.get("messages") or [{"role": "user", "content": str(item.get("question", ""))}]
        system = [{"role": "system", "content": self._options.system}] if self._options.system else []
        return [*system, *asked], [tool.schema for tool in self._tools.values()]

    def step(self, message: Message) -> tuple[Sequence[Message], float, bool]:
        """Answers the calls; a turn without any is the last one."""
        calls = PARSERS[self._options.parser](message["content"])
        found = answers(calls, self._tools, self._limits)
        return [{"role": "tool", "content": each} for each in found], 0.0, not calls


def calculator(expression: str) -> str:
    """Computes an arithmetic expression of numbers, + - * / // % ** and brackets, such as "(3 + 4) * 12"."""
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"the expression is longer than {LONGEST_EXPRESSION} characters")
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.AST) -> int | float:
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    ):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) * max(1, int(abs(left))).bit_length() > LARGEST_BITS:
            raise ValueError("the power is too large")
        return _bounded(OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return _bounded(OPERATORS[type(node.op)](_value(node.operand)))
    raise ValueError("only numbers, + - * / // % ** and brackets are computed")


def _bounded(value: Any) -> int | float:
    if isinstance(value, complex) or (isinstance(value, int) and value.bit_length() > LARGEST_BITS):
        raise ValueError("the result is no number that can be written")
    found: int | float = value
    return found


BUILT_IN: Mapping[str, Callable[..., Any]] = {"calculator": calculator}


def _tool(name: str) -> Tool:
    if not is_user_environment(name) and name not in BUILT_IN:
        raise BackendError("options_json.tools", unknown("tool", name, BUILT_IN).message)
    try:
        return Tool(load_factory(name, "function") if is_user_environment(name) else BUILT_IN[name])
    except (TypeError, NameError) as error:
        raise BackendError("options_json.tools", f"{name}: {error}") from error
    except BackendError as error:
        raise BackendError("options_json.tools", error.message) from error
