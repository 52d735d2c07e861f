"""Families of models: what is trained is what transformers computes, in whatever form rows lie, and users are told."""

from __future__ import annotations

import pytest
import torch
from backend_cases import config, part, walk_cases
from headrace_modelkit import experts
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.families.known import KNOWN
from headrace_modelkit.presets.families import FAMILIES, write_family
from headrace_trainer.backends.fsdp.backend import FsdpBackend
from headrace_trainer.errors import Refusal
from headrace_trainer.learning.packing import Attends
from headrace_trainer.learning.samples import Sample
from torch._subclasses.fake_tensor import FakeTensor
from transformers.models.llama.modeling_llama import LlamaAttention

QUICK = (
    "deepseek_v3",
    "falcon_h1",
    "nemotron",
    "granitemoehybrid",
    "qwen3_5_text",
    "gemma3_text",
    "llama4_text",
)
QUICK += ("afmoe", "gpt_oss")


def families() -> list[object]:
    return [pytest.param(name, marks=() if name in QUICK else (pytest.mark.nightly,)) for name in FAMILIES]


def answers(count: int = 4) -> list[Sample]:
    """Answers of different lengths to one prompt."""
    drawn = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, 32, (6,), generator=drawn).tolist()
    found = []
    for index in range(count):
        answer = torch.randint(3, 32, (5 + index,), generator=drawn).tolist()
        trained = list(range(6, 6 + len(answer)))
        found.append(Sample(prompt + answer, trained, [-1.0] * len(answer), [1.0] * len(answer), 1.0))
    return found


def by_transformers(model, sequences) -> torch.Tensor:
    rows = [model(input_ids=torch.tensor([each.tokens])).logits[0].log_softmax(-1) for each in sequences]
    return torch.stack(
        [row[at - 1, own.tokens[at]] for row, own in zip(rows, sequences, strict=True) for at in own.trained]
    )


def log_probs(backend: FsdpBackend, sequences) -> torch.Tensor:
    rows = [sequences] if backend.shares_prefixes else [[each] for each in sequences]
    found = backend.infer(rows, ["old_log_probs"])
    return torch.tensor([value for own in found for value in own["old_log_probs"]])


@pytest.mark.parametrize("attends", [None, Attends.SEGMENTS], ids=["on a CPU", "as on a GPU"])
@pytest.mark.parametrize("family", families())
def test_log_probs_and_gradient_are_those_of_transformers(
    family, attends, make_backend, tmp_path, monkeypatch, relative_l2
):
    model = write_family(tmp_path / family, family)
    backend = make_backend(model={"path": str(tmp_path / family), "dtype": "float32"})
    if attends is not None and backend._attends is not Attends.MASK:
        monkeypatch.setattr(FsdpBackend, "_attends", attends)
    sequences = answers()
    expected = by_transformers(model, sequences)
    torch.testing.assert_close(log_probs(backend, sequences), expected.detach(), rtol=0, atol=1e-4)
    assert backend.shares_prefixes is KNOWN[family].shares
    assert bool(backend.notes) is not KNOWN[family].shares

    rows = [sequences] if backend.shares_prefixes else [[each] for each in sequences]
    assert backend._backward(rows, lambda forward, _: -forward[0].sum())
    (-expected.sum()).backward()
    own = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    found = backend.reduced_gradient(1.0)
    assert relative_l2({name: found[name] for name in own if name in found}, own) < 1e-4


def leaks(attention, hidden_states, **options):
    """Adds to each token what stood one place before it in the row, whoever it belongs to."""
    found, weights = ORIGINAL(attention, hidden_states=hidden_states, **options)
    before = torch.cat([torch.zeros_like(hidden_states[:, :1]), hidden_states[:, :-1]], 1)
    return found + before, weights


def forgets(attention, hidden_states, **options):
    """Takes no notice of what it is told about paths and segments."""
    told = {"paths", "segments", "context"}
    given = {name: value for name, value in options.items() if name not in told}
    return ORIGINAL(attention, hidden_states=hidden_states, **given)


def breaks(attention, hidden_states, **options):
    """Takes one sequence a row."""
    if options.get("paths") or options.get("segments"):
        raise TypeError("forward() got an unexpected keyword argument")
    return ORIGINAL(attention, hidden_states=hidden_states, **options)


ORIGINAL = LlamaAttention.forward


@pytest.mark.parametrize(
    ("harm", "words"), [(leaks, "move by"), (forgets, "move by"), (breaks, "breaks where")]
)
def test_a_model_that_mixes_answers_up_gets_rows_apart_and_a_note(
    harm, words, make_backend, tmp_path, monkeypatch
):
    monkeypatch.setattr(LlamaAttention, "forward", harm)
    model = write_family(tmp_path / "llama", "llama")
    section = {"path": str(tmp_path / "llama"), "dtype": "float32"}
    backend = make_backend(model=section)
    assert not backend.shares_prefixes
    [note] = backend.notes
    assert note.startswith("model.path: every answer gets a row of its own") and words in note
    expected = by_transformers(model, answers())
    torch.testing.assert_close(log_probs(backend, answers()), expected.detach(), rtol=0, atol=1e-4)
    with pytest.raises(Refusal, match=r"trainer.shared_prefix: true, but .* answer"):
        make_backend(model=section, trainer={"shared_prefix": True})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "keys"), [("qwen3", {"logit_scale": 0.25}), ("llama", {"final_logit_softcapping": 0.5})]
)
def test_a_head_that_is_not_the_classes_own_ends_the_run(family, keys, dtype, make_backend, tmp_path):
    write_family(tmp_path / family, family, **keys)
    with pytest.raises(Refusal, match=r"model.path: .* would be computed wrong by the trainer") as caught:
        make_backend(model={"path": str(tmp_path / family), "dtype": dtype})
    assert caught.value.reason == "INVALID" and family in caught.value.message


@pytest.mark.parametrize("leaking", ["reference", "critic"])
def test_another_model_of_the_run_that_mixes_answers_up_is_found_too(leaking, make_backend, tmp_path):
    for family in ("llama", "nemotron"):
        write_family(tmp_path / family, family)
    llama, nemotron = ({"path": str(tmp_path / name), "dtype": "float32"} for name in ("llama", "nemotron"))
    if leaking == "reference":
        options = {"algorithm": {"options": {"kl_loss_coef": 0.1}}, "trainer": {"reference": nemotron}}
    else:
        options = {
            "algorithm": {"name": "ppo", "options": {"critic": "model", "critic_path": nemotron["path"]}}
        }
    backend = make_backend(model=llama, **options)
    backend.load_reference()
    assert not backend.shares_prefixes and "every answer gets a row of its own" in backend.notes[0]


def test_the_time_that_it_takes_is_a_figure(make_backend, tmp_path):
    write_family(tmp_path / "llama", "llama")
    backend = make_backend(model={"path": str(tmp_path / "llama"), "dtype": "float32"})
    assert 0 < backend.check_seconds < 30 and not backend.notes


@pytest.mark.timeout(300)
def test_ranks_that_share_a_model_fall_back_together(tmp_path):
    write_family(tmp_path / "nemotron", "nemotron")
    found = [
        walk_cases(
            tmp_path,
            ranks,
            {
                f"ranks-{ranks}": {
                    "config": config(tmp_path / "nemotron", ranks, {"shard": "weights"}, backend="fsdp"),
                    "saved": "",
                }
            },
        )[f"ranks-{ranks}"]
        for ranks in (1, 2)
    ]
    one, two = found
    assert "log-probs move by" in two.notes[0] and len(two.notes) == 2, "of policy and reference"
    torch.testing.assert_close(
        torch.tensor(two.log_probs[0][0][0][0]), torch.tensor(one.log_probs[0][0][0][0]), rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        part(two.tensors, "gradient"), part(one.tensors, "gradient"), rtol=1e-4, atol=1e-5
    )


def test_a_model_that_breaks_in_every_form_ends_the_run(make_backend, tmp_path, monkeypatch):
    def refuses(attention, hidden_states, **options):
        if isinstance(hidden_states, FakeTensor) and not everywhere:
            return ORIGINAL(attention, hidden_states=hidden_states, **options)
        raise TypeError("forward() got an unexpected keyword argument")

    monkeypatch.setattr(LlamaAttention, "forward", refuses)
    write_family(tmp_path / "llama", "llama")
    section, everywhere = {"path": str(tmp_path / "llama"), "dtype": "float32"}, False
    with pytest.raises(Refusal, match=r"model.path: .* breaks in the trainer .*llama") as caught:
        make_backend(model=section)
    assert caught.value.reason == "INVALID"
    everywhere = True  # and as its memory is planned
    with pytest.raises(ModelNotReadable, match=r"model.path: .* breaks in the trainer .*llama"):
        make_backend(model=section, trainer={"micro_batch_tokens": 128})


def test_layers_that_give_another_gradient_when_computed_again_end_the_run(
    make_backend, tmp_path, monkeypatch
):
    def drifts(attention, hidden_states, **options):
        found, weights = ORIGINAL(attention, hidden_states=hidden_states, **options)
        again = torch._C._current_graph_task_id() != -1
        return found * (1.5 if again else 1.0), weights

    monkeypatch.setattr(LlamaAttention, "forward", drifts)
    write_family(tmp_path / "llama", "llama")
    section = {"path": str(tmp_path / "llama"), "dtype": "float32"}
    make_backend(model=section)
    with pytest.raises(Refusal, match=r"model.path: .* another gradient where layers are computed again"):
        make_backend(model=section, trainer={"gradient_checkpointing": True})


def test_an_adapter_that_its_layer_is_computed_past_is_named(make_backend, tmp_path, monkeypatch):
    def past(attention, hidden_states, **options):
        found, weights = ORIGINAL(attention, hidden_states=hidden_states, **options)
        return found.detach() + torch.nn.functional.linear(hidden_states, attention.o_proj.weight), weights

    write_family(tmp_path / "llama", "llama")
    section = {"path": str(tmp_path / "llama"), "dtype": "float32"}
    lora = {"lora": {"targets": ["o_proj", "down_proj"]}}
    assert not make_backend(model=section, trainer=lora).notes
    monkeypatch.setattr(LlamaAttention, "forward", past)
    [note] = [each for each in make_backend(model=section, trainer=lora).notes if "trainer.lora" in each]
    assert "2 of 4 adapters get no gradient, first that of" in note and "o_proj" in note


def test_experts_that_are_computed_otherwise_than_by_their_class_end_the_run(
    make_backend, tmp_path, monkeypatch
):
    own = experts.grouped_product
    monkeypatch.setattr(experts, "grouped_product", lambda *given, **more: 1.1 * own(*given, **more))
    write_family(tmp_path / "model", "deepseek_v3")
    with pytest.raises(Refusal, match=r"model.path: .* would be computed wrong by the trainer"):
        make_backend(model={"path": str(tmp_path / "model"), "dtype": "float32"})
