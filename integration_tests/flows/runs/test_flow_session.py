"""Session runs on a real fleet: a loop learns, samples, saves and loads; a killed trainer loses nothing."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
import torch
from harness.fleet import Fleet
from harness.ledger import audit
from harness.processes import ROOT
from harness.waiting import wait_for
from headrace.client import Datum, HeadraceError, Training
from headrace.sessions.v1 import sessions_pb2
from headrace.sessions.v1.sessions_pb2_grpc import SessionServiceStub
from transformers import AutoModelForCausalLM

ROWS = [[5, 9, 12, 7, 20, 4], [8, 8, 3, 30, 11, 6, 9]]
RATE = 1e-2


def data(rows=ROWS):
    return [Datum(tokens=row[:-1], targets=row[1:]) for row in rows]


@pytest.fixture
def session(fleet, tiny_model):
    """Opens sessions on the tiny model; they are cancelled at the end."""
    opened = []

    def open_session(**more):
        spec = {"model": {"path": str(tiny_model), "dtype": "float32"}, "export": False, **more}
        made = Training(fleet.client, spec)
        opened.append(made)
        return made

    yield open_session
    for made in opened:
        fleet.end(made.session)


def plain_losses(model_path, steps):
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        terms = []
        for row in ROWS:
            found = model(torch.tensor([row[:-1]])).logits[0].log_softmax(-1)
            terms.append(-found.gather(-1, torch.tensor(row[1:])[:, None]).sum())
        loss = sum(terms)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_loop_of_ones_own_learns_what_plain_torch_learns_and_samples_it(fleet, session, tiny_model):
    training = session()
    calls = [(training.forward_backward(data()), training.optim_step(RATE)) for _ in range(4)]
    losses = [gradient.result(120).metrics["loss:sum"] for gradient, _ in calls]
    assert losses == pytest.approx(plain_losses(tiny_model, 4), rel=1e-3)
    steps = [step.result() for _, step in calls]
    assert [step.step for step in steps] == [1, 2, 3, 4]
    published = training.publish().result(60)
    assert published.version == steps[-1].version
    prompt = ROWS[0][:4]
    asked = {"samples": 3, "max_tokens": 5, "seed": 7, "prompt_log_probs": True, "top_prompt_log_probs": 2}
    found = training.sample(prompt, **asked).result(120)
    assert found.version == published.version and len(found.sequences) == 3
    again = training.sample(prompt, **asked).result(120)
    assert again.sequences == found.sequences
    told = training.forward([{"tokens": prompt[:-1], "targets": prompt[1:]}]).result(60).log_probs[0]
    assert found.prompt_log_probs[0] is None and found.prompt_log_probs[1:] == pytest.approx(told, abs=1e-3)
    assert [len(each) for each in found.top_prompt_log_probs[1:]] == [2, 2, 2]
    sampled = found.sequences[0]
    whole = [*prompt, *sampled.tokens]
    read = training.forward([{"tokens": whole[:-1], "targets": whole[1:]}]).result(60).log_probs[0]
    assert sampled.log_probs == pytest.approx(read[-len(sampled.tokens) :], abs=1e-3)
    training.close()
    run = fleet.client.wait(training.session, timeout=120)
    assert run.state == "SUCCEEDED"
    assert len(audit(fleet, run).trained) == 4


@pytest.mark.nightly  # The quick twin is test_spec_rules.py -k several_ranks.
def test_two_ranks_of_a_session_learn_what_plain_torch_learns(tmp_path, tiny_model):
    spec = {"model": {"path": str(tiny_model), "dtype": "float32"}, "trainer": {"ranks": 2}, "export": False}
    with Fleet(tmp_path / "data", "--trainer", "2") as fleet:
        training = Training(fleet.client, spec)
        calls = [(training.forward_backward(data()), training.optim_step(RATE)) for _ in range(4)]
        losses = [gradient.result(120).metrics["loss:sum"] for gradient, _ in calls]
        assert losses == pytest.approx(plain_losses(tiny_model, 4), rel=1e-3)
        alone = training.forward_backward([data()[0]]).result(120)
        assert alone.log_probs and training.optim_step(RATE).result(120).metrics["grad_norm"] > 0
        training.close()
        run = fleet.client.wait(training.session, timeout=120)
        assert run.state == "SUCCEEDED" and len(audit(fleet, run).trained) == 5


def post(training, seq, call):
    return training._http.post(f"/v1/sessions/{training.session}/calls", {"seq": seq, "call": call})["future"]


def result(training, future, wait_s=60.0):
    path = f"/v1/sessions/{training.session}/results"
    return training._http.get(path, future=future, wait_s=min(wait_s, 25.0))["results"][future]


def gradient_call():
    return {"kind": "forward_backward", "data": [each.model_dump() for each in data()]}


def over_http(fleet):
    routes = {
        "OpenSession": ("POST", ""),
        "GetSession": ("GET", "/{session}"),
        "CallSession": ("POST", "/{session}/calls"),
        "SampleSession": ("POST", "/{session}/samples"),
        "GetResults": ("GET", "/{session}/results"),
        "CloseSession": ("POST", "/{session}:close"),
    }

    def ask(rpc, session="", body=None, **query):
        method, path = routes[rpc]
        url = f"{fleet.url}/v1/sessions{path.format(session=session)}"
        answer = httpx.request(method, url, json=body, params=query, headers=fleet.headers, timeout=60)
        assert answer.is_success, answer.text
        return answer.json()

    return ask


def over_grpc(fleet):
    channel = grpc.insecure_channel(fleet.sessions_grpc)

    def ask(rpc, body=None, **fields):
        stub, request = SessionServiceStub(channel), getattr(sessions_pb2, f"{rpc}Request")
        given = {"body": json.dumps(body)} if body else {}
        metadata = [("authorization", fleet.headers["Authorization"])]
        return json.loads(getattr(stub, rpc)(request(**given, **fields), metadata=metadata, timeout=60).body)

    return ask


@pytest.mark.parametrize("speaking", [over_http, over_grpc])
def test_the_same_session_over_http_and_over_grpc(fleet, tiny_model, speaking):
    ask = speaking(fleet)
    model = {"path": str(tiny_model), "dtype": "float32"}
    session = ask("OpenSession", body={"workflow": "session", "model": model, "export": False})["id"]
    calls = [
        gradient_call(),
        {"kind": "optim_step", "learning_rate": RATE},
        {"kind": "publish"},
        gradient_call(),
    ]
    futures = [
        ask("CallSession", session=session, body={"seq": seq, "call": call})["future"]
        for seq, call in enumerate(calls, 1)
    ]

    def results(futures):
        found = ask("GetResults", session=session, future=futures, wait_s=20.0)["results"]
        return found if len(found) == len(futures) and found[futures[0]]["kind"] != "pending" else None

    found = wait_for(lambda: results(futures[::-1]), "results")  # the last one is waited for
    before, step, published, after = (found[future] for future in futures)
    assert step["version"] == published["version"] == ask("GetSession", session=session)["published"]
    assert before["metrics"]["loss:sum"] == pytest.approx(plain_losses(tiny_model, 2)[0], rel=1e-3)
    assert after["metrics"]["loss:sum"] == pytest.approx(plain_losses(tiny_model, 2)[1], rel=1e-3)
    asked = {"samples": [{"prompt": ROWS[0][:3], "max_tokens": 4, "seed": 5}]}
    (future,) = ask("SampleSession", session=session, body=asked)["futures"]
    sampled = wait_for(lambda: results([future]), "samples")[future]
    assert sampled["version"] == published["version"]
    ask("CloseSession", session=session)
    assert fleet.client.wait(session, timeout=120).state == "SUCCEEDED"
    SAMPLED.setdefault("first", sampled["sequences"])
    assert sampled["sequences"] == SAMPLED["first"], "one seed, the same weights: by any wire"


SAMPLED = {}


def test_what_the_page_shows_of_grpc_works(fleet, tiny_model, capsys):
    page = (ROOT / "docs" / "own-loop.md").read_text().partition("## Over gRPC")[2]
    code = page.partition("```python\n")[2].partition("```")[0]
    for shown, here in (
        ("127.0.0.1:8472", fleet.sessions_grpc),
        (".headrace/models/tiny", str(tiny_model)),
        (".headrace/http-token", str(fleet.data_dir / "http-token")),
    ):
        assert shown in code
        code = code.replace(shown, here)
    names = {}
    exec(compile(code, "own-loop.md", "exec"), names)
    assert float(capsys.readouterr().out) > 1
    fleet.end(names["session"])


@pytest.mark.nightly  # quick: the first test; here a trainer dies between the gradients of a step
def test_a_killed_trainer_is_not_noticed_but_in_time(fleet, session):
    whole, broken = session(), session(checkpoint={"interval_steps": 2})
    found = []
    for training in (whole, broken):
        for step in range(5):
            training.forward_backward(data()[:1]).result(240)
            if training is broken and step == 3:
                fleet.kill("trainer-0")
            training.forward_backward(data()[1:])
            training.optim_step(RATE).result(240)
        found.append(training.forward(data()).result(240).log_probs)
        training.close()
        assert fleet.client.wait(training.session, timeout=240).state == "SUCCEEDED"
    assert found[0] == [pytest.approx(own, abs=1e-4) for own in found[1]]
    run = fleet.client.get(broken.session)
    assert run.recoveries and len(audit(fleet, run).trained) == 10


@pytest.mark.nightly  # quick: test_sessions_journal
def test_a_restarted_coordinator_knows_calls_and_results(own_fleet, tiny_model):
    with own_fleet() as fleet:
        spec = {"model": {"path": str(tiny_model), "dtype": "float32"}, "export": False}
        training = Training(fleet.client, spec)
        first = training.forward_backward(data()).result(240)
        fleet.kill("coordinator")
        training.optim_step(RATE).result(240)
        assert result(training, "call:1")["log_probs"] == first.log_probs
        assert training.info().step == 1
        training.close()
        assert fleet.client.wait(training.session, timeout=240).state == "SUCCEEDED"


def test_adapters_learn_beside_all_weights_saved_loaded_and_async(fleet, session):
    training = session(trainer={"lora": {"rank": 4, "alpha": 8}})
    assert training.info().lora_rank == 4

    async def loop():
        first = await training.forward_backward(data())
        await training.optim_step(RATE)
        saved = await training.save("one")
        for _ in range(3):
            training.forward_backward(data())
            last = training.optim_step(RATE)
        await last
        later = await training.forward(data())
        stepped = []
        for optimizer in (True, False):
            await training.load("one", optimizer=optimizer)
            again = await training.forward(data())
            training.forward_backward(data())
            training.optim_step(RATE)
            stepped.append((await training.forward(data())).metrics["loss:sum"])
        return first, saved, later, again, stepped

    first, saved, later, again, stepped = asyncio.run(loop())
    assert abs(stepped[0] - stepped[1]) > 1e-4, "the second step begins without moments"
    losses = [each.metrics["loss:sum"] for each in (first, again, later)]
    assert losses[0] > losses[1] > losses[2]
    assert [each.checkpoint for each in training.checkpoints()] == [saved.checkpoint]
    prompt = ROWS[0][:3]
    of_base = training.sample(prompt, weights="base", temperature=0, max_tokens=2, prompt_log_probs=True)
    of_saved = training.sample(prompt, weights="one", temperature=0, max_tokens=2, prompt_log_probs=True)
    base, own = of_base.result(240), of_saved.result(240)
    assert base.version == 0 and base.prompt_log_probs[1:] == pytest.approx(first.log_probs[0][:2], abs=1e-3)
    assert own.prompt_log_probs[1:] == pytest.approx(again.log_probs[0][:2], abs=1e-3)
    training.delete("one")
    assert training.checkpoints() == []
    with pytest.raises(HeadraceError, match="has no checkpoint 'one'"):
        training.load("one").result(120)


def learned(training):
    """What three steps and greedy samples of a session give."""
    losses = []
    for _ in range(3):
        gradient = training.forward_backward(data())
        training.optim_step(RATE)
        losses.append(gradient.result(240).metrics["loss:sum"])
    training.publish().result(240)
    found = training.sample(ROWS[0][:4], temperature=0, max_tokens=5, prompt_log_probs=True).result(240)
    return losses, found.sequences[0].tokens, found.prompt_log_probs[1:]


def mapping(fleet, base):
    """Which instances have mapped the file of a base."""
    inode, kinds = str(base.stat().st_ino), ("trainer-0", "trainer-1", "rollout-0", "rollout-1")

    def has(name):
        lines = Path(f"/proc/{fleet.pid_of(name)}/maps").read_text().splitlines()
        return any(line.split()[4] == inode for line in lines)

    return {name for name in kinds if has(name)}


@pytest.mark.nightly  # quick: test_trainer_shared_base
@pytest.mark.timeout(900)
def test_two_sessions_of_adapters_share_one_base_and_learn_as_each_alone(own_fleet, tiny_model):
    model, beside = {"path": str(tiny_model), "dtype": "float32"}, {"enable_lora": True}
    with own_fleet("--trainer", "2", "--rollout", "2", "--reward", "0") as fleet:

        def opened(seed):
            lora = {"lora": {"rank": 4, "alpha": 8}}
            spec = {"model": model, "trainer": lora, "rollout": beside, "seed": seed, "export": False}
            return Training(fleet.client, spec)

        alone = []
        for seed in (1, 2):
            training = opened(seed)
            alone.append(learned(training))
            training.close()
            fleet.succeed(training.session)
        assert alone[0] != alone[1]
        words = fleet.process("trainer-0").cmdline()
        root = Path(words[words.index("--shm-dir") + 1])
        assert not list(root.glob("base-*")), "the last session took it along"
        both = [opened(seed) for seed in (1, 2)]
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(learned, both))
        for own, same in zip(alone, together, strict=True):
            assert same[0] == pytest.approx(own[0], rel=1e-6) and same[1] == own[1]
            assert same[2] == pytest.approx(own[2], rel=1e-6)
        [base] = root.glob("base-*/base.weights")
        assert mapping(fleet, base) == {"trainer-0", "trainer-1", "rollout-0", "rollout-1"}
        before = [training.forward(data()).result(240).log_probs for training in both]
        fleet.replaced("trainer-0", fleet.kill("trainer-0"))
        again = [training.forward(data()).result(240).log_probs for training in both]
        assert [pytest.approx(own, abs=1e-4) for own in before[0]] == again[0]
        assert list(root.glob("base-*/base.weights")) == [base], "its successor shares the same one"
        assert "trainer-0" in mapping(fleet, base)
        for training in both:
            training.close()
            fleet.succeed(training.session)
        wait_for(lambda: not list(root.glob("base-*")), "the base to go")


def test_calls_come_in_any_order_and_once_beside_samples(fleet, session):
    training = session(placement={"mode": "disaggregated"})
    sampled = training.sample(ROWS[0][:3], samples=2, max_tokens=3)
    third = post(training, 3, {"kind": "optim_step", "learning_rate": RATE})
    assert result(training, third, 0.0) == {"kind": "pending", "waits_for": "predecessor"}
    second = post(training, 2, gradient_call())
    first = post(training, 1, gradient_call())
    assert post(training, 1, {"kind": "publish"}) == first
    found = [
        wait_for(lambda each=each: settled(training, each), "a result") for each in (first, second, third)
    ]
    assert [each["kind"] for each in found] == ["forward_backward", "forward_backward", "optim_step"]
    assert found[0]["log_probs"] == found[1]["log_probs"]
    assert training.info().next_seq == 4
    assert sampled.result(240).version < found[2]["version"] and len(sampled.result().sequences) == 2


def settled(training, future):
    found = result(training, future)
    return found if found["kind"] != "pending" else None


def test_an_idle_session_gives_its_devices_back_and_a_call_resumes_it(fleet, session):
    training = session(session={"idle_s": 0.5})
    before = training.forward_backward(data()).result(240)
    fleet.state(fleet.client.get(training.session), "PAUSED")
    assert "idle for 0.5 s (session.idle_s)" in fleet.client.get(training.session).reason
    step = training.optim_step(RATE).result(240)  # The gradient from before the pause is in it.
    assert step.metrics["grad_norm"] > 0
    assert training.forward(data()).result(240).metrics["loss:sum"] < before.metrics["loss:sum"]


def test_what_cannot_be_done_is_told_with_its_key_and_the_session_goes_on(fleet, session):
    training = session()
    wrong = {
        "optim_step: no gradient": training.optim_step(RATE),
        r"data\[0\]: the id 9999 is none of the model's": training.forward(
            [Datum(tokens=[1], targets=[9999])]
        ),
        "checkpoint: session .* has no checkpoint 'nothing'": training.load("nothing"),
        r"data: the importance_sampling of call \d+ is not finite": training.forward_backward(
            [Datum(tokens=[5], targets=[9], advantages=[1.0], log_probs=[-1e4])], "importance_sampling"
        ),
        r"data\[0\].targets: 1 targets of 2 tokens": training.forward([Datum(tokens=[1, 2], targets=[2])]),
    }
    for message, call in wrong.items():
        with pytest.raises(HeadraceError, match=message):
            call.result(240)
    with pytest.raises(HeadraceError, match="weights: version 4711 is not published"):
        training.sample([5], weights="4711").result(240)


def test_a_spec_that_is_no_session_is_refused_by_key(fleet, tiny_model):
    spec = {"model": {"path": str(tiny_model)}, "data": {"heldout": 8}, "evaluation": {"every": 2}}
    with pytest.raises(HeadraceError) as caught:
        Training(fleet.client, spec)
    assert {each.key for each in caught.value.problems} == {"data.heldout", "evaluation.every"}
