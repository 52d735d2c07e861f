"""The dashboard's files and the lists that it reads: open to all, under a strict policy; data needs the token."""

import re
from pathlib import Path

import headrace_coordinator
import httpx
import pytest
from headrace_coordinator.api.http.routes.dashboard import page_files
from history_parts import train

FOLDER = Path(headrace_coordinator.__file__).parent / "dashboard"


async def test_the_page_and_all_that_it_loads_are_served_under_a_strict_policy(api):
    page = await api.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    loaded = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert loaded
    for path in loaded:
        answer = await api.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["content-security-policy"] == policy
    assert not re.search(r"<script>|<style|\son\w+=|style=|javascript:|https?://", page.text)


async def test_the_docs_are_swagger_ui_from_here_without_a_token_or_another_host(served, tmp_path):
    transport = httpx.ASGITransport(served.app_with("s3cret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://coordinator:8470") as client:
        page = await client.get("/docs")
        assert page.status_code == 200 and (await client.head("/docs")).status_code == 200
        policy = page.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "unsafe" not in policy
        loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert "/docs/swagger-ui-bundle.js" in loaded and all(path.startswith("/") for path in loaded)
        for path in loaded:
            assert (await client.get(path)).status_code == 200, path
        assert "sourceMappingURL" not in (await client.get("/docs/swagger-ui-bundle.js")).text[-400:]
        assert (await client.get("/docs/nothing.js")).status_code == 404
        assert (await client.get("/openapi.json")).status_code == 401


async def test_a_file_that_has_not_changed_is_not_sent_again(api):
    first = await api.get("/")
    again = await api.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert (await api.head("/")).status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "../serving.py", "%2e%2e/serving.py", "vendor", ""])
async def test_nothing_else_is_served(api, name):
    answer = await api.get(f"/dashboard/{name}")
    assert (answer.status_code, answer.json()["reason"]) == (404, "NOT_FOUND")


async def test_the_page_needs_no_token_and_data_does(served, tmp_path):
    transport = httpx.ASGITransport(served.app_with("s3cret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://coordinator:8470") as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/v1/run-summaries")).status_code == 401
        assert (await client.get("/dashboard")).status_code == 401


async def test_without_a_token_the_page_too_is_for_this_machine_alone(api):
    assert (await api.get("/", headers={"Host": "evil.example"})).status_code == 403


def test_the_files_are_small_and_no_text_becomes_markup():
    own = {name: content.decode() for name, (content, *_) in page_files().items() if "vendor" not in name}
    assert sum(len(content) for content, *_ in page_files().values()) < 300_000
    for name, text in own.items():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        ), name
    assert "MIT License" in (FOLDER / "vendor" / "uPlot.LICENSE.txt").read_text()


async def test_runs_in_short_are_filtered_and_paged(api, served, spec_json):
    ids = [(await api.post("/v1/runs", json=spec_json)).json()["id"] for _ in range(3)]
    await train(served.event_log, 2, run=ids[2])
    await api.post(f"/v1/runs/{ids[0]}:cancel")
    page = (await api.get("/v1/run-summaries?page_size=2")).json()
    assert [run["id"] for run in page["summaries"]] == ids[:0:-1]
    assert (page["total"], page["states"]) == (3, {"CANCELLED": 1, "QUEUED": 2})
    assert "spec" not in page["summaries"][0] and page["summaries"][0]["rewards"] == [0.5, 0.5]
    rest = (
        await api.get("/v1/run-summaries", params={"page_size": 2, "page_token": page["next_page_token"]})
    ).json()
    assert [run["id"] for run in rest["summaries"]] == ids[:1]
    for query, found in (
        ("state=CANCELLED", ids[:1]),
        ("state=QUEUED&state=CANCELLED", ids),
        (f"search={ids[1]}", [ids[1]]),
    ):
        shown = (await api.get(f"/v1/run-summaries?{query}")).json()
        assert {run["id"] for run in shown["summaries"]} == set(found)
        assert shown["total"] == len(found)
    wrong = await api.get("/v1/run-summaries?state=RUNING")
    assert wrong.status_code == 422 and "RUNNING" in wrong.text
    assert (await api.get("/v1/run-summaries?page_token=nonsense")).status_code == 422


async def test_curves_and_newest_events_of_a_run(api, run_id, served):
    await train(served.event_log, 1, run=run_id)
    curves = (await api.get(f"/v1/runs/{run_id}/curves?points=2")).json()
    assert curves["steps"] == [1] and curves["series"]["train/reward"] == [0.5]
    assert (await api.get(f"/v1/runs/{run_id}/curves?points=1")).status_code == 422
    for number in range(3):
        await served.note(run_id, str(number))
    first = (await api.get(f"/v1/runs/{run_id}/newest-events?page_size=2")).json()
    assert [event["data"]["text"] for event in first["events"]] == ["2", "1"]
    token = first["next_page_token"]
    rest = (await api.get(f"/v1/runs/{run_id}/newest-events?page_token={token}")).json()
    assert rest["events"][0]["data"]["text"] == "0"
    assert (await api.get("/v1/runs/none/curves")).status_code == 404


async def test_tags_and_a_note_of_a_run(api, run_id):
    given = await api.post(f"/v1/runs/{run_id}:label", json={"tags": ["paper", "lr=2e-5"], "note": "<b>"})
    assert (given.status_code, given.json()["tags"], given.json()["note"]) == (
        200,
        ["paper", "lr=2e-5"],
        "<b>",
    )
    (shown,) = (await api.get("/v1/run-summaries")).json()["summaries"]
    assert (shown["tags"], shown["note"], shown["algorithm"], shown["seed"]) == (
        given.json()["tags"],
        "<b>",
        "grpo",
        0,
    )
    for body, key in (
        ({"tags": ["a b"]}, "tags[0]"),
        ({"tags": ["x"] * 21}, "tags"),
        ({"notes": ""}, "notes"),
    ):
        refused = await api.post(f"/v1/runs/{run_id}:label", json=body)
        assert refused.status_code == 422 and key in [each["key"] for each in refused.json()["problems"]], (
            body
        )
