"""Ids of conversations: what a chat template puts between two turns, and templates that rewrite earlier turns."""

from __future__ import annotations

import pytest
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_modelkit.tokenizer import TextCodec
from headrace_rollout.sessions.template import TurnTemplate
from headrace_schema.sections.generating import PromptSection
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Of Qwen 2.5, shortened to what conversations use: tools in the system message, answers of tools in a user's turn.
HERMES = """{%- if tools %}<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'You help.' }}

# Tools
{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
Call one: <tool_call>{"name": NAME, "arguments": {}}</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% else %}<|im_start|>system
You help.<|im_end|>
{% endif %}{%- for message in messages %}{%- if message.role in ('user', 'assistant') %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'tool' %}{%- if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
{{- '\n<tool_response>\n' -}}
{{ message.content }}
</tool_response>{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Qwen 3 leaves the thoughts of earlier turns out.
FORGETS = HERMES.replace(
    "{{ message.content }}<|im_end|>\n{% elif message.role == 'tool' %}",
    "{{ message.content.split('</think>')[-1].lstrip('\\n') if not loop.last else message.content }}<|im_end|>\n"
    "{% elif message.role == 'tool' %}",
)
# Mistral shows the tools before the last message of the user.
MOVES = """{%- for message in messages %}{%- if message.role == 'user' %}
{%- if tools and loop.last %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}
{{- "[INST]" + message.content + "[/INST]" }}
{%- else %}{{ message.content }}<|im_end|>{% endif %}{% endfor %}"""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "", "parameters": {}}}]


def codec_of(template: str) -> TextCodec:
    """One id a character, and one for each special token."""
    characters = [chr(code) for code in (10, *range(32, 127))]
    vocabulary = {piece: index for index, piece in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="?")
    wrapped.add_special_tokens({"additional_special_tokens": SPECIAL})
    wrapped.chat_template = template
    return TextCodec(wrapped, frozenset({1, 2}), 2)


def user(text):
    return {"role": "user", "content": text}


def shown(codec, ids):
    return codec.decode(ids, skip_special_tokens=False)


def test_a_turns_end_is_added_where_the_policy_did_not_sample_it():
    codec = codec_of(HERMES)
    template = TurnTemplate(codec, PromptSection())
    template.check()
    opened = template.opened([user("2 * 3?")], TOOLS).ids
    assert shown(codec, opened) == codec.render([user("2 * 3?")], {"tools": TOOLS})
    said = codec.tokenizer.encode("<tool_call>…", add_special_tokens=False)
    answers = [{"role": "tool", "content": "6"}, {"role": "tool", "content": "7"}]
    follows = (
        "\n<|im_start|>user\n<tool_response>\n6\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    end = codec.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert shown(codec, template.between([*said, end], answers, TOOLS).ids) == follows
    assert shown(codec, template.between(said, answers, TOOLS).ids) == "<|im_end|>" + follows
    # Another end than the template's own was sampled: it stays, and the template's follows.
    assert shown(codec, template.between([*said, 2], answers, TOOLS).ids) == "<|im_end|>" + follows
    # All turns together are what the template makes of the messages.
    whole = [user("2 * 3?"), {"role": "assistant", "content": "<tool_call>"}, *answers]
    said = codec.tokenizer.encode("<tool_call>", add_special_tokens=False)
    ids = [*opened, *said, *template.between(said, answers, TOOLS).ids]
    assert shown(codec, ids) == codec.render(whole, {"tools": TOOLS})


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (FORGETS, {}, "rewrites earlier turns that hold <think> … once"),
        # An empty thought is written before each answer, and left out behind it.
        (
            HERMES.replace(
                "<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n</think>\n{% endif"
            ),
            {"enable_thinking": False},
            "rewrites earlier turns once",
        ),
    ],
)
def test_a_template_that_rewrites_earlier_turns_is_named_unless_it_is_appended_to(text, arguments, words):
    codec = codec_of(text)
    prompt = PromptSection(template_arguments=arguments)
    with pytest.raises(ModelNotReadable, match=words) as caught:
        TurnTemplate(codec, prompt).check()
    assert "environment.rewritten_turns" in str(caught.value) and "append" in str(caught.value)
    appended = TurnTemplate(codec, prompt, append=True)
    appended.check()
    behind = shown(codec, appended.between([5], [user("and 4?")], None).ids)
    assert behind.startswith("<|im_end|>\n<|im_start|>user\nand 4?<|im_end|>\n<|im_start|>assistant\n")


def test_messages_that_move_what_came_before_them_are_refused():
    """With tools, each message of a user moves them behind the turns that the policy has read them before."""
    template = TurnTemplate(codec_of(MOVES), PromptSection())
    template.check()
    with pytest.raises(ValueError, match="rewrites what stands before the last message"):
        template.between([5], [user("and 4?")], TOOLS)


def test_a_template_without_turns_of_an_assistant_is_named():
    codec = codec_of(
        "{{ raise_exception('one turn alone') if messages | length > 1 else messages[0].content }}"
    )
    with pytest.raises(ModelNotReadable, match=r"turns of user and assistant: .* one turn alone"):
        TurnTemplate(codec, PromptSection()).check()


def test_without_a_chat_template_contents_follow_each_other():
    tokenizer = character_tokenizer()
    codec = TextCodec(tokenizer, frozenset({1}), 0)
    template = TurnTemplate(codec, PromptSection(chat=False))
    template.check()
    assert codec.decode(template.opened([user("1 +"), user(" 2")], None).ids) == "1 + 2"
    assert codec.decode(template.between([1], [user("="), user("3")], None).ids) == "=3"
    assert template.between([1], [], None).ids == []


# Of Mistral 7B v0.3, shortened: ids of calls have nine letters, and roles alternate but for calls and their answers.
MISTRAL = """{%- for message in messages %}{%- if message.role == 'user' %}[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls is defined and message.tool_calls is not none %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}{{ call.function | tojson }}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}{{ call.id }}
{%- endfor %}]<|im_end|>
{%- elif message.role == 'assistant' %} {{ message.content | trim }}<|im_end|>
{%- elif message.role == 'tool' %}[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}
{{- message.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %}{{ raise_exception("Only user and assistant roles are supported!") }}{% endif %}{% endfor %}"""
# Of gpt-oss, shortened: an answer has the name of the call that stands before it.
NAMES = """{%- set last = namespace(name=none) %}{%- for message in messages %}{%- if message.role == 'assistant' %}
{%- if message.tool_calls %}<|im_start|>assistant to={{ message.tool_calls[0].function.name }}
{{- message.tool_calls[0].function.arguments | tojson }}<|endoftext|>
{%- set last.name = message.tool_calls[0].function.name %}
{%- else %}<|im_start|>assistant{{ message.content }}<|im_end|>{%- set last.name = none %}{% endif %}
{%- elif message.role == 'tool' %}{%- if last.name is none %}{{ raise_exception("no previous tool call!") }}{% endif %}
{{- "<|im_start|>functions." + last.name + " " }}{{ message.content | tojson }}<|im_end|>
{%- else %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""
# Of Phi 3.5, shortened: other roles are left out.
LEAVES_OUT = """{%- for message in messages %}{%- if message.role in ('user', 'assistant') %}<|im_start|>
{{- message.role }}
{{ message.content }}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Of DeepSeek V3, shortened: arguments are texts.
ARGUED = """{%- for message in messages %}{%- for call in message.tool_calls or () %}
{{- call.function.name + ' ' + call.function.arguments }}<|im_end|>{%- else %}{{ message.role }} {{ message.content }}
{%- endfor %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>{% endif %}"""
ANSWER = {"role": "tool", "content": "6", "name": "calculator", "tool_call_id": "call00100"}


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        (
            HERMES,
            "\n<|im_start|>user\n<tool_response>\n6\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (MISTRAL, '[TOOL_RESULTS] {"content": 6, "call_id": "call00100"}[/TOOL_RESULTS]'),
        (NAMES, '<|im_start|>functions.calculator "6"<|im_end|><|im_start|>assistant'),
    ],
)
def test_the_answer_of_a_tool_is_shown_as_the_template_shows_it(text, follows):
    codec = codec_of(text)
    template = TurnTemplate(codec, PromptSection())
    template.check(tools=True)
    ended = 2 if text is NAMES else 1
    assert shown(codec, template.between([9, ended], [ANSWER], TOOLS).ids) == follows
    # And as it is shown behind the whole turn.
    function = {"name": "calculator", "arguments": {"expression": "2 * 3"}}
    turn = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00100", "type": "function", "function": function}],
    }
    if text is not HERMES:
        assert codec.render([user("2 * 3?"), turn, ANSWER], {"tools": TOOLS}).endswith(follows)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LEAVES_OUT, "leaves out messages of tool"),
        (MISTRAL.replace("== 'tool'", "== 'none'"), "Only user and assistant roles are supported!"),
        (MISTRAL.replace("!= 9", "!= 12"), "Tool call IDs should be alphanumeric"),
    ],
)
def test_a_template_that_shows_no_answers_of_tools_is_named_before_a_run_begins(text, words):
    template = TurnTemplate(codec_of(text), PromptSection())
    template.check()
    with pytest.raises(ModelNotReadable, match=words) as caught:
        template.check(tools=True)
    assert str(caught.value).startswith("model.path: ") and "chat_template" in str(caught.value)


def test_an_answer_that_the_template_would_leave_out_or_refuse_is_refused():
    with pytest.raises(ValueError, match="leaves out messages of tool"):
        TurnTemplate(codec_of(LEAVES_OUT), PromptSection()).between([9, 1], [ANSWER], None)
    with pytest.raises(ValueError, match="Tool call IDs"):
        bare = {"role": "tool", "content": "6"}
        TurnTemplate(codec_of(MISTRAL), PromptSection()).between([9, 1], [bare], None)


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_arguments_are_given_in_the_form_that_the_template_takes(arguments):
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    turns = [user("1"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert 'add {"a": 1}' in codec_of(ARGUED).render(turns)
