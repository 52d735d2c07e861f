"""Reward models, tiny ones with random weights: their batches say what transformers' own forward says of each alone."""

from __future__ import annotations

import os

import psutil
import pytest
from headrace_reward import scorers
from headrace_reward.scorers.base import BLANK, Answer, AnswerFailed, ScorerError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEMPLATE = "{% for turn in messages %}{{ turn['role'][0] }}:{{ turn['content'] }}<eos>{% endfor %}"
ANSWERS = [
    Answer("1 + 1?", "2"),
    Answer("1 + 1?", "2 and 2 and 2 and 2"),
    Answer("", "", messages=[{"role": "user", "content": "to add?"}], reference="x"),
    Answer("", "2", messages=[{"role": "user", "content": "0123456789 =+->:,.?\nacdoprsty"}]),
    Answer(
        "q",
        "2",
        messages=[{"role": "user", "content": "no"}, {"role": "assistant", "content": "yes"}],
        episode={},
    ),
]
"""The fourth has every id that the model has, so that there is none to pad with."""


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Writes a model of a kind and returns its directory."""
    from headrace_modelkit.presets.tiny import SHAPE, character_tokenizer

    def made(kind, labels=1, form="Sequence"):
        directory = tmp_path_factory.mktemp("model")
        shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**shape, num_labels=labels)
        getattr(transformers, f"{kind}For{form}Classification")(config).save_pretrained(directory)
        tokenizer = character_tokenizer()
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(directory)
        return str(directory)

    return made


def made(**options):
    return scorers.choose("reward_model", options).build()


def own(path, answer):
    """transformers' forward of one sequence, without padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    turns = [*answer.messages] or [{"role": "user", "content": answer.prompt}]
    if answer.episode is None:
        turns.append({"role": "assistant", "content": answer.completion})
    ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=False)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    model.config.pad_token_id = None
    with torch.inference_mode():
        return model(input_ids=ids).logits[0]


@pytest.mark.parametrize("tokens", [1, 60, 10_000])
def test_batches_say_what_transformers_says_of_each_alone(write, tokens):
    path = write("Qwen2")
    found = made(path=path, batch_tokens=tokens).score_batch(ANSWERS)
    assert found == pytest.approx([float(own(path, each)[0]) for each in ANSWERS], abs=1e-5)
    assert len({round(each, 4) for each in found}) == len(ANSWERS)


def test_the_probability_of_a_label_and_a_logit_between_0_and_1(write):
    path = write("Llama", labels=3)
    found = made(path=path, label=2).score_batch(ANSWERS[:2])
    assert found == pytest.approx(
        [float(torch.softmax(own(path, each), -1)[2]) for each in ANSWERS[:2]], abs=1e-5
    )
    with pytest.raises(ScorerError, match="0: LABEL_0, 1: LABEL_1, 2: LABEL_2; give one of these") as raised:
        made(path=path)
    assert raised.value.field == "options.label"
    one = write("Qwen2")
    logit = made(path=one).score(ANSWERS[0])
    assert made(path=one, sigmoid=True).score(ANSWERS[0]) == pytest.approx(1 / (1 + 2.718281828**-logit))


def test_what_cannot_be_a_reward_model_is_named_with_its_key(write, tmp_path):
    from headrace_modelkit.presets.tiny import write_tiny

    write_tiny(tmp_path / "policy")
    wrong = [
        ({"path": str(tmp_path / "policy")}, "path", "is a Qwen3ForCausalLM and no sequence classifier"),
        ({"path": str(tmp_path / "none")}, "path", "there is no such directory"),
    ]
    for options, field, words in wrong:
        with pytest.raises(ScorerError) as raised:
            made(**options)
        assert raised.value.field == f"options.{field}" and words in raised.value.message


TALK = Answer(
    "more?",
    "5",
    messages=[
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "0"},
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "3"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "5"},
    ],
    episode={"rewards": [0.0, 0.0]},
)
"""The first assistant turn is of the environment's first messages."""


def test_each_turn_is_worth_what_the_model_says_of_all_up_to_it(write):
    path = write("Qwen2")
    ends = [Answer("", "", messages=TALK.messages[:end], episode={}) for end in (4, 6)]
    values = [float(own(path, each)[0]) for each in ends]
    assert made(path=path, by="turn").score(TALK) == {"turns": pytest.approx(values, abs=1e-5)}
    gains = made(path=path, by="gain").score(TALK)["turns"]
    assert gains == pytest.approx([values[0], values[1] - values[0]], abs=1e-5)
    (single,) = made(path=path, by="turn").score(ANSWERS[0])["turns"]
    assert single == pytest.approx(float(own(path, ANSWERS[0])[0]), abs=1e-5)


def test_a_classifier_of_tokens_judges_the_steps_of_an_answer(write):
    """As process reward models do: the probability at the end of each step, of which the least counts."""
    path = write("Qwen2", labels=2, form="Token")
    scorer = made(path=path, by="step", separator="\n", label=1)
    answer, steps = Answer("1 + 1?", "2\n3\n\n4 and 5\n"), ["2", "2\n3", "2\n3\n\n4 and 5"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForTokenClassification.from_pretrained(path).eval()
    expected = []
    for step in steps:
        turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": step}]
        ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=False)
        with torch.inference_mode():
            expected.append(float(torch.softmax(model(input_ids=ids).logits[0, -1], -1)[1]))
    assert len({round(each, 5) for each in expected}) == 3
    assert scorer.score(answer) == pytest.approx(min(expected), abs=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch reaches a GPU here")
def test_a_leased_gpu_that_torch_does_not_reach_is_told(write, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f2a")
    with pytest.raises(ScorerError, match="has a GPU's lease, and torch reaches none there"):
        made(path=write("Qwen2"))


def test_a_model_without_its_head_and_an_answer_without_room_are_told(write):
    from safetensors.torch import load_file, save_file

    path = write("Qwen2")
    with pytest.raises(AnswerFailed, match="have 611 tokens, and there is room for the 512"):
        made(path=path).score(Answer("1", "2" * 605))
    assert made(path=path).score(BLANK) == pytest.approx(float(own(path, Answer("1 + 1?", "2"))[0]), abs=1e-5)
    weights = load_file(f"{path}/model.safetensors")
    save_file(
        {name: each for name, each in weights.items() if name != "score.weight"}, f"{path}/model.safetensors"
    )
    with pytest.raises(ScorerError, match=r"lacks 1 weights, first score\.weight"):
        made(path=path)


@pytest.mark.nightly
async def test_one_child_of_the_service_holds_the_model(reward, write):
    path = write("Qwen2")
    await reward.open({"name": "reward_model", "options": {"path": path}}, timeout_s=60)
    children = [
        each
        for each in psutil.Process(os.getpid()).children(recursive=True)
        if "headrace_reward.child" in " ".join(each.cmdline())
    ]
    found = await reward.answers("2", "2 and 2", prompt="1 + 1?")
    expected = [float(own(path, Answer("1 + 1?", text))[0]) for text in ("2", "2 and 2")]
    assert [each.reward for each in found] == pytest.approx(expected, abs=1e-5)
    assert len(children) == 1
