"""Conversations of several roles on a real fleet, as examples/agents/hint.yaml has them, and credit by turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.ledger import audit
from harness.processes import run_python
from harness.waiting import wait_for
from headrace.client import HeadraceError
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("one_simulator")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "agents"
STEPS, GROUPS, SAMPLES = 3, 4, 4


def example(name: str, task: str, tiny_model: Path, **more: Any) -> dict[str, Any]:
    """The spec of an example with a few short steps."""
    spec: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    spec["model"]["path"] = str(tiny_model)
    spec["environment"] |= {"tasks": [f"{EXAMPLES / f'{name}.py'}:{task}"], "count": 6}
    spec["algorithm"] |= {"prompts_per_step": GROUPS, "group_size": SAMPLES}
    spec["sampling"]["stop"] = [*"02468 =+->:,.?"]  # a random model's turns come to an end
    return spec | {
        "steps": STEPS,
        "evaluation": {"every": 0},
        "data": {"heldout": 4},
        "export": False,
        **more,
    }


def test_two_roles_of_one_policy_are_learned_from_by_their_own_rewards(fleet, tiny_model):
    spec = example("hint", "Hint", tiny_model)
    run = fleet.succeed(fleet.submit(spec))
    found = audit(fleet, run)
    assert found.trained and not [each for each in found.dropped if "broken" in each.detail]
    talks = [each for each in fleet.client.trajectories(run.id, limit=100) if len(each.messages) == 4]
    assert talks, "no game came to the guesser"
    for talk in talks:
        assert [(each.role, each.party, each.tokens is not None) for each in talk.messages] == [
            ("user", "speaker", False),
            ("assistant", "speaker", True),
            ("user", "guesser", False),
            ("assistant", "guesser", True),
        ]
        speaker, guesser = talk.messages[1], talk.messages[3]
        assert talk.parts["episode/speaker"] == pytest.approx(speaker.reward)
        assert talk.parts["episode/guesser"] == pytest.approx(guesser.reward)
        assert talk.reward == pytest.approx(speaker.reward + guesser.reward)
        assert talk.tokens == speaker.tokens + guesser.tokens
    for certificate in found.live:
        # Each role's log-probs are of its own line alone, in the trainer as in the engine.
        assert certificate.log_prob_mismatch_mean < 1e-3
    example_talk = run.evaluations[0].examples[0]["messages"]
    assert example_talk[0]["party"] == "speaker" and example_talk[1]["tokens"] >= 0


def test_a_role_that_a_frozen_model_plays_is_context_and_a_role_that_is_not_there_is_named(fleet, tiny_model):
    spec = example("hint", "Hint", tiny_model, steps=1)
    spec["environment"]["roles"] = {"guessr": {}}
    with pytest.raises(HeadraceError) as caught:
        fleet.submit(spec)
    (problem,) = caught.value.problems
    assert problem.key == "environment.roles.guessr" and "roles: speaker, guesser" in problem.problem
    spec["environment"]["roles"] = {"guesser": {"path": str(tiny_model), "temperature": 1.0}}
    run = fleet.succeed(fleet.submit(spec))
    audit(fleet, run)
    talks = fleet.client.trajectories(run.id, limit=100)
    assert talks and all(
        each.tokens is None for talk in talks for each in talk.messages if each.party == "guesser"
    )
    assert {part for talk in talks for part in talk.parts} <= {"episode", "episode/score", "episode/speaker"}


def test_two_policies_learn_in_one_conversation_each_from_its_own_role(fleet, tiny_model, tmp_path):
    """The guesser hardly learns, so that it is seen who moved; the run goes on from a checkpoint of both."""
    spec = example("hint_policies", "Hint", tiny_model, export=True, checkpoint={"interval_steps": 1})
    spec["environment"]["tasks"] = [f"{EXAMPLES / 'hint.py'}:Hint"]
    spec["policies"]["guesser"]["optimizer"] = {"lr": 1e-9}
    run = fleet.succeed(fleet.submit(spec))
    found = audit(fleet, run)
    assert found.trained and all(each.log_prob_mismatch_mean < 1e-3 for each in found.live)
    steps = fleet.client.metrics(run.id)
    for name in ("policy", "guesser"):
        assert all(step.figures[f"{name}/log_prob_mismatch_mean"] < 1e-3 for step in steps)
    tokens = [(step.figures["policy/tokens"], step.figures["guesser/tokens"]) for step in steps]
    assert all(sum(pair) == step.tokens for pair, step in zip(tokens, steps, strict=True))
    shown = fleet.headrace("run", "get", run.id).stdout
    assert "policy" in shown and "guesser" in shown.rpartition("reward mean")[2]
    assert run.evaluations[0].parts["episode/guesser"] is not None
    began = load_file(tiny_model / "model.safetensors")
    speaker, guesser = (
        load_file(Path(run.export_path) / below / "model.safetensors") for below in ("", "guesser")
    )
    moved = [
        max(float((own[name] - began[name]).abs().max()) for name in began) for own in (speaker, guesser)
    ]
    assert moved[0] > 1e-4 > moved[1] > 0
    again = fleet.succeed(fleet.submit(spec | {"steps": STEPS + 1, "from_checkpoint": {"run": run.id}}))
    assert audit(fleet, again).live[-1].step == STEPS + 1


@pytest.mark.nightly  # quick: the two policies above, and test_flow_lora
def test_two_lora_policies_on_one_base_are_in_one_engine_and_their_adapters_travel_alone(fleet, tiny_model):
    spec = example("lora_policies", "Hint", tiny_model)
    spec["environment"]["tasks"] = [f"{EXAMPLES / 'hint.py'}:Hint"]
    spec["weights"] = {"transports": ["grpc"]}
    whole = (tiny_model / "model.safetensors").stat().st_size
    for rollout in ({"enable_lora": True}, {}):  # in one engine, and merged in an engine each
        run = fleet.succeed(fleet.submit(spec | {"rollout": rollout}))
        assert audit(fleet, run).trained
        for step in [*fleet.client.metrics(run.id)][1:]:
            off = [step.figures[f"{name}/log_prob_mismatch_mean"] for name in ("policy", "guesser")]
            # With the other's adapter, or those of a version before, it would be more by far.
            assert max(off) < 1e-3 and step.figures["guesser/tokens"] > 0, off
            assert step.figures["weights_bytes"] < whole, "a version is both policies' adapters"
    spec["policies"]["guesser"]["own_devices"] = True
    with pytest.raises(HeadraceError) as refused:
        fleet.submit(spec)
    assert [each.key for each in refused.value.problems] == ["policies.guesser.own_devices"]


@pytest.fixture(scope="module")
def backwards(tmp_path_factory) -> Path:
    """A tiny model of another shape, whose tokenizer numbers its characters backwards."""
    directory = tmp_path_factory.mktemp("models") / "backwards"
    run_python("-m", "headrace_modelkit.presets.tiny", directory, "--head-dim", "32", "--seed", "1")
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    last = max(vocabulary.values()) + 3
    tokenizer["model"]["vocab"] = {
        piece: number if number < 3 else last - number for piece, number in vocabulary.items()
    }
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return directory


@pytest.mark.nightly  # quick: the two policies above; test_trainer_policies has the rest
def test_policies_with_tokenizers_of_their_own_are_made_ahead_exported_evaluated_and_gone_on_from(
    fleet, tiny_model, backwards, tmp_path
):
    """The guesser is another model; answers are of one version before. Its checkpoint is used as any other."""
    spec = example("hint_policies", "Hint", tiny_model, export=True, checkpoint={"interval_steps": 1})
    spec["environment"]["tasks"] = [f"{EXAMPLES / 'hint.py'}:Hint"]
    spec["policies"]["guesser"] = {
        "model": {"path": str(backwards), "dtype": "float32"},
        "optimizer": {"lr": 1e-6},
    }
    spec["optimizer"] = {"lr": 1e-6}  # a version more or less hardly changes a log-prob
    spec["algorithm"]["max_staleness"] = 1
    spec["placement"] = {"mode": "disaggregated"}
    run = fleet.succeed(fleet.submit(spec))
    found = audit(fleet, run)
    assert max(each.max_staleness for each in found.live) == 1
    for step in fleet.client.metrics(run.id):
        # Ids of the other's text would be scored as quite another text: 1 or more a token.
        off = [step.figures[f"{name}/log_prob_mismatch_mean"] for name in ("policy", "guesser")]
        assert max(off) < 0.01 and step.figures["guesser/tokens"] > 0, off
    talks = fleet.client.trajectories(run.id, limit=100)
    guesses = {talk.messages[2].content for talk in talks if len(talk.messages) == 4}
    assert guesses and all(each.endswith("=") for each in guesses), "it reads text, not the other's ids"

    directory = tmp_path / "exported"
    done = fleet.headrace("run", "export", run.id, "--to", directory)
    assert done.returncode == 0, done.stderr
    for below in ("", "guesser"):
        for name in ("model.safetensors", "tokenizer.json"):
            own = Path(run.export_path) / below / name
            assert (directory / below / name).read_bytes() == own.read_bytes()
    numbers = [
        json.loads((directory / below / "tokenizer.json").read_text())["model"]["vocab"]
        for below in ("", "guesser")
    ]
    assert numbers[0] != numbers[1]

    suite = {"source": "copy_digits", "options": {"digits": 3}, "heldout": 4}
    asked = {
        "suite": {"name": "items", "options": suite},
        "prompt": {"template": "{question}", "chat": False},
        "sampling": {"max_new_tokens": 4},
    }
    answers = []
    for policy in ("", "guesser"):
        checkpoint = {"run": run.id, "policy": policy}
        exported = {"path": str(directory / policy), "dtype": "float32"}
        for source in ({"checkpoint": checkpoint}, {"model": exported}):
            judged = fleet.client.evaluate(asked | source)
            ended = wait_for(
                lambda id=judged.id: now if (now := fleet.client.evaluation(id)).ended else None, judged.id
            )
            assert ended.state == "SUCCEEDED", ended.reason
            answers.append([each.completion for each in fleet.client.trajectories(ended.id)])
    assert answers[0] == answers[1] and answers[2] == answers[3] and answers[0] != answers[2]
    with pytest.raises(HeadraceError) as refused:
        fleet.client.evaluate(asked | {"checkpoint": {"run": run.id, "policy": "gueser"}})
    (problem,) = refused.value.problems
    assert problem.key == "checkpoint.policy" and "did you mean guesser?" in problem.fix

    again = fleet.succeed(fleet.submit(spec | {"steps": STEPS + 1, "from_checkpoint": {"run": run.id}}))
    assert audit(fleet, again).live[-1].step == STEPS + 1


def test_a_policy_that_cannot_play_is_named_at_submission(fleet, tiny_model):
    def problems(roles: dict[str, Any], policies: dict[str, Any]) -> dict[str, str]:
        spec = example("hint", "Hint", tiny_model, policies=policies)
        spec["environment"]["roles"] = roles
        with pytest.raises(HeadraceError) as caught:
            fleet.submit(spec)
        return {each.key: each.problem for each in caught.value.problems}

    found = problems({"guesser": {"policy": "guessr"}}, {"guesser": {}})
    assert "no policy 'guessr'" in found["environment.roles.guesser.policy"]
    assert "plays no role" in found["policies.guesser"]
    both = {each: {"policy": "other"} for each in ("speaker", "guesser")}
    assert "by the run's own policy" in problems(both, {"other": {}})["environment.roles"]
    found = problems({"guesser": {"policy": "other"}}, {"other": {"model": {"path": "/nowhere"}}})
    assert list(found) == ["policies.other.model.path"]
    algorithm = {"name": "grpo", "options": {"epochs": 0}}
    found = problems({"guesser": {"policy": "other"}}, {"other": {"algorithm": algorithm}})
    assert list(found) == ["policies.other.algorithm.options.epochs"]


def test_credit_by_turn_is_learned_from_the_environments_rewards(fleet, tiny_model):
    """Turns of one conversation have their own rewards, which add up, and the trainer takes them."""
    spec = example("guess", "Guess", tiny_model)
    spec["reward"] = {"scorers": [{"name": f"{EXAMPLES / 'guess.py'}:reward"}]}
    spec["algorithm"]["options"] = {"credit": "turn", "turn_discount": 0.9}
    run = fleet.succeed(fleet.submit(spec))
    found = audit(fleet, run)
    assert found.trained
    talks = fleet.client.trajectories(run.id, limit=100)
    turns = [[each.reward for each in talk.messages if each.tokens is not None] for talk in talks]
    assert any(len(rewards) == 2 for rewards in turns)
    for talk, rewards in zip(talks, turns, strict=True):
        assert sum(rewards) == pytest.approx(talk.reward)
    assert all(certificate.log_prob_mismatch_mean < 1e-3 for certificate in found.live)


@pytest.mark.nightly  # quick: the two policies above take turns on one
def test_two_policies_answer_each_other_each_on_a_device_of_its_own(fleet, tiny_model):
    spec: dict[str, Any] = yaml.safe_load((EXAMPLES.parent / "two_policies.yaml").read_text(encoding="utf-8"))
    spec |= {"steps": 2, "export": False, "placement": {"rollout,trainer": "0"}}
    spec["model"]["path"] = str(tiny_model)
    spec["environment"] |= {"count": 6, "options": {"turns": 2, "asks": "{question}{answer}"}}
    spec["environment"]["roles"]["replier"] |= {"path": str(tiny_model), "own_devices": True}
    spec["sampling"]["stop"] = [*"02468 =+->:,.?"]
    spec["algorithm"] |= {"prompts_per_step": GROUPS, "group_size": SAMPLES}
    with pytest.raises(HeadraceError) as caught:
        fleet.submit(spec)
    (problem,) = caught.value.problems
    assert problem.key == "placement.rollout" and "each of 2 models" in problem.problem
    run = fleet.succeed(fleet.submit(spec | {"placement": {"rollout,trainer": "0-1"}}))
    found = audit(fleet, run)
    assert len(found.trained) + len(found.dropped) == 2 * GROUPS * SAMPLES
    talks = fleet.client.trajectories(run.id, limit=100)
    whole = [talk for talk in talks if sum(each.role == "assistant" for each in talk.messages) == 5]
    assert whole, "no exchange came to its end"
    for talk in whole:
        spoken = [each for each in talk.messages if each.role == "assistant"]
        assert [each.party for each in spoken] == ["answerer", "replier"] * 2 + ["answerer"]
        last = spoken[-1].content
        assert talk.parts["exact"] == float(last.strip() == talk.messages[0].content[0])
        assert talk.parts["format"] == float(last.strip()[:1].isdigit())
        assert all((each.tokens is None) == (each.party == "replier") for each in spoken)
        heard = [each.content for each in talk.messages if each.role == "user" and each.party == "answerer"]
        assert heard[1:] == [each.content for each in spoken if each.party == "replier"]
    assert all(certificate.log_prob_mismatch_mean < 1e-3 for certificate in found.live)
    for step in fleet.client.metrics(run.id):
        generated = {device for device, stages in step.devices.items() if "generate" in stages}
        assert {device.rpartition(":")[2] for device in generated} == {"0", "1"}
