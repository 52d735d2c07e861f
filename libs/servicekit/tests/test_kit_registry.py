"""Plug-ins are found by name, loaded when needed, and their errors name a key."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace

import pytest
from headrace_servicekit import registry
from headrace_servicekit.contract import check_plugin
from headrace_servicekit.registry import Options, Plugin, PluginError, Registry, plugin, read_capabilities
from pydantic import BaseModel, Field

GROUP = "headrace.test_shapes"


class SquareOptions(Options):
    side: int = Field(default=1, ge=1)
    colour: str = "red"


class Square:
    def __init__(self, options, scale):
        self.side = options.side * scale


class Lax(BaseModel):
    pass


@plugin(SquareOptions)
class Circle:
    """A round shape.

    More about it.
    """

    def __init__(self, options):
        self.radius = options.side


MODULE = SimpleNamespace(
    SQUARE=Plugin("published_shapes:Square", SquareOptions),
    Square=Square,
    CIRCLE=Circle,
    NOT_THERE=Plugin("no_such_module:X"),
    number=5,
    LAX=Plugin("published_shapes:Square", Lax, "takes anything"),
    NOWHERE=Plugin("no_such_module:X", description="leads nowhere"),
    NEEDY=Plugin("published_shapes:Circle", modules=("json", "no_such_module.part")),
)


@pytest.fixture
def shapes(monkeypatch):
    """Registers built-in shapes, and makes what others publish."""
    monkeypatch.setitem(sys.modules, "published_shapes", MODULE)

    def make(**published: str) -> Registry:
        entries = EntryPoints([EntryPoint(name, value, GROUP) for name, value in published.items()])
        return with_entries(entries)

    def with_entries(entries: EntryPoints) -> Registry:
        monkeypatch.setattr(registry, "_published", lambda group, installed: entries.select(group=group))
        built_in = {"square": "published_shapes:SQUARE", "later": "published_shapes:NOT_THERE"}
        return Registry(GROUP, "shape", "shape.name", "shape.options", built_in)

    make.of = with_entries
    return make


def refusal(call) -> str:
    with pytest.raises(PluginError) as caught:
        call()
    return str(caught.value)


def test_built_in_and_published_plug_ins_are_listed_and_built_alike(shapes):
    found = shapes(circle="published_shapes:CIRCLE")
    assert found.names() == ["circle", "later", "square"]
    assert found.choose("square", {"side": 2}).build(10).side == 20
    assert found.choose("circle", {"side": 3}).build().radius == 3
    assert found.find("circle").description == "A round shape."


def test_what_is_listed_is_not_imported(shapes):
    found = shapes(trap="a_module_that_does_not_exist:X")
    assert "trap" in found.names()
    # Its options are known although what it builds cannot be imported.
    assert found.choose("later", {}).name == "later"
    with pytest.raises(ImportError):
        found.choose("later", {}).build()


def test_those_are_installed_whose_modules_are_there(shapes):
    found = shapes(needy="published_shapes:NEEDY", trap="a_module_that_does_not_exist:X")
    assert found.installed() == ["later", "square"]


def test_an_unknown_name_gets_the_nearest(shapes):
    assert refusal(lambda: shapes().find("Squar")) == (
        "shape.name: there is no shape 'Squar'; did you mean 'square'? known: later, square"
    )


def test_wrong_options_are_all_named_below_their_key(shapes):
    assert refusal(lambda: shapes().choose("square", {"side": 0, "color": "red"})) == (
        "shape.options.side: 0 is not valid; input should be greater than or equal to 1 | "
        "shape.options.color: unknown key; did you mean 'colour'? allowed keys: side, colour"
    )
    with pytest.raises(PluginError) as caught:
        shapes().choose("square", {"side": 0})
    assert caught.value.metadata["key"] == "shape.options.side"


def test_two_plug_ins_of_one_name_are_a_clear_error(shapes):
    found = shapes(square="published_shapes:CIRCLE")
    assert found.names() == ["later", "square"]
    said = refusal(lambda: found.find("square"))
    assert "published 2 times: published_shapes:SQUARE, built in, published_shapes:CIRCLE" in said
    assert "remove or rename all but one" in said


def test_a_distribution_that_lies_on_the_path_twice_is_no_clash(shapes):
    twice = [EntryPoint("circle", "published_shapes:CIRCLE", GROUP) for _ in range(2)]
    assert shapes.of(EntryPoints(twice)).find("circle") is MODULE.CIRCLE


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("no_such_module:X", "cannot be imported: No module named 'no_such_module'"),
        ("published_shapes:nothing", "cannot be imported"),
        ("published_shapes:number", "is a int and no headrace_servicekit.registry.Plugin"),
    ],
)
def test_a_broken_plug_in_names_its_package_and_hides_no_other(shapes, value, words):
    found = shapes(broken=value)
    said = refusal(lambda: found.find("broken"))
    assert words in said and value in said and "repair" in said
    heard = []
    schemas = read_capabilities(found.capabilities(heard.append))
    assert sorted(schemas) == ["later", "square"] and "broken" in heard[0]


def test_options_travel_as_json_schemas(shapes):
    listed = shapes().capabilities(print)
    schemas = read_capabilities([*listed, "odd={"])
    assert sorted(schemas) == ["later", "square"]
    assert schemas["square"] == json.loads(json.dumps(SquareOptions.model_json_schema()))
    assert schemas["square"]["additionalProperties"] is False


def test_the_contract_holds_for_a_sound_plug_in(shapes):
    assert check_plugin(shapes(circle="published_shapes:CIRCLE"), "circle", {"side": 2}).build().radius == 2


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("absent", {}, "is not published in the group headrace.test_shapes"),
        ("square", {"side": 0}, "shape.options.side"),
        ("square", {}, "has no description"),
        ("lax", {}, "an unknown option is taken in silence"),
        ("nowhere", {}, "no_such_module:X cannot be imported"),
    ],
)
def test_the_contract_says_what_does_not_hold(shapes, name, options, words):
    found = shapes(lax="published_shapes:LAX", nowhere="published_shapes:NOWHERE")
    with pytest.raises(AssertionError, match=words):
        check_plugin(found, name, options)


def test_what_is_installed_is_read_once_until_something_comes_or_goes(tmp_path, monkeypatch):
    reads = []
    read = registry.entry_points
    monkeypatch.setattr(registry, "entry_points", lambda **select: (reads.append(select), read(**select))[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins = registry.Registry("headrace.tests.coming", "test", "test", "options", {})
    for _ in range(3):
        assert plugins.names() == []
    assert len(reads) == 1
    about = tmp_path / "late-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: late\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[headrace.tests.coming]\nlate = json:dumps\n")
    assert plugins.names() == ["late"], "installed while the process runs"
    assert len(reads) == 2
