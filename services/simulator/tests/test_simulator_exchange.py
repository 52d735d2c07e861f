"""The built-in environment of two roles that answer each other."""

from __future__ import annotations

import pytest
from headrace_simulator.backends.base import BackendError
from headrace_simulator.backends.conversation.backend import Conversations

ITEM = {"question": "2+2 {answer}?", "messages": []}


def exchange(**options):
    return Conversations().converse("exchange", options)


def said(environment, role, content):
    messages, reward, done = environment.step({"role": "assistant", "content": content, "by": role})
    assert reward == 0
    return [(each["to"], each["role"], each["content"]) for each in messages], done


def test_each_reads_what_the_other_says_until_the_last_answer():
    environment = exchange(turns=2, replier_system="doubt", told="{reply} {question}")
    assert environment.roles == ("answerer", "replier")
    for _ in range(2):  # Each conversation begins anew.
        first = environment.reset(0, ITEM)
        assert first == [{"role": "user", "content": ITEM["question"], "to": "answerer"}]
        asked = [("replier", "system", "doubt"), ("replier", "user", "2+2 {answer}?\n{reply}")]
        assert said(environment, "answerer", "{reply}") == (asked, False), "a text's own braces are no places"
        assert said(environment, "replier", "sure?") == (
            [("answerer", "user", f"sure? {ITEM['question']}")],
            False,
        )
        assert said(environment, "answerer", "5") == ([("replier", "user", "5")], False)
        said(environment, "replier", "no")
        assert said(environment, "answerer", "4") == ([], True)


def test_an_items_conversation_goes_before_its_question():
    chat = [{"role": "system", "content": "sums"}, {"role": "user", "content": "2+2"}]
    first = exchange(system="brief").reset(0, {"question": "2+2", "messages": chat})
    assert [(each["role"], each["content"]) for each in first] == [
        ("system", "brief"),
        ("system", "sums"),
        ("user", "2+2"),
    ]


@pytest.mark.parametrize("options", [{"turns": 0}, {"turn": 1}])
def test_a_wrong_option_is_named(options):
    with pytest.raises(BackendError) as caught:
        exchange(**options)
    assert caught.value.field == f"options_json.{next(iter(options))}"
