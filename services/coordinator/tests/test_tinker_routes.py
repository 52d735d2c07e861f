"""What Tinker's client gets for what it asks, where its words and ours differ. The client itself: integration_tests."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from headrace.tinker.v1 import tinker_pb2 as pb
from headrace_coordinator.access.callers import CALLER
from headrace_coordinator.access.table import TABLE
from headrace_coordinator.api.http.errors import add_error_handlers
from headrace_coordinator.api.http.tinker.offers import read_models
from headrace_coordinator.api.http.tinker.routes import tinker_routes
from headrace_coordinator.api.http.tinker.service import LOST_S, Tinker
from headrace_coordinator.domain.access import SUBMIT, Principal
from session_double import Sessions

BASE = "Qwen/Qwen3-4B-Instruct-2507"
MODELS = {BASE: {"model": {"path": "/models/tiny"}, "trainer": {"ranks": 2}}}


class Client:
    """Asks as Tinker's client does."""

    def __init__(self) -> None:
        self.sessions, self.time = Sessions(), 0.0
        here: Any = SimpleNamespace(sessions=self.sessions, reads=self.sessions)
        tinker = Tinker(here, MODELS, now=lambda: self.time)
        app = FastAPI()
        app.include_router(tinker_routes(tinker))
        add_error_handlers(app)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://here/tinker/api/v1/"
        )

    async def post(self, where: str, status: int = 200, **body: Any) -> Any:
        answer = await self.http.post(where, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def forward_backward(self, model: str, seq: int, loss: str = "cross_entropy") -> str:
        tokens = np.array([1, 2], "<i4").tobytes()
        targets = pb.Tensor(dense=np.array([2, 3], "<i8").tobytes(), dtype=pb.DATA_TYPE_INT64, shape=[2])
        chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=tokens))
        datum = pb.Datum(model_input=[chunk], loss_fn_inputs={"target_tokens": targets})
        body = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, data=[datum], loss_fn=loss)
        answer = await self.http.post("forward_backward", content=body.SerializeToString())
        assert answer.status_code == 200, answer.text
        return answer.json()["request_id"]

    async def result(self, request: str) -> Any:
        answer = await self.http.post("retrieve_future", json={"request_id": request})
        assert answer.status_code == 200, answer.text
        protobuf = answer.headers["content-type"] == "application/x-protobuf"
        return answer.content if protobuf else answer.json()

    async def model(self, session: str = "", seq: int = 0, **more: Any) -> str:
        session = session or (await self.post("create_session", tags=[]))["session_id"]
        lora = {"rank": 4, "seed": 3, "train_unembed": True, "train_mlp": True, "train_attn": True}
        asked = {"session_id": session, "model_seq_id": seq, "base_model": BASE, "lora_config": lora}
        made = await self.post("create_model", **(asked | more))
        return (await self.result(made["request_id"]))["model_id"]

    async def done(self, where: str, **body: Any) -> Any:
        return await self.result((await self.post(where, **body))["request_id"])


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    made = Client()
    yield made
    await made.http.aclose()


async def test_a_model_is_a_session_run_whose_adapters_are_those_that_were_asked_for(client):
    model = await client.model()
    session = model.removesuffix(":train:0")
    (run,) = client.sessions.runs.values()
    assert run.id.startswith(f"{session}-0-")
    lora = {"rank": 4, "alpha": 32.0, "targets": "all-linear"}
    about = {"name": f"{session}-0", "workflow": "session", "model": {"path": "/models/tiny"}, "seed": 3}
    assert run.spec == {**about, "trainer": {"ranks": 2, "lora": lora}}
    info = await client.post("get_info", model_id=model)
    assert (info["model_data"], info["lora_rank"]) == ({"model_name": BASE, "tokenizer_id": BASE}, 4)
    assert await client.model(session) == model, "the same number again is the same model"
    attention = await client.model(session, 1, lora_config={"rank": 2, "train_mlp": False})
    every = await client.model(session, 2, lora_config={"rank": 0})
    trainers = [run.spec["trainer"]["lora"] for run in client.sessions.runs.values()][1:]
    assert trainers[0]["targets"] == ["q_proj", "k_proj", "v_proj", "o_proj"] and trainers[1] is None
    assert (await client.post("get_info", model_id=every))["is_lora"] is False
    found = (await client.http.get("training_runs", params={"limit": 2})).json()
    assert [each["training_run_id"] for each in found["training_runs"]] == [every, attention]
    assert found["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}


async def test_a_call_that_is_refused_uses_its_number_up_and_a_retry_gets_the_first_promise(client):
    model = await client.model()
    last = await client.forward_backward(model, 3)
    refused = await client.forward_backward(model, 1, loss="gspo")
    assert (await client.result(refused))["category"] == "user"
    waiting = await client.result(last)
    assert (waiting["type"], waiting["queue_state"]) == ("try_again", "active")
    dimuon = {"type": "dimuon", "learning_rate": 1.0}
    failed = await client.done("optim_step", model_id=model, seq_id=2, optimizer_params=dimuon)
    assert failed["error"].startswith("optimizer_params: ")
    assert await client.forward_backward(model, 3) == last
    found = pb.ForwardBackwardOutput.FromString(await client.result(last))
    assert found.metrics["loss:sum"] == pytest.approx(5 / 8)
    late = {"learning_rate": 2.0}
    failed = await client.done("optim_step", model_id=model, seq_id=4, adam_params=late)
    assert failed == {"error": "learning_rate: more than 1", "category": "user"}
    step = await client.done("optim_step", model_id=model, seq_id=5, adam_params={"learning_rate": 0.1})
    assert step == {"metrics": {"grad_norm": 0.5}}


async def test_checkpoints_of_both_kinds_may_have_one_name_and_are_listed_loaded_and_deleted(client):
    model = await client.model()
    about = {"model_id": model, "ttl_seconds": 3600}
    state = await client.done("save_weights", seq_id=1, path="final", **about)
    sampler = await client.done("save_weights_for_sampler", seq_id=2, path="final", **about)
    assert state["path"] == f"tinker://{model}/weights/final"
    assert sampler["path"] == f"tinker://{model}/sampler_weights/final"
    again = await client.done("save_weights", seq_id=3, path="final", **about)
    assert again["category"] == "user" and "weights.final" in again["error"]
    assert "path" in await client.done("save_weights", seq_id=4, path="final", overwrite=True, **about)
    wrong = await client.done("save_weights", seq_id=5, path="no such/name", **about)
    assert wrong["category"] == "user" and "name" in wrong["error"]
    listed = (await client.http.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
    kinds = [(each["checkpoint_type"], each["tinker_path"]) for each in listed]
    assert kinds == [("training", state["path"]), ("sampler", sampler["path"])]

    session = (await client.post("create_session"))["session_id"]
    asked = {"session_id": session, "model_seq_id": 0, "path": state["path"], "optimizer": True}
    loaded = await client.done("load_weights", **asked)
    assert loaded["model_id"] == f"{session}:train:0"
    (source, run) = client.sessions.runs.values()
    assert run.calls[1].checkpoint == f"{source.id}/weights.final" and run.calls[1].optimizer
    assert run.spec == source.spec | {"name": f"{session}-0-loaded"}
    first = await client.forward_backward(loaded["model_id"], 1)
    assert pb.ForwardBackwardOutput.FromString(await client.result(first)).metrics

    deleted = await client.http.delete(f"training_runs/{model}/checkpoints/weights/final")
    assert deleted.status_code == 200
    assert list(source.saved) == ["sampler_weights.final"]
    await client.post("create_sampling_session", 404, **_sampler(session, model_path=state["path"]))
    await client.post("weights_info", 422, tinker_path="tinker://elsewhere")


def _sampler(session: str, **more: Any) -> dict[str, Any]:
    return {"session_id": session, "sampling_session_seq_id": 0, **more}


async def _sample(client: Client, sampler: str, status: int = 200, seq: int = 0, **more: Any) -> Any:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [4, 5]}]}
    params = {"max_tokens": 2, "temperature": 0.5, "top_k": -1, "top_p": 1}
    asked = {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "sampling_params": params}
    return await client.post("asample", status, **(asked | more))


async def test_a_sampler_is_of_weights_that_were_published_saved_or_the_model_itself(client):
    model = await client.model()
    session, run = model.partition(":")[0], next(iter(client.sessions.runs))
    await client.done("optim_step", model_id=model, seq_id=1, adam_params={})
    snapshot = {"model_id": model, "sampling_session_seq_id": 0}
    published = await client.done("save_weights_for_sampler", seq_id=2, **snapshot)
    inflight = await client.done("save_weights_for_sampler", seq_id=3, kind="inflight", **snapshot)
    saved = await client.done("save_weights_for_sampler", seq_id=4, model_id=model, path="one")
    of_path = await client.post("create_sampling_session", **_sampler(session, model_path=saved["path"]))
    of_base = await client.post("create_sampling_session", **_sampler(session, base_model=BASE))
    made = [each["sampling_session_id"] for each in (published, inflight, of_path, of_base)]
    for seq, sampler in enumerate(made):
        await _sample(client, sampler, seq=seq)
    asked = [(where, request.weights) for where, request in client.sessions.asked.values()]
    assert asked == [(run, "1"), (run, "latest"), (run, "sampler_weights.one"), (run, "base")]
    about = (await client.http.get(f"samplers/{made[2]}")).json()
    assert (about["base_model"], about["model_path"]) == (BASE, saved["path"])

    await client.post(f"sessions/{session}/finish")
    other = (await client.post("create_session"))["session_id"]
    sampler = await client.post("create_sampling_session", **_sampler(other, model_path=saved["path"]))
    await _sample(client, sampler["sampling_session_id"])
    where, request = list(client.sessions.asked.values())[-1]
    assert where.startswith(f"{other}-s") and request.weights == f"{run}/sampler_weights.one"
    assert client.sessions.runs[where].spec["trainer"]["lora"]["rank"] == 4


async def test_samples_are_asked_for_as_the_client_means_it_and_have_ids(client):
    session = (await client.post("create_session"))["session_id"]
    made = await client.post("create_sampling_session", **_sampler(session, base_model=BASE))
    sampler = made["sampling_session_id"]
    promise = await _sample(client, sampler, num_samples=2)
    assert len(set(promise["sample_sequence_ids"])) == 2
    found = pb.SampleResponse.FromString(await client.result(promise["request_id"]))
    assert [np.frombuffer(each.tokens, "<i4").tolist() for each in found.sequences] == [[5, 6]] * 2
    assert await _sample(client, sampler, num_samples=2) == promise, "a retry"
    stops = [(None, [], None), ("x", ["x"], None), (["x"], ["x"], None), ([7], [], [7]), ([], [], [])]
    for seq, (stop, _, _) in enumerate(stops, 1):
        await _sample(client, sampler, seq=seq, sampling_params={"stop": stop, "seed": 9})
    requests = [request for _, request in client.sessions.asked.values()][1:]
    assert [(None, each.stop, each.stop_ids) for each in requests] == [(None, *each[1:]) for each in stops]
    assert {(each.max_tokens, each.seed, each.top_k) for each in requests} == {(30, 9, 0)}
    refused = await _sample(client, sampler, 422, topk_sample_logprobs=2)
    assert refused["problems"][0]["key"] == "topk_sample_logprobs"
    image = {"chunks": [{"type": "image", "data": "", "format": "png"}]}
    assert "images and sound" in (await _sample(client, sampler, 422, prompt=image))["message"]
    await _sample(client, sampler, 422, sampling_params={"top_p": 2})
    client.sessions.full = True
    await _sample(client, sampler, 429, seq=9)


async def test_lost_samples_are_asked_for_anew_and_lost_calls_are_an_error(client):
    model = await client.model()
    sampler = {"session_id": model.partition(":")[0], "sampling_session_seq_id": 0, "base_model": BASE}
    made = await client.post("create_sampling_session", **sampler)
    promise = await _sample(client, made["sampling_session_id"])
    client.sessions.asked.clear()
    await client.post("retrieve_future", 410, request_id=promise["request_id"])
    await client.post("retrieve_future", 404, request_id="nonsense")
    wrong = base64.urlsafe_b64encode(b'["optim_step"]').decode()
    await client.post("retrieve_future", 404, request_id=wrong)
    await client.post("get_info", 404, model_id="elsewhere")
    await client.post("get_info", 404, model_id="tk-000000000000:train:0")
    missing = await client.post("copy_weights", 404)
    assert "docs/tinker.md" in missing["message"]


async def test_the_session_of_a_silent_client_is_closed_and_its_heartbeats_end(client):
    model = await client.model()
    session, (run,) = model.partition(":")[0], client.sessions.runs.values()
    client.time = LOST_S
    await client.post("session_heartbeat", session_id=session)
    client.time = 1.5 * LOST_S
    other = (await client.post("create_session"))["session_id"]
    assert run.state == "RUNNING"
    client.time = 2.1 * LOST_S
    await client.post("session_heartbeat", session_id=other)
    assert run.state == "SUCCEEDED"
    await client.post("session_heartbeat", 410, session_id=session)
    await client.post("session_heartbeat", 410, session_id="other")


def test_every_route_has_the_row_that_its_method_asks_for():
    rows = {(route.path.rpartition("/")[2], route.name) for route in tinker_routes(Tinker(None, {})).routes}
    assert {name for _, name in rows} <= TABLE.keys()
    reading = {path for path, name in rows if TABLE[name].scope != SUBMIT}
    assert reading & {"asample", "forward_backward", "optim_step", "create_model", "finish"} == set()


async def test_a_model_is_called_by_its_owner_alone(client):
    model = await client.model()
    session = model.partition(":")[0]
    before = CALLER.set(Principal("eve", scopes=frozenset({"read", "submit"})))
    try:
        await client.post("get_info", model_id=model)  # The double shows every run to everybody.
        refused = await client.post("save_weights", 403, model_id=model, seq_id=1)
        assert "for its owner" in refused["message"]
        await client.post("session_heartbeat", 410, session_id=session)
        await client.post(f"sessions/{session}/finish")
        gone = await client.http.delete(f"training_runs/{model}/checkpoints/weights/none")
        assert gone.status_code == 404
    finally:
        CALLER.reset(before)
    (run,) = client.sessions.runs.values()
    assert run.state == "RUNNING" and not run.calls
    await client.post("session_heartbeat", session_id=session)


def test_a_file_of_models_is_read_and_its_mistakes_are_named(tmp_path):
    file = tmp_path / "models.yaml"
    assert read_models(None) == {}
    file.write_text("Qwen/Qwen3-8B: {model: {path: /models/q}, rollout: {engine: vllm}}\n")
    assert read_models(file)["Qwen/Qwen3-8B"]["rollout"] == {"engine": "vllm"}
    wrong = {
        "a: {model: {}}": "a has no model.path",
        "[]": "names no models",
        "a: {model: {path: b}, name: c}": "a.name is set by the fleet",
        "a: [": "cannot be read",
    }
    for text, words in wrong.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=words):
            read_models(file)
    with pytest.raises(ValueError, match="cannot be read"):
        read_models(tmp_path / "missing")
