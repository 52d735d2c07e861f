"""The newest lines of an instance's log, by level."""

import json

from headrace_coordinator.api.http.routes.fleet import MOST_CHARACTERS, READ_BYTES, read_log


def record(level, message, **more):
    return json.dumps({"time": "2026-11-22T07:00:00.000+00:00", "level": level, "message": message, **more})


def test_lines_have_levels_and_what_is_no_record_that_of_the_line_before(tmp_path):
    (tmp_path / "rollout-0.log").write_text(
        "\n".join(
            [
                "plain before any record",
                record("info", "ready"),
                record("error", "broke", exception="Traceback: x"),
                "  a print of a library",
                record("warning", "w" * 9000),
            ]
        )
    )
    every = read_log(tmp_path, "rollout-0", "debug", 100)
    assert [(each.level, each.text[:24]) for each in every] == [
        ("info", "plain before any record"),
        ("info", "ready"),
        ("error", "broke\nTraceback: x"),
        ("error", "  a print of a library"),
        ("warning", "w" * 24),
    ]
    assert every[1].time == 1795330800.0 and every[0].time is None
    assert len(every[-1].text) == MOST_CHARACTERS
    assert [each.level for each in read_log(tmp_path, "rollout-0", "error", 100)] == ["error", "error"]
    assert [each.level for each in read_log(tmp_path, "rollout-0", "warning", 1)] == ["warning"]
    assert [each.level for each in read_log(tmp_path, "rollout-0", "debug", 100, "BROKE")] == ["error"]
    assert read_log(tmp_path, "rollout-0", "debug", 100, "nowhere to be found") == []


def test_a_line_ends_at_a_line_feed_alone(tmp_path):
    """(S3 B17)"""
    (tmp_path / "rollout-0.log").write_text(f"plain\u2028still\n{record('info', 'x')}\n")
    assert [each.text for each in read_log(tmp_path, "rollout-0", "debug", 9)] == ["plain\u2028still", "x"]
    (tmp_path / "rollout-1.log").write_text("")
    assert read_log(tmp_path, "rollout-1", "debug", 9) == []


def test_only_the_end_of_a_large_file_is_read(tmp_path):
    lines = [record("info", f"line {n} {'x' * 200}") for n in range(8000)]
    (tmp_path / "trainer-0.log").write_text("\n".join(lines))
    found = read_log(tmp_path, "trainer-0", "info", 1000)
    assert len(found) == 1000 and found[-1].text.startswith("line 7999 ")
    whole = read_log(tmp_path, "trainer-0", "info", 100_000)
    assert sum(len(each.text) for each in whole) < READ_BYTES and whole[0].text.startswith("line ")


def test_a_name_leads_out_of_the_folder_nowhere(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "secret.log").write_text(record("info", "secret"))
    (logs / "linked.log").symlink_to(tmp_path / "secret.log")
    for name in ("../secret", "linked", "", "rollout-9", "a/b"):
        assert read_log(logs, name, "info", 10) is None, name


async def test_the_route_answers_lines_and_says_where_to_look_without_a_file(api, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rollout-0.log").write_text(record("warning", "slow") + "\n" + record("info", "ok"))
    found = (await api.get("/v1/instances/rollout-0/logs?level=warning")).json()
    assert [line["text"] for line in found["lines"]] == ["slow"]
    missing = await api.get("/v1/instances/trainer-7/logs")
    assert missing.status_code == 404
    assert "docker compose logs" in missing.json()["message"]
    assert (await api.get("/v1/instances/rollout-0/logs?level=loud")).status_code == 422
