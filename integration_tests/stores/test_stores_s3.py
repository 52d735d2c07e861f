"""Checkpoints and models in a real S3 server, with faults between: what is listed is whole, and nothing else is."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
import s3fs
from harness.object_store import always, once
from harness.processes import clean_environment
from headrace_schema.openings import RolloutConfig
from headrace_schema.stores import described
from headrace_servicekit.stores import files
from headrace_servicekit.stores.checkpoints import MANIFEST, RemoteRun, probe
from headrace_servicekit.stores.files import addressed, local, localized, look
from headrace_servicekit.stores.problems import StoreProblem

FACTS = {"run": "run-1", "number": 1}


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of 6 MiB, so that a file of 14 MiB has several."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 3 * 2**20)


def checkpoint(root, name, *, base="", size=2000):
    """A folder as the trainer leaves it, of bytes that differ."""
    lineage, _, step = name.partition("/")
    folder = root / name
    folder.mkdir(parents=True)
    for file in ("weights.safetensors", "optimizer.safetensors", "ledger.json", "state.json"):
        (folder / file).write_bytes(f"{name} {file} ".encode() * (size // 20))
    (root / f"{lineage}.json").write_text(json.dumps({"base_checkpoint": base, "base_run": ""}))
    (root / "model.json").write_text("{}")
    return {**FACTS, "step": int(step.removeprefix("step-"))}


def same(one, other):
    """Whether two folders hold the same files."""
    files_of = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in (one, other)]
    return files_of[0] == files_of[1]


def test_a_checkpoint_comes_back_byte_for_byte_on_an_empty_disk(proxy, bucket, tmp_path):
    root, run = tmp_path / "one", RemoteRun(f"{bucket}/f/run-1")
    facts = checkpoint(root, "lineage-1/step-4")
    run.upload(root, "lineage-1/step-4", facts)
    found, damaged = RemoteRun(f"{bucket}/f/run-1").fetch_newest(tmp_path / "two")
    assert found is not None and (found.name, found.step, damaged) == ("lineage-1/step-4", 4, [])
    assert same(root / found.name, tmp_path / "two" / found.name)
    assert (tmp_path / "two" / "lineage-1.json").read_bytes() == (root / "lineage-1.json").read_bytes()
    assert (tmp_path / "two" / "model.json").is_file()


def test_what_is_whole_already_is_not_uploaded_again(proxy, bucket, tmp_path):
    run, facts = RemoteRun(f"{bucket}/run-1"), checkpoint(tmp_path, "lineage-1/step-1")
    run.upload(tmp_path, "lineage-1/step-1", facts)
    before = [each for each in proxy.seen if each[0] == "PUT"]
    run.upload(tmp_path, "lineage-1/step-1", facts)
    assert [each for each in proxy.seen if each[0] == "PUT"] == before


def nightly(*values):
    """Parameters for which one that is quick stands."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


@pytest.mark.parametrize("fault", ["reset", *nightly("SlowDown", "InternalError")])
def test_a_part_that_fails_is_sent_again(proxy, bucket, tmp_path, small_parts, fault):
    facts = checkpoint(tmp_path / "one", "lineage-1/step-1")
    large = tmp_path / "one" / "lineage-1" / "step-1" / "weights.safetensors"
    large.write_bytes(bytes(range(256)) * 56 * 1024)
    proxy.fault = once(fault, "PUT", "partNumber=2")
    RemoteRun(f"{bucket}/run-1").upload(tmp_path / "one", "lineage-1/step-1", facts)
    assert proxy.broken == [fault] and sum("partNumber" in path for _, path in proxy.seen) >= 4
    proxy.fault = once("cut", "GET", "weights.safetensors")
    RemoteRun(f"{bucket}/run-1").fetch_newest(tmp_path / "two")
    assert (tmp_path / "two/lineage-1/step-1/weights.safetensors").read_bytes() == large.read_bytes()


def test_a_file_that_reads_otherwise_is_not_listed(proxy, bucket, tmp_path):
    run, facts = RemoteRun(f"{bucket}/run-1"), checkpoint(tmp_path, "lineage-1/step-1")
    proxy.fault = once("flip", "GET", "optimizer.safetensors")
    with pytest.raises(StoreProblem, match="reads otherwise than it was written"):
        run.upload(tmp_path, "lineage-1/step-1", facts)
    assert proxy.broken == ["flip"] and run.whole() == []
    run.upload(tmp_path, "lineage-1/step-1", facts)
    assert len(run.whole()) == 1


@pytest.mark.parametrize("point", ["stores.before_manifest=kill", *nightly("stores.upload=kill@3")])
def test_a_kill_in_mid_upload_leaves_nothing_that_looks_whole(proxy, bucket, tmp_path, point):
    first, second = (checkpoint(tmp_path, f"lineage-1/step-{step}") for step in (1, 2))
    run = RemoteRun(f"{bucket}/run-1")
    run.upload(tmp_path, "lineage-1/step-1", first)
    program = (
        "import json,pathlib,sys; from headrace_servicekit.stores.checkpoints import RemoteRun;"
        "RemoteRun(sys.argv[1]).upload(pathlib.Path(sys.argv[2]), 'lineage-1/step-2', json.loads(sys.argv[3]))"
    )
    command = [sys.executable, "-c", program, run.url, str(tmp_path), json.dumps(second)]
    killed = subprocess.run(command, env=clean_environment(HEADRACE_FAILPOINTS=point), timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert any("step-2" in name for name in run._store.listing("checkpoints"))
    assert [each.step for each in run.live()] == [1]
    assert run.fetch_newest(tmp_path / "two")[0].step == 1
    run.prune(2, [])
    assert not any("step-2" in name for name in run._store.listing("checkpoints"))


def test_old_ones_are_pruned_as_on_the_disk(proxy, bucket, tmp_path):
    run = RemoteRun(f"{bucket}/run-1")
    bases = {"lineage-1/step-1": "", "lineage-1/step-2": "", "lineage-1/step-5": ""}
    for name, base in {**bases, "lineage-2/step-3": "lineage-1/step-2"}.items():
        run.upload(tmp_path, name, checkpoint(tmp_path, name, base=base))
    # Step 5 of the first lineage was rewound: it is no longer live, whatever its number.
    assert [each.name for each in run.live()] == ["lineage-2/step-3", "lineage-1/step-2", "lineage-1/step-1"]
    assert run.prune(2, ["lineage-1/step-1"]) == ["lineage-1/step-5"]
    assert run.prune(2, []) == ["lineage-1/step-1"]
    assert [each.name for each in run.whole()] == ["lineage-2/step-3", "lineage-1/step-2"]


@pytest.mark.nightly  # quick: test_a_file_that_reads_otherwise_is_not_listed
def test_a_damaged_one_gives_way_to_the_one_before(proxy, bucket, tmp_path):
    run = RemoteRun(f"{bucket}/run-1")
    for step in (1, 2):
        name = f"lineage-1/step-{step}"
        run.upload(tmp_path, name, checkpoint(tmp_path, name))
    size = (tmp_path / "lineage-1/step-2/ledger.json").stat().st_size
    run._store.write("checkpoints/lineage-1/step-2/ledger.json", b"x" * size)
    found, damaged = run.fetch_newest(tmp_path / "two")
    assert found.step == 1 and "ledger.json has another digest" in damaged[0]
    run._store.write("checkpoints/lineage-1/step-2/ledger.json", b"short")
    assert [each.step for each in run.whole()] == [1]


REFUSALS = {
    "ExpiredToken": "the credentials have expired; renew them",
    "AccessDenied": "refuses to write there with the credentials of this service; give them the right",
    "RequestTimeTooSkewed": "this host's clock and the store's are too far apart; set the host's clock",
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_a_store_that_refuses_is_told_in_one_sentence(proxy, bucket, fault):
    proxy.fault = always(fault, "PUT")
    with pytest.raises(StoreProblem) as told:
        probe(f"{bucket}/runs")
    assert REFUSALS[fault] in str(told.value) and str(told.value).startswith(f"{bucket}/runs/")
    assert told.value.lasting


def test_a_bucket_that_does_not_exist_is_told(proxy):
    with pytest.raises(StoreProblem, match="there is no such bucket; create the bucket"):
        probe("s3://no-such-bucket/runs")
    with pytest.raises(StoreProblem, match="there is no such bucket"):
        local("s3://no-such-bucket/model")


@pytest.fixture
def _forgets():
    """No client made without credentials goes on into another test."""
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.usefixtures("_forgets")
def test_a_store_without_credentials_is_told(proxy, bucket, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StoreProblem, match="there are no credentials for it here"):
        probe(f"{bucket}/runs")


def model_in(bucket, text="one"):
    """A model's files in a bucket."""
    store = files.Store(f"{bucket}/models/tiny")
    store.write("config.json", json.dumps({"model_type": text}).encode())
    store.write("model.safetensors", text.encode() * 1000)
    return store.url


def test_a_model_is_fetched_once_and_anew_when_it_changes(proxy, bucket):
    url = model_in(bucket)
    config = RolloutConfig.model_validate({"model": {"path": url}})
    here = localized(config)
    assert json.loads((files.Path(here.model.path) / "config.json").read_text()) == {"model_type": "one"}
    assert addressed(here.model_dump(mode="json"))["model"]["path"] == url
    fetched = sum("model.safetensors" in path for _, path in proxy.seen)
    assert localized(config).model.path == here.model.path
    assert sum("model.safetensors" in path for _, path in proxy.seen) == fetched
    model_in(bucket, "two")
    assert (local(url) / "model.safetensors").read_bytes() == b"two" * 1000


def test_a_fetched_file_that_was_damaged_is_fetched_again(proxy, bucket):
    place = local(model_in(bucket)) / "model.safetensors"
    place.write_bytes(b"other")
    assert (local(f"{bucket}/models/tiny") / "model.safetensors").read_bytes() == b"one" * 1000


def test_one_object_is_a_file(proxy, bucket):
    files.Store(f"{bucket}/data").write("train.jsonl", b'{"question": "q", "answer": "a"}\n')
    assert local(f"{bucket}/data/train.jsonl").read_bytes() == b'{"question": "q", "answer": "a"}\n'
    with pytest.raises(StoreProblem, match="there is nothing of that name; check the path"):
        local(f"{bucket}/data/other.jsonl")


def test_looking_at_a_model_fetches_its_small_files_alone(proxy, bucket):
    url = model_in(bucket)
    assert look(url) == ["config.json", "model.safetensors"]
    assert [path.name for path in described(url).iterdir()] == ["config.json"]


def test_files_of_a_folder_are_copied_as_they_change(proxy, bucket, tmp_path):
    run, known = RemoteRun(f"{bucket}/run-1"), {}
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / ".b.partial").write_bytes(b"1")
    assert run.copy(tmp_path, "videos", known) == 1 and run.copy(tmp_path, "videos", known) == 0
    (tmp_path / "a").write_bytes(b"12")
    assert run.copy(tmp_path, "videos", known) == 1
    assert run._store.read("videos/a") == b"12"
    assert MANIFEST not in str(run._store.listing())
