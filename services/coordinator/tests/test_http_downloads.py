"""Checkpoints and exports as tar files over the HTTP API."""

import io
import shutil
import tarfile

import httpx
import pytest
from headrace_coordinator.domain import events as ev
from history_parts import train

BEARER = {"Authorization": "Bearer s3cret"}
FILES = {"config.json": b"{}", "deep/weights.bin": bytes(range(256)) * 9000, "empty": b""}


@pytest.fixture
async def stored(api, served, run_id):
    """A run with a checkpoint step-9 and an export on disk; step-4 is known and gone."""
    directory = served.runs / run_id
    for folder in ("checkpoints/lineage-1/step-9", "model"):
        for name, content in FILES.items():
            path = directory / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    (directory / "secret").write_text("no")
    (directory / "model/link").symlink_to(directory / "secret")
    await train(served.event_log, 9, run=run_id)
    saved = [
        ev.CheckpointSaved(at=0, run=run_id, name=f"lineage-1/step-{step}", number=step + 1, step=step)
        for step in (4, 9)
    ]
    exported = ev.ModelExported(at=0, run=run_id, path=str(directory / "model"), number=10)
    await served.post(*saved, exported)
    return f"/v1/runs/{run_id}"


def unpacked(answer, folder):
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-tar")
    assert int(answer.headers["content-length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        found = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}
    return {name.removeprefix(f"{folder}/"): content for name, content in found.items()}


async def test_a_checkpoint_and_an_export_come_whole(api, stored, run_id):
    assert (
        unpacked(await api.get(f"{stored}/checkpoints/lineage-1/step-9"), f"{run_id}-lineage-1-step-9")
        == FILES
    )
    answer = await api.get(f"{stored}/export")
    assert unpacked(answer, f"{run_id}-export") == FILES, "links lead out of the folder"
    assert answer.headers["content-disposition"] == f'attachment; filename="{run_id}-export.tar"'


async def test_what_there_is_not_is_named(api, served, stored, run_id):
    unknown = await api.get(f"{stored}/checkpoints/lineage-1/step-1")
    assert (
        unknown.status_code,
        "it has lineage-1/step-9" in unknown.json()["message"],
    ) == (404, True)
    shutil.rmtree(served.runs / run_id / "checkpoints")
    away = await api.get(f"{stored}/checkpoints/lineage-1/step-4")
    assert away.status_code == 404 and "does not see" in away.json()["message"]
    await served.post(ev.ModelExported(at=0, run=run_id, path="", number=10))
    none = await api.get(f"{stored}/export")
    assert none.status_code == 404 and f"headrace run export {run_id}" in none.json()["message"]


async def test_a_file_that_shrinks_ends_the_answer_before_its_size(api, stored, monkeypatch):
    from headrace_coordinator.api.http import downloads

    whole = downloads._entries

    def entries(root, folder, name):
        found = whole(root, folder, name)
        (folder / "deep/weights.bin").write_bytes(b"short")
        return found

    monkeypatch.setattr(downloads, "_entries", entries)
    with pytest.raises(OSError, match="shorter"):
        await api.get(f"{stored}/export")


async def test_a_link_downloads_one_thing_once_without_the_token(served, stored):
    transport = httpx.ASGITransport(served.app_with("s3cret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8470") as client:
        links = [
            (await client.post("/v1/links", params={"download": f"{stored}/export"}, headers=BEARER)).json()
            for _ in range(2)
        ]
        first, second = (link["path"] for link in links)
        assert (await client.get(f"{stored}/export")).status_code == 401
        assert [(await client.get(first)).status_code for _ in range(2)] == [200, 401]
        code = second.partition("code=")[2]
        for elsewhere in (f"{stored}/checkpoints/lineage-1/step-9", stored, "/v1/runs"):
            assert (await client.get(f"{elsewhere}?code={code}")).status_code == 401, elsewhere
        refused = await client.post("/v1/links", params={"download": "/v1/runs"}, headers=BEARER)
        assert refused.status_code == 422
