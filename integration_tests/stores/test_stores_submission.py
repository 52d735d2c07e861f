"""What a submission says of addresses in a spec, asked of a real S3 server; data that come from there."""

from __future__ import annotations

import json

import pytest
from harness.object_store import always
from harness.specs import small_spec
from headrace_coordinator.api.submission.stores import check_stores, remote_origin
from headrace_coordinator.data.dataset import open_dataset
from headrace_schema.model_size import model_config
from headrace_schema.problems import Impossible
from headrace_schema.spec import RunSpec
from headrace_servicekit.stores.checkpoints import RemoteRun
from headrace_servicekit.stores.files import Store
from pydantic import ValidationError

CONFIG = {"model_type": "qwen3", "hidden_size": 8}


def spec(model="tiny/model", **more):
    return RunSpec.model_validate(small_spec(model) | {"model": {"path": str(model)}} | more)


@pytest.fixture
def model(bucket, proxy):
    """Address of a model in the bucket."""
    store = Store(f"{bucket}/models/tiny")
    store.write("config.json", json.dumps(CONFIG).encode())
    store.write("model.safetensors", b"1")
    return store.url


async def test_a_model_and_a_store_that_are_there_are_taken(proxy, bucket, model):
    wanted = spec(model, store={"url": f"{bucket}/runs"})
    assert await check_stores(wanted) == []
    assert model_config(wanted.model) == CONFIG
    # Nothing of the probe is left.
    assert [*Store(f"{bucket}/runs").listing()] == []


async def test_each_address_that_cannot_be_used_is_named_with_its_key_and_a_fix(proxy, bucket, model):
    Store(f"{bucket}/other").write("weights.txt", b"1")
    wanted = spec(
        f"{bucket}/other",
        store={"url": "s3://no-such-bucket/runs"},
        trainer={"reference": {"path": f"{bucket}/nothing"}},
        algorithm={"options": {"kl_loss_coef": 0.01}},
    )
    found = {each.key: f"{each.problem}; {each.fix}" for each in await check_stores(wanted)}
    assert "it has no config.json; name a folder in Hugging Face format" in found.pop("model.path")
    assert "there is nothing of that name; check the path" in found.pop("trainer.reference.path")
    assert "there is no such bucket; create the bucket" in found.pop("store.url")
    assert found == {}


async def test_paths_of_environments_are_looked_at_and_need_be_no_models(proxy, bucket):
    Store(f"{bucket}/tasks").write("one/task.toml", b"1")
    environment = {"backend": "coding", "tasks": ["coding"], "options": {"path": f"{bucket}/tasks"}}
    warmup = {"warmup": {"steps": 0}}
    more = {"workflow": "agentic", "environment": environment, "trainer": warmup}
    assert await check_stores(spec("tiny", **more)) == []
    environment["options"]["path"] = f"{bucket}/none"
    [found] = await check_stores(spec("tiny", **more))
    assert found.key == "environment.options.path" and "there is nothing of that name" in found.problem


async def test_credentials_that_expired_are_told_at_submission(proxy, bucket, model):
    proxy.fault = always("ExpiredToken")
    found = {each.key: f"{each.problem}; {each.fix}" for each in await check_stores(spec(model))}
    assert "the credentials have expired; renew them" in found["model.path"]


@pytest.mark.parametrize(
    "url", ["s3://key:secret@bucket/runs", "s3://bucket/runs?sig=secret", "ftp://x/y", "s3://"]
)
def test_an_address_with_credentials_or_none_at_all_is_no_valid_spec(url):
    with pytest.raises(ValidationError, match=r"store\.url") as told:
        spec(store={"url": url})
    assert told.value.error_count() == 1


def test_copies_of_checkpoints_that_are_not_made_are_refused():
    with pytest.raises(ValidationError, match=r"store\.keep names checkpoints, and there are none"):
        spec(store={"url": "s3://bucket/runs"}, checkpoint={"enabled": False})
    spec(store={"url": "s3://bucket/runs", "keep": ["export"]}, checkpoint={"enabled": False})


async def test_data_are_fetched_and_opened(proxy, bucket, tiny_model):
    rows = [json.dumps({"question": f"q{n}", "answer": str(n)}) for n in range(20)]
    Store(f"{bucket}/data").write("train.jsonl", "\n".join(rows).encode())
    data = {"source": "jsonl", "options": {"path": f"{bucket}/data/train.jsonl"}, "heldout": 4}
    keys = {"question": "question", "answer": "answer"}
    data["options"] |= keys
    dataset = await open_dataset(spec(tiny_model, data=data))
    assert dataset.train_size == 16
    data["options"]["path"] = f"{bucket}/data/other.jsonl"
    with pytest.raises(Impossible) as told:
        await open_dataset(spec(tiny_model, data=data))
    [problem] = told.value.problems
    assert problem.key == "data.options.path" and "there is nothing of that name" in problem.problem


async def test_a_run_in_a_store_is_the_origin_of_a_fork(proxy, bucket, tmp_path):
    run = RemoteRun(f"{bucket}/runs/run-1")
    folder = tmp_path / "lineage-1" / "step-4"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    with pytest.raises(Impossible, match="holds no whole checkpoint"):
        await remote_origin(run.url, "from_checkpoint.run")
    run.describe({"run": "run-1", "spec": {"algorithm": {"group_size": 4}}})
    run.upload(tmp_path, "lineage-1/step-4", {"run": "run-1", "number": 5, "step": 4})
    origin = await remote_origin(run.url, "from_checkpoint.run")
    assert origin.steps == [4] and origin.run.id == "run-1"
    assert origin.run.spec["algorithm"] == {"group_size": 4}
