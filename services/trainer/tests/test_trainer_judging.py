"""Reward models: losses against TRL's, what is read of a row, and what a run's export says, by transformers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2 as pb
from headrace_modelkit.classifier import Classifier
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_schema.openings import GivenAnswer
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.learning import AlgorithmSection
from headrace_servicekit.rpc.digests import trajectory_digest
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.algorithms._base import VALUES, Outcomes, TokenBatch, Turns, batch_figures_of
from headrace_trainer.algorithms.contract import check_algorithm
from headrace_trainer.errors import Refusal
from headrace_trainer.export import export_checkpoint
from headrace_trainer.learning.given import GivenReader
from trainer_calls import digest_of, refusal

VECTORS = json.loads((Path(__file__).parent / "data" / "preference_vectors.json").read_text())["judging"]
VALUES_B = torch.tensor(VECTORS["values"], dtype=torch.float64)
ROWS = [("1+1=", "2", "3"), ("2+1=", "3", "1"), ("1+3=", "4", "44")]
STEPS, LABELS = ["1+1=2", "2+1=3", "3-3=1"], [1.0, 1.0, 0.0]


def section(name: str, **options) -> AlgorithmSection:
    return AlgorithmSection(name=name, options=options, group_size=2 if name == "bradley_terry" else 1)


def learned(algorithm, outcomes: Outcomes):
    """(loss, gradient of the values) that a step would have."""
    advantages_BT, mask_BT = algorithm.advantages(outcomes), outcomes.mask_BT
    values_K = outcomes.columns_BT[VALUES][mask_BT].clone().requires_grad_()
    zeros_K = torch.zeros_like(values_K)
    batch = TokenBatch(
        log_probs_K=zeros_K,
        old_log_probs_K=zeros_K,
        engine_log_probs_K=zeros_K,
        advantages_K=advantages_BT[mask_BT],
        weights_K=torch.ones_like(values_K),
        sequences_K=torch.arange(len(values_K)),
        values_K=values_K,
    )
    (algorithm.loss(batch).loss / algorithm.denominator(len(values_K), len(values_K))).backward()
    return batch_figures_of(algorithm)["loss"], values_K.grad


@pytest.mark.parametrize("case", VECTORS["cases"])
def test_loss_and_gradient_of_pairs_are_those_of_trl(case):
    expected = VECTORS["cases"][case]
    outcomes = Outcomes(
        rewards_B=torch.tensor([1.0, 0.0] * 4, dtype=torch.float64),
        groups_B=torch.arange(8) // 2,
        mask_BT=torch.ones(8, 1, dtype=torch.bool),
        lengths_B=torch.ones(8, dtype=torch.long),
        longest=1,
        columns_BT={VALUES: VALUES_B[:, None]},
    )
    loss, gradient = learned(build_algorithm(section("bradley_terry", **expected["options"])), outcomes)
    assert loss == pytest.approx(expected["loss"], abs=1e-6)
    torch.testing.assert_close(
        gradient, torch.tensor(expected["grad"], dtype=torch.float64), atol=1e-6, rtol=0
    )


def test_steps_have_the_cross_entropy_of_two_labels_of_which_one_has_the_logit_0():
    """Two answers, of three steps and of one; a third one is masked."""
    labels_BN = torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 0, 0]], dtype=torch.float64)
    mask_BT = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    outcomes = Outcomes(
        rewards_B=torch.zeros(3, dtype=torch.float64),
        groups_B=torch.arange(3),
        mask_BT=mask_BT,
        lengths_B=torch.tensor([3, 1, 1]),
        longest=3,
        columns_BT={VALUES: torch.outer(VALUES_B[:3], VALUES_B[3:6])},
        turns=Turns(labels_BN, torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 0]]), torch.tensor([3, 1, 1])),
    )
    loss, gradient = learned(build_algorithm(section("prm")), outcomes)
    values_K = outcomes.columns_BT[VALUES][mask_BT].clone().requires_grad_()
    logits_K2 = torch.stack([torch.zeros_like(values_K), values_K], 1)
    expected = torch.nn.functional.cross_entropy(logits_K2, labels_BN[mask_BT].long())
    expected.backward()
    assert loss == pytest.approx(expected.item())
    torch.testing.assert_close(gradient, values_K.grad)


@pytest.mark.parametrize("name", ["bradley_terry", "prm"])
def test_the_contract_holds(name):
    check_algorithm(name, {})


TEMPLATE = "{% for turn in messages %}{{ turn['role'][0] }}:{{ turn['content'] }}<eos>\n{% endfor %}"


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_row_is_read_as_the_scorer_reads_an_answer(tiny_directory, template):
    """What the template writes behind the last turn is read too, and the token behind it is what is trained."""
    reader = GivenReader(ModelSection(path=str(tiny_directory)), all_turns=False, judged=True, separator="\n")
    tokenizer = reader._codec.tokenizer
    tokenizer.chat_template = template
    given = GivenAnswer(text="1+2", answer=" ", steps=["3", "4"], labels=[1, 0])
    found = reader.read(given.model_dump_json(), {}, "row")
    for sample, answer in zip(found, ["3", "3\n4"], strict=True):
        turns = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(turns, tokenize=False) if template else f"1+2{answer}"
        assert sample.tokens[:-1] == tokenizer.encode(text, add_special_tokens=not template)
        assert sample.trained == [len(sample.tokens) - 1]
    assert [turn.reward for sample in found for turn in sample.turns] == [1, 0]
    with pytest.raises(Refusal, match="messages alone"):
        reader.read(given.model_copy(update={"prefill": "x"}).model_dump_json(), {}, "row")


def settled(prompt: int, answers: list[GivenAnswer], rewards: list[float]) -> pb.SettledGroup:
    group = pb.SettledGroup(prompt_ordinal=prompt)
    for index, (given, reward) in enumerate(zip(answers, rewards, strict=True)):
        message = common_pb2.Trajectory(
            sample=common_pb2.SlotKey(prompt_ordinal=prompt, sample_index=index),
            attempt=1,
            branches=[common_pb2.Branch(given_json=given.model_dump_json())],
            finish_reason=common_pb2.FINISH_REASON_EOS,
        )
        message.body_digest = trajectory_digest(message)
        group.members.add(trajectory=message, reward=reward)
    return group


async def trained(client, config, groups, steps: int):
    version = (await client.open(config)).version
    for step in range(steps):
        number = version.number + 1
        await client.begin(step, 1, version.number, number)
        await client.learn(step, 1, groups)
        reply = await client.commit(step, 1, version.number, number, digest_of(groups))
        await client.record(step, 1, number)
        version = reply.version
    return version, reply.figures


@pytest.mark.parametrize("trainer", [{}, {"lora": {"rank": 4}}], ids=["whole", "adapters"])
async def test_a_run_of_pairs_exports_the_classifier_that_it_trained(client, make_config, tmp_path, trainer):
    """By its values, its checkpoint, and transformers on the export."""
    config = make_config(
        algorithm={"name": "bradley_terry", "group_size": 2}, trainer=trainer, optimizer={"lr": 1e-2}
    )
    groups = [
        settled(at, [GivenAnswer(text=text, answer=each) for each in answers], [1.0, 0.0])
        for at, (text, *answers) in enumerate(ROWS)
    ]
    version, figures = await trained(client, config, groups, 8)
    assert figures["reward_accuracy"] == 1 and figures["loss"] < 0.5
    messages = [member.trajectory for group in groups for member in group.members]
    values = [each.values[0] for each in (await client.infer(messages, pb.INFER_KIND_VALUES)).sequences]
    await client.export("judge")
    judge = Classifier.load(str(client.directory / "judge"), None, "float32", "cpu")
    assert judge.labels == 1 and type(judge.model).__name__ == "Qwen3ForSequenceClassification"
    ids = [character_tokenizer().encode(text + answer) for text, *answers in ROWS for answer in answers]
    assert judge.logits(ids, 512)[:, 0].tolist() == pytest.approx(values, abs=1e-5)
    await client.save(version.number)
    again = export_checkpoint(client.directory, lambda _: tmp_path / "again").directory
    for name in ("config.json", "model.safetensors"):
        assert (again / name).read_bytes() == (client.directory / "judge" / name).read_bytes()


async def test_a_run_of_steps_exports_a_classifier_of_tokens(client, make_config):
    config = make_config(
        algorithm={"name": "prm", "group_size": 1, "options": {"separator": "\n", "head_lr": 0.05}},
        optimizer={"lr": 1e-2},
    )
    answer = GivenAnswer(text="1+1?\n", answer="x", steps=STEPS, labels=LABELS)
    _, figures = await trained(client, config, [settled(0, [answer], [0.5])], 12)
    assert figures["reward_accuracy"] == 1
    await client.export("judge")
    judge = Classifier.load(str(client.directory / "judge"), None, "float32", "cpu")
    beginnings = ["\n".join(STEPS[: count + 1]) for count in range(3)]
    ids = [character_tokenizer().encode("1+1?\n" + each) for each in beginnings]
    good = judge.logits(ids, 512).softmax(-1)[:, 1]
    assert ((good > 0.5).tolist()) == [True, True, False]
    last = settled(0, [answer], [0.5]).members[0].trajectory
    (value,) = (await client.infer([last], pb.INFER_KIND_VALUES)).sequences
    assert good[2].item() == pytest.approx(torch.sigmoid(torch.tensor(value.values[0])).item(), abs=1e-5)


async def test_a_run_that_goes_on_has_the_head_that_it_had(client, make_config):
    config = make_config(algorithm={"name": "bradley_terry", "group_size": 2}, optimizer={"lr": 1e-2})
    group = settled(0, [GivenAnswer(text="1", answer=each) for each in "23"], [1.0, 0.0])
    version, _ = await trained(client, config, [group], 2)
    messages = [member.trajectory for member in group.members]
    before = [each.values[0] for each in (await client.infer(messages, pb.INFER_KIND_VALUES)).sequences]
    name = (await client.save(version.number)).checkpoint.name
    await client.close_run()
    await client.open(config, checkpoint=name, number=version.number + 10)
    after = [each.values[0] for each in (await client.infer(messages, pb.INFER_KIND_VALUES)).sequences]
    assert before == after and before[0] > before[1]


async def test_a_family_without_a_classifier_is_refused(client, make_config, tiny_directory, tmp_path):
    for file in tiny_directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**written, "model_type": "granite", "architectures": ["GraniteForCausalLM"]})
    )
    config = make_config(
        algorithm={"name": "bradley_terry", "group_size": 2},
        model={"path": str(tmp_path), "dtype": "float32"},
    )
    reason, message = await refusal(client.open_run(config))
    assert (
        reason == "MODEL_NOT_READABLE"
        and "transformers has no …ForSequenceClassification of granite" in message
    )
