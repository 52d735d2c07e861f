"""Chat templates in their own process: the same text as transformers, and an end to those that have none."""

from __future__ import annotations

import time

import pytest
from headrace_modelkit.rendering import CPU_S, Endless, Renderer
from transformers.utils.chat_template_utils import render_jinja_template

CHAT = [{"role": "user", "content": "hé😀 <b>"}, {"role": "assistant", "content": ""}]
PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content | trim }}{{ m | tojson }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}{{ tools | default('no tools') | string }}{{ style }}"
)
ENDLESS = {
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(99) }}",
    "a filter": "{{ range(99999) | map('string') | map('length') | list | length }}" * 400,
}
REFUSED = {
    "a long range": "{% for i in range(10**12) %}{{ i }}{% endfor %}",
    "memory": "{{ 'x' * 10**10 }}",
    "doubling": "{% set n = namespace(x='xx') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "its own words": "{{ raise_exception('only users') }}",
    "no number": "{{ 1 // 0 }}",
    "the sandbox": "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
}


@pytest.fixture(scope="module")
def renderer():
    return Renderer()


def test_a_text_is_the_one_that_transformers_makes(renderer):
    variables = {"bos_token": "<s>", "style": "«", "tools": [{"type": "function", "function": {"name": "f"}}]}
    texts, _ = render_jinja_template([CHAT], chat_template=PLAIN, add_generation_prompt=True, **variables)
    assert renderer.render(PLAIN, CHAT, variables) == texts[0]


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_template_without_an_end_is_killed_and_the_next_text_is_made(renderer, kind):
    began = time.monotonic()
    with pytest.raises(Endless, match=f"{CPU_S:g} s of a core"):
        renderer.render(ENDLESS[kind], CHAT, {})
    assert time.monotonic() - began < 60
    assert renderer.render("{{ messages | length }}", CHAT, {}) == "2"


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_template_may_not_do_is_told_in_its_own_words(renderer, kind):
    with pytest.raises(ValueError, match=r"\w") as refused:
        renderer.render(REFUSED[kind], CHAT, {})
    assert kind in ("memory", "doubling") or not isinstance(refused.value, Endless)
