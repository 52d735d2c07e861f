"""Runs of conversations: where they begin, what scorers get of them, and simulators that are lost."""

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
from embodied_parts import Talks
from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1.reward_pb2 import ScoreResult
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace.simulator.v1 import simulator_pb2 as simulator
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_coordinator.data.items import DataItem
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.slot_index import Slot
from headrace_coordinator.projections.thumbnails import with_thumbnails
from headrace_coordinator.projections.trajectories import Call, Message
from headrace_coordinator.run.modality import Conversations
from headrace_coordinator.run.simulators.pools import opening, other_kind
from headrace_coordinator.run.step.certificate import agent_figures
from headrace_coordinator.run.step.scoring.rewards import added_up, by_turn, turns_problem
from headrace_coordinator.run.step.scoring.scoring import score_item
from headrace_coordinator.run.step.trajectories import Shown, Trajectories, Trajectory, told
from headrace_schema.spec import RunSpec
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.requests import MAX_NUMBER
from headrace_simulation.virtual_time import run_virtual
from PIL import Image
from scene import scored_items


@pytest.mark.parametrize("strikes", [0, 3])
def test_a_run_of_conversations_trains_and_a_lost_simulator_costs_no_step(strikes):
    world = Talks(1, strikes)
    outcome = run_virtual(world.live())
    assert (outcome.state, outcome.recoveries) == ("SUCCEEDED", 0)
    assert outcome.trained + outcome.dropped == 6 * 16
    assert outcome.trained > outcome.dropped
    assert not world.events(ev.PolicyFitted), "nothing of a language model follows from its environment"
    assert not any(each.pools for each in world.living("simulator"))
    opened = [each for each in world.requests if isinstance(each, simulator.OpenPoolRequest)]
    assert {each.environment.name for each in opened} == {"games.py:Guess", "tools"}
    told = [
        json.loads(each.config_json) for each in world.requests if isinstance(each, rollout.OpenRunRequest)
    ]
    assert told and all(config["workflow"] == "agentic" for config in told)
    assert all(config["prompt"]["chat"] is True for config in told)
    opened = [each for each in world.requests if isinstance(each, trainer.OpenRunRequest)]
    sees = {json.loads(each.config_json)["sees"] for each in opened}
    assert sees == {True}, "what environments show is not known"


def test_rewards_by_turn_go_to_a_trainer_that_wants_them():
    """The simulated trainer refuses what does not add up to the reward, or is not one reward a turn."""
    world = Talks(2, strikes=1)
    given = world.spec.model_dump(mode="json")
    options = {"prompts_per_step": 4, "options": {"by_turn": True}}
    world.spec = RunSpec.model_validate({**given, "algorithm": options})
    outcome = run_virtual(world.live())
    assert (outcome.state, outcome.recoveries) == ("SUCCEEDED", 0)


def test_conversations_are_compared_with_all_others_of_their_group(monkeypatch):
    seen = scored_items(monkeypatch)
    world = Talks(1, strikes=0)
    fields = world.spec.model_dump(mode="json")
    fields["reward"]["give"] = ["group"]
    world.spec = RunSpec.model_validate(fields)
    outcome = run_virtual(world.live())
    assert (outcome.state, outcome.recoveries) == ("SUCCEEDED", 0)
    size = world.spec.algorithm.group_size
    assert len(seen) >= 6 * 16 and all(len(item.group) == size for item in seen if not item.evaluation)
    assert all(item.completion in item.group for item in seen)


def trajectory(rewards: list[float]) -> Trajectory:
    return Trajectory(Slot(0, 0), None, 0, 0, (), turn_rewards=rewards)


@pytest.mark.parametrize(
    ("reward", "told", "environment", "expected"),
    [
        (1.5, [], [0.5, 1.0], [0.5, 1.0]),
        (1.2, [], [0.5, 1.0], [0.5, 0.7]),  # a scorer takes 0.3 beside what the environment gave
        (1.0, [0.25, 0.75], [9.0, 9.0], [0.25, 0.75]),
        (2.0, [0.25, 0.75], [0.0, 0.0], [0.25, 1.75]),  # another scorer judges the whole
        (1.0, [], [], []),
    ],
)
def test_the_last_turn_has_what_is_nobody_elses(reward, told, environment, expected):
    result, of = ScoreResult(reward=reward, turns=told), trajectory(environment)
    assert by_turn(result, of) == pytest.approx(expected) and not turns_problem(result, of)


def test_a_scorer_that_miscounts_turns_is_named():
    assert (
        turns_problem(ScoreResult(turns=[1.0]), trajectory([0.0, 0.0]))
        == "a scorer gave 1 rewards for 2 turns"
    )
    assert "nan" in turns_problem(ScoreResult(turns=[float("nan")]), trajectory([0.0]))
    assert added_up([[1.0, 2.0], [], [0.5, 0.5]]) == [1.5, 2.5] and added_up([[], []]) == []


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "PNG")
    return file.getvalue()


def test_what_was_said_is_kept_with_the_policys_turns_and_their_calls():
    """A given turn of the assistant, as an example shows one, is none of the policy's."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    message = common.Trajectory()
    said = [("assistant", "Hello."), ("user", "1+1?"), ("assistant", call), ("tool", "2"), ("assistant", "2")]
    for role, content in said:
        message.conversation.messages.add(role=role, content=content)
    file = png()
    message.conversation.messages[3].images.add(digest=digest_bytes(file))
    message.images.add(digest=digest_bytes(file), data=file)
    message.branches.add().segments.add(policy_number=1).tokens.token_ids.extend(range(10))
    message.branch_texts.add(parts=["<|user|>1+1?", "2"])
    for place, tokens in ((2, 9), (4, 1)):
        message.conversation.turns.add(message=place, tokens=tokens)
    shown = Shown.of(message)
    assert [each.tokens for each in shown.said] == [None, None, 9, None, 1]
    assert [each.branch for each in shown.said] == [None, None, 0, None, 0]
    assert shown.read == [["<|user|>1+1?", "2"]]
    found = told("hermes", shown.said, [0.25, 0.75])
    assert [(each.role, each.content) for each in found] == said
    assert [each.reward for each in found] == [None, None, 0.25, None, 0.75]
    assert [each.calls for each in found if each.calls] == [[Call("add", '{"a": 1}')]]
    small = [[image.partition(",")[0] for image in each.images] for each in with_thumbnails(found)]
    assert small == [[], [], [], ["data:image/webp;base64"], []]
    many = with_thumbnails([Message("user", "", files=[file] * 9)] * 9)
    assert [len(each.images) for each in many] == [4, 4, 4, 4, 0, 0, 0, 0, 0], (
        "of a message, and of a conversation"
    )
    plain = told("", shown.said, [0.25, 0.75])
    assert not any(each.calls for each in plain)


def test_the_tokens_of_roles_are_shown_turn_by_turn_though_their_lines_stand_apart():
    """Asker, teller, asker; the asker's second turn was sampled by another version, in a segment of its own."""
    message = common.Trajectory()
    asker, teller = [(0, []), (1, [-1.0]), (0, []), (2, [-3.0])], [(0, []), (1, [-2.0, -2.5])]
    for segments in (asker, teller):
        branch = message.branches.add()
        for number, log_probs in segments:
            tokens = common.TokenSegment(
                token_ids=[7] * len(log_probs), log_probs=log_probs, text_bytes=[1] * len(log_probs)
            )
            branch.segments.add(policy_number=number, tokens=tokens)
    for role, party in (("user", "asker"), *(("assistant", each) for each in ("asker", "teller", "asker"))):
        message.conversation.messages.add(role=role, party=party, content=party)
    for place, branch, tokens in ((1, 0, 1), (2, 1, 2), (3, 0, 1)):
        message.conversation.turns.add(message=place, branch=branch, tokens=tokens)
    shown = Shown.of(message)
    assert shown.log_probs.tolist() == [-1.0, -2.0, -2.5, -3.0] and list(shown.text_bytes) == [1] * 4
    found = told("", shown.said, [0.25, 1.0, -0.5])
    assert [(each.party, each.tokens, each.reward) for each in found] == [
        ("asker", None, None),
        ("asker", 1, 0.25),
        ("teller", 2, 1.0),
        ("asker", 1, -0.5),
    ]


def begin(item: DataItem) -> rollout.EpisodeStart:
    modality: Any = Conversations(SimpleNamespace(), SimpleNamespace(), ["tools"])  # type: ignore[arg-type]
    return modality.prompt(item).episode


def test_a_conversation_begins_with_its_item_and_the_items_own_seed():
    item = DataItem("2 * 3?", "6", {"level": 1}, {"source": "sums"}, ({"role": "user", "content": "2 * 3?"},))
    start = begin(item)
    assert start.task == "tools"
    assert json.loads(start.options_json) == {
        "level": 1,
        "question": "2 * 3?",
        "answer": "6",
        "messages": [{"role": "user", "content": "2 * 3?"}],
        "metadata": {"source": "sums"},
    }
    assert begin(item).seed == start.seed != begin(DataItem("2 * 4?", "8")).seed
    # A rollout refuses larger ones; of many items, one at least would be.
    assert max(begin(DataItem(f"{number} * 3?", "")).seed for number in range(64)) < MAX_NUMBER
    drawn = begin(DataItem("tools, seed 12", "", {}, {"task": "games.py:Guess", "seed": 12}))
    assert (drawn.task, drawn.seed) == ("games.py:Guess", 12)


def test_scorers_get_the_last_turn_as_the_answer_and_all_that_was_said():
    said = [("user", "2 * 3?"), ("assistant", "call"), ("tool", "6"), ("assistant", "It is 6.")]
    message = common.Trajectory(completion_text="user: 2 * 3? …")
    for role, content in said:
        message.conversation.messages.add(role=role, content=content)
    for reward in (0.5, 1.0):
        message.conversation.turns.add(reward=reward)
    item = score_item(DataItem("2 * 3?", "6"), message, 7, evaluation=False)
    assert (item.completion, item.reference, item.prompt) == ("It is 6.", "6", "2 * 3?")
    assert [(each.role, each.content) for each in item.conversation.messages] == said
    assert [turn.reward for turn in item.conversation.turns] == [0.5, 1.0]
    plain = score_item(DataItem("a", "b"), common.Trajectory(completion_text="b"), 1, evaluation=False)
    assert plain.completion == "b" and not plain.HasField("conversation")


def spec(workflow: str, backend: str) -> RunSpec:
    model = {"path": "model"} if workflow == "agentic" else {"policy": {"kind": "mlp"}}
    environment = {"tasks": ["a.py:A"], "backend": backend}
    return RunSpec.model_validate({"workflow": workflow, "model": model, "environment": environment})


def test_environments_of_the_other_kind_are_named():
    talks, robots = simulator.OpenPoolResponse(conversation=True), simulator.OpenPoolResponse()
    assert not other_kind(spec("agentic", "conversation"), talks)
    assert not other_kind(spec("embodied", "gymnasium"), robots)
    (wrong,) = other_kind(spec("agentic", "gymnasium"), robots)
    assert wrong.key == "environment.backend" and "workflow: embodied" in wrong.fix
    (wrong,) = other_kind(spec("embodied", "conversation"), talks)
    assert wrong.key == "environment.backend" and "workflow: agentic" in wrong.fix


def test_a_conversation_of_roles_ends_where_its_context_is_full():
    talks = simulator.OpenPoolResponse(conversation=True, roles=["asker", "teller"])
    ends = spec("agentic", "conversation")
    goes_on = RunSpec.model_validate(
        {**ends.model_dump(mode="json"), "environment": {"tasks": ["a.py:A"], "on_overflow": "summarise"}}
    )
    assert not other_kind(ends, talks)
    (wrong,) = other_kind(goes_on, talks)
    assert wrong.key == "environment.on_overflow" and "asker, teller" in wrong.problem
    assert not other_kind(goes_on, simulator.OpenPoolResponse(conversation=True))


def test_a_command_is_an_environment_of_agents():
    agents = RunSpec.model_validate(
        {"workflow": "agentic", "model": {"path": "model"}, "agent": {"command": ["agent", "--fast"]}}
    )
    assert agents.environment is not None
    request = opening(agents, agents.environment.tasks[0], 7)
    assert (request.environment.backend, request.environment.name) == ("agent", "command: agent --fast")
    assert (request.count, request.processes) == (7, 0)
    assert json.loads(request.options_json) == {"command": ["agent", "--fast"]}
    plugged = agents.model_dump(exclude={"environment", "data"}) | {
        "agent": {"backend": "verifiers", "task": "t"}
    }
    request = opening(RunSpec.model_validate(plugged), "t", 7)
    assert (request.environment.backend, request.processes) == ("verifiers", 0)


def test_who_leads_the_conversation_has_to_be_what_the_spec_says():
    talks = simulator.OpenPoolResponse(conversation=True)
    agents = simulator.OpenPoolResponse(conversation=True, agents=True)
    led = {"workflow": "agentic", "model": {"path": "model"}, "agent": {"backend": "verifiers", "task": "t"}}
    assert not other_kind(RunSpec.model_validate(led), agents)
    (wrong,) = other_kind(RunSpec.model_validate(led), talks)
    assert (wrong.key, wrong.fix) == ("agent.backend", "write environment: {backend: verifiers, tasks: [t]}")
    (wrong,) = other_kind(spec("agentic", "verifiers"), agents)
    assert (wrong.key, wrong.fix) == (
        "environment.backend",
        "write agent: {backend: verifiers, task: a.py:A}",
    )


def test_what_agents_say_of_themselves_is_told_as_the_mean_of_a_step():
    slots = [Slot(prompt=0, sample=sample) for sample in range(3)]
    said = [{"turns": 2.0}, {"turns": 4.0, "errors": 1.0}, {}]
    trajectories = Trajectories(1 << 20)
    for slot, figures in zip(slots, said, strict=True):
        trajectories.put(Trajectory(slot, None, 0, 1, [], figures=figures))
    assert agent_figures(slots, trajectories) == {"agent_errors": 1.0, "agent_turns": 3.0}
    assert agent_figures(slots[2:], trajectories) == {}
