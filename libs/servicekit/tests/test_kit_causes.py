"""What failed first stands first, however often it was raised again."""

import asyncio

import pytest
from headrace_servicekit.causes import cause_first, first_of, proxied, raised

CAUSE = "gripper 7 lost its CAN bus"


def bus():
    raise ConnectionError(CAUSE)


def alone():
    bus()


def again():
    try:
        bus()
    except ConnectionError as error:
        raise RuntimeError("reset failed") from error


def while_handled():
    try:
        again()
    except RuntimeError:
        raise ValueError("no episode")  # noqa: B904  # as users write it


def grouped():
    raise ExceptionGroup("unhandled errors in a TaskGroup", [ConnectionError(CAUSE), ValueError("x")])


def of_a_task_group():
    async def fails():
        bus()

    async def runs():
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())

    asyncio.run(runs())


@pytest.mark.parametrize("raises", [alone, again, while_handled, grouped, of_a_task_group])
def test_the_first_cause_begins_the_words(raises):
    with pytest.raises(Exception) as caught:
        raises()
    assert raised(caught.value).startswith(f"ConnectionError: {CAUSE}")
    assert isinstance(first_of(caught.value), ConnectionError)


def test_what_it_was_raised_again_as_follows_with_both_places():
    with pytest.raises(ValueError) as caught:
        while_handled()
    words = raised(caught.value)
    assert f"{CAUSE} (test_kit_causes.py:" in words and ", and then ValueError: no episode (test_" in words


def test_a_cause_that_was_put_out_of_sight_stays_there():
    def hides():
        try:
            bus()
        except ConnectionError:
            raise ValueError("no such arm") from None

    with pytest.raises(ValueError) as caught:
        hides()
    assert raised(caught.value).startswith("ValueError: no such arm (")


async def test_a_deadline_is_no_cancelled_task():
    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0.001):
            await asyncio.sleep(9)
    assert raised(caught.value).startswith("TimeoutError (")


def test_a_circle_of_causes_ends():
    first, second = ValueError(CAUSE), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert CAUSE in raised(first)


def test_the_key_stands_last():
    assert cause_first(f"{CAUSE}.", "so all failed", "limits.x") == f"{CAUSE}; so all failed (limits.x)"
    assert cause_first("", "nothing is known", "limits.x") == "nothing is known (limits.x)"
    assert cause_first(CAUSE, "", "limits.x") == f"{CAUSE} (limits.x)"


PROXY = "http://me:secret@proxy.example:3128"


@pytest.mark.parametrize("name", ["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("value", [PROXY, "me:secret@proxy.example:3128"])
def test_a_proxy_is_named_by_its_variable_and_without_its_password(monkeypatch, name, value):
    for each in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(each, raising=False)
        monkeypatch.delenv(each.upper(), raising=False)
    assert not proxied("https://judge.example/v1")
    monkeypatch.setenv(name, value)
    told = f", through the proxy proxy.example:3128 of {name}; to go round it: no_proxy=judge.example"
    assert proxied("https://judge.example/v1") == told
    for around in ("no_proxy", "NO_PROXY"):
        with monkeypatch.context() as patch:
            patch.setenv(around, "other.example,judge.example")
            assert not proxied("https://judge.example/v1") and proxied("https://third.example")
