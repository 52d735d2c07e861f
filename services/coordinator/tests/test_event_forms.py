"""Every form of event that a log can hold is read by this commit as it was written by those before.

`golden/events.jsonl` has one event of each type, all its fields filled. A new type or field adds to it; a form that
changes needs the log of running fleets to be thought of, and then:
python services/coordinator/tests/test_event_forms.py
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from headrace_coordinator.domain import events
from headrace_coordinator.domain.events import Event, decode, encode

GOLDEN = Path(__file__).parent / "golden" / "events.jsonl"
LINES = GOLDEN.read_text(encoding="utf-8").splitlines() if GOLDEN.is_file() else []


def kinds():
    return {kind.__struct_config__.tag: kind for kind in events._kinds(Event)}


def filled(kind):
    """A value of a type with no field at its default, as JSON has it."""
    match kind:
        case msgspec.inspect.StructType(fields=fields, tag=tag):
            body = {field.encode_name: filled(field.type) for field in fields}
            return {"type": tag, **body} if tag else body
        case msgspec.inspect.UnionType(types=types):
            return filled(next(each for each in types if not isinstance(each, msgspec.inspect.NoneType)))
        case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item):
            return [filled(item)]
        case msgspec.inspect.TupleType(item_types=items):
            return [filled(item) for item in items]
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return {str(filled(key)): filled(value)}
        case msgspec.inspect.LiteralType(values=values):
            return values[-1]
        case msgspec.inspect.EnumType(cls=cls):
            return list(cls)[-1].value
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.IntType():
            return 7
        case msgspec.inspect.FloatType():
            return 2.5
        case msgspec.inspect.AnyType():
            return {"any": 1}
        case msgspec.inspect.StrType():
            return "words"
    raise TypeError(f"{kind} has no value here: add one")


def test_every_type_of_event_has_a_line():
    assert [json.loads(line)["type"] for line in LINES] == sorted(kinds())


@pytest.mark.parametrize("line", LINES, ids=lambda line: json.loads(line)["type"])
def test_a_line_is_read_and_nothing_of_it_is_lost(line):
    assert json.loads(encode(decode(line.encode()))) == json.loads(line)


@pytest.mark.parametrize("line", LINES, ids=lambda line: json.loads(line)["type"])
def test_a_line_fills_every_field(line):
    """A field that was added stands in the golden line too, so that a later commit does not drop it unseen."""
    found = json.loads(line)
    assert found.keys() - {"type"} == {
        field.encode_name for field in msgspec.structs.fields(kinds()[found["type"]])
    }


if __name__ == "__main__":
    made = [filled(msgspec.inspect.type_info(kind)) for _, kind in sorted(kinds().items())]
    GOLDEN.write_text("".join(json.dumps(each) + "\n" for each in made), encoding="utf-8")
