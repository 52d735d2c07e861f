"""An online run on a real fleet: outside clients speak with the policy, reward it, and it learns from what they say."""

from __future__ import annotations

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.fleet import RUN_S
from harness.ledger import audit
from harness.waiting import wait_for
from openai import APIConnectionError, APIStatusError, NotFoundError, OpenAI

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "agents"
SESSIONS = 6


def example(tiny_model: Path, **more: Any) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((EXAMPLES / "online.yaml").read_text(encoding="utf-8"))
    spec["model"]["path"] = str(tiny_model)
    spec["algorithm"]["prompts_per_step"] = SESSIONS
    return spec | {"steps": 3, "export": False, **more}


def client_of(fleet, run) -> OpenAI:
    found = fleet.json("run", "endpoint", run.id, "--json")
    return OpenAI(base_url=found["base_url"], api_key=found["api_key"], timeout=RUN_S, max_retries=0)


def asked(client: OpenAI, text: str) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="policy", messages=messages, max_tokens=2)


def feedback(client: OpenAI, answer: Any, reward: float) -> str:
    found: Any = client.post("/feedback", cast_to=object, body={"completion": answer.id, "reward": reward})
    return found["state"]


def test_a_run_learns_from_the_sessions_that_outside_clients_reward(fleet, tiny_model, monkeypatch):
    run = fleet.submit(example(tiny_model))
    found = importlib.util.spec_from_file_location("online_example", EXAMPLES / "online.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    client = client_of(fleet, run)
    over = threading.Event()

    def user(number: int) -> list[float]:
        rewards = []
        while not over.is_set():
            try:
                rewards.append(module.play(client, number * 1000 + len(rewards)))
            except (APIConnectionError, APIStatusError):
                assert fleet.client.get(run.id).ended or over.wait(5), (
                    "no request fails while the run is served"
                )
                return rewards
        return rewards

    with ThreadPoolExecutor(4) as users:
        playing = [users.submit(user, number) for number in range(4)]
        try:
            run = fleet.succeed(run)
        finally:
            over.set()
        rewards = [reward for each in playing for reward in each.result()]
    assert len(rewards) >= 3 * SESSIONS
    report = audit(fleet, run)
    assert len(report.trained) == 3 * SESSIONS and not report.dropped
    talks = fleet.client.trajectories(run.id, limit=100)
    assert len(talks) == 3 * SESSIONS and {talk.reward for talk in talks} <= {-0.5, 0.0, 1.0}
    assert all(talk.completion.startswith("user: ?\nassistant: ") for talk in talks)
    for certificate in report.live:
        assert certificate.max_staleness == 0 and certificate.log_prob_mismatch_mean < 1e-3


@pytest.mark.nightly  # quick: test_endpoint_desk.py, which versions a step may have
def test_answers_are_given_while_a_step_is_learned_and_count_within_the_bound(fleet, tiny_model):
    """A client that rewards late: with max_staleness its sessions count for a later step."""
    spec = example(tiny_model, steps=4, placement={"mode": "disaggregated"})
    spec["algorithm"]["max_staleness"] = 1
    run = fleet.submit(spec)
    client, late, states = client_of(fleet, run), [], []
    try:
        while not fleet.client.get(run.id).ended:
            late.append(asked(client, "?"))
            if len(late) > SESSIONS:  # it was answered a step ago
                states.append(feedback(client, late.pop(0), 1.0))
    except (APIConnectionError, APIStatusError):
        assert fleet.client.get(run.id).ended
    report = audit(fleet, fleet.succeed(run))
    assert len(report.trained) == 4 * SESSIONS and "taken" in states
    assert max(certificate.max_staleness for certificate in report.live) == 1


def test_a_coordinator_and_a_rollout_that_die_lose_no_session_that_was_taken(fleet, tiny_model):
    run = fleet.submit(example(tiny_model, steps=2))
    client = client_of(fleet, run)
    states = [feedback(client, asked(client, f"{number}"), number) for number in range(SESSIONS - 2)]
    assert set(states) == {"taken"}
    for instance in ("coordinator", "rollout-0"):
        fleet.replaced(instance, fleet.kill(instance))
        client = wait_for(lambda: _answering(fleet, run), f"the run to be served after {instance}")
        feedback(client, asked(client, "+"), 7.0)
    while not fleet.client.get(run.id).ended:
        try:
            feedback(client, asked(client, "-"), 8.0)
        except (APIConnectionError, APIStatusError):
            break
    run = fleet.succeed(run)
    rewards = [talk.reward for talk in fleet.client.trajectories(run.id, limit=100)]
    assert sorted(rewards)[: SESSIONS - 2] == [0.0, 1.0, 2.0, 3.0], rewards
    assert len(audit(fleet, run).trained) == 2 * SESSIONS


@pytest.mark.nightly  # quick: the test above kills the only rollout
def test_sessions_keep_to_their_rollout_and_one_that_dies_loses_its_own_alone(own_fleet, tiny_model):
    """Two rollouts behind one address, which stays as it is while one of them is killed and comes back."""
    with own_fleet("--rollout", "2") as fleet:
        run = fleet.submit(example(tiny_model, steps=2, rollout={"instances": 2}))
        client = wait_for(lambda: _answering(fleet, run), "the run to be served", RUN_S)
        address = str(client.base_url)
        wait_for(lambda: _figures(client)["instances"] == 2, "both rollouts to be served", RUN_S)
        opened = [asked(client, str(number)) for number in range(8)]
        ids = [answer.id.split("-")[1] for answer in opened]
        places = {id[:6] for id in ids}
        assert len(places) == 2, "new sessions begin where sessions are lacking"
        for id in ids:  # Each goes on where it began, by its header, its path and an answer's id.
            header = {"X-Headrace-Session": id}
            again = client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "+"}], extra_headers=header
            )
            assert again.id.split("-")[1] == id
        fleet.kill("rollout-0")
        lost, kept = [], []
        for answer in opened:
            try:
                kept.append(feedback(client, answer, 1.0))
            except NotFoundError as error:
                lost.append(error.body["code"])
                assert answer.id.split("-")[1] in str(error)
        assert {*lost} == {"session_lost"} and {*kept} <= {"taken", "waiting"} and lost and kept
        assert len({id[:6] for id, answer in zip(ids, opened, strict=True)}) == 2

        def ended() -> bool:
            with suppress(APIConnectionError, APIStatusError):
                feedback(client, asked(client, "-"), 8.0)
            return fleet.client.get(run.id).ended

        wait_for(ended, "the run to end", 240)
        run = fleet.succeed(run)
        rewards = [talk.reward for talk in fleet.client.trajectories(run.id, limit=100)]
        assert rewards.count(1.0) == len(kept), "what the other one had was learned from"
        told = [step.figures for step in fleet.client.metrics(run.id)]
        assert sum(figures.get("sessions_lost", 0) for figures in told) >= len(lost), told
        assert sum(figures.get("sessions_taken", 0) for figures in told) >= SESSIONS, told
        assert len(audit(fleet, run).trained) == 2 * SESSIONS and address.startswith(fleet.url)


def _figures(client: OpenAI) -> Any:
    return client.get("/sessions", cast_to=object)


def _answering(fleet: Any, run: Any) -> OpenAI | None:
    try:
        client = client_of(fleet, run)
        figures: Any = client.get("/sessions", cast_to=object)
        return client if figures["answering"] else None
    except (AssertionError, APIConnectionError, APIStatusError):  # the fleet comes up again
        return None
