"""`headrace token …`, `headrace whoami`, and who sees a run, on the command line."""

import json

import pytest

TOKEN = {"name": "ann", "owner": "ann", "team": "nlp", "scopes": ["read", "submit"], "created_at": 1.0}
TOKEN |= {"expires_at": 4102444800.0, "expired": False}


def test_a_token_is_printed_alone_and_once(headrace, coordinator):
    coordinator.routes["POST /v1/tokens"] = 201, TOKEN | {"token": "hrt_x"}
    done = headrace("token", "create", "ann", "--team", "nlp", "--expires", "30d", "--scope", "read")
    assert (done.returncode, done.stdout) == (0, "hrt_x\n")
    (asked,) = coordinator.requests("POST /v1/tokens")
    expected = {"name": "ann", "owner": "", "team": "nlp", "scopes": ["read"], "expires_in_s": 2592000.0}
    assert asked.body == expected


@pytest.mark.parametrize("text", ["30", "d", "-1d", "1y", "0d"])
def test_a_time_that_is_none_is_refused_by_its_key(headrace, coordinator, text):
    done = headrace("token", "create", "ann", f"--expires={text}")
    assert done.returncode == 2 and "--expires" in done.stderr and "30d" in done.stderr
    assert coordinator.requests("POST /v1/tokens") == []


def test_tokens_are_listed_and_revoked(headrace, coordinator):
    coordinator.routes["GET /v1/tokens"] = 200, {"tokens": [TOKEN]}
    listed = headrace("token", "list")
    assert "nlp" in listed.stdout and "2100-01-01" in listed.stdout
    assert json.loads(headrace("token", "list", "--json").stdout) == {"tokens": [TOKEN]}
    coordinator.routes["POST /v1/tokens/ann:revoke"] = 200, {"name": "ann"}
    assert "revoked" in headrace("token", "revoke", "ann").stdout


def test_whoami_says_whose_token_it_is(headrace, coordinator):
    me = {"name": "ann", "teams": ["nlp"], "scopes": ["read", "submit"], "token": "ci", "expires_at": None}
    coordinator.routes["GET /v1/me"] = 200, me
    assert headrace("whoami").stdout == "ann of nlp: read, submit\n"


def test_a_run_is_submitted_with_its_visibility_and_shared(headrace, coordinator, tmp_path):
    made = {"id": "r-1", "state": "QUEUED", "owner": "ann", "visibility": "team"}
    coordinator.routes["POST /v1/runs"] = 201, made
    coordinator.routes["POST /v1/runs/r-1:share"] = 200, made | {"visibility": "fleet"}
    spec = tmp_path / "run.yaml"
    spec.write_text("name: mine\n")
    headrace("run", "submit", str(spec), "--visibility", "team")
    headrace("run", "submit", str(spec))
    queries = [dict(asked.query) for asked in coordinator.requests("POST /v1/runs")]
    assert queries == [{"visibility": ["team"]}, {}]
    assert "fleet" in headrace("run", "share", "r-1", "fleet").stdout
    (asked,) = coordinator.requests("POST /v1/runs/r-1:share")
    assert asked.query == {"visibility": ["fleet"]}


USED = {"subject": "user:ann", "runs": 2, "queued": 1, "devices": 4, "device_hours": 12.5, "disk_gb": 0.25}
USED |= {"streams": 0, "limits": {"runs": 4.0}}


def test_usage_is_shown_and_written_as_csv(headrace, coordinator):
    coordinator.routes["GET /v1/usage"] = 200, {"usage": [USED, USED | {"subject": "team:nlp", "limits": {}}]}
    shown = headrace("usage").stdout
    assert "2 of 4" in shown and "12.50" in shown and "team:nlp" in shown
    assert headrace("usage", "--csv").stdout.splitlines() == [
        "subject,runs,queued,devices,device_hours,disk_gb,streams,quota_runs",
        "user:ann,2,1,4,12.5,0.25,0,4.0",
        "team:nlp,2,1,4,12.5,0.25,0,",
    ]


def test_quotas_are_set_listed_and_taken_away(headrace, coordinator):
    coordinator.routes["POST /v1/quotas"] = 200, {"subject": "team:nlp", "limits": {}}
    assert headrace("quota", "set", "team:nlp", "runs=4", "device_hours=1.5").returncode == 0
    headrace("quota", "set", "team:nlp")
    bodies = [asked.body for asked in coordinator.requests("POST /v1/quotas")]
    assert bodies == [{"subject": "team:nlp", "runs": 4, "device_hours": 1.5}, {"subject": "team:nlp"}]
    wrong = headrace("quota", "set", "team:nlp", "runs=many")
    assert wrong.returncode == 2 and "NAME=NUMBER" in wrong.stderr
    coordinator.routes["GET /v1/quotas"] = 200, {"quotas": [{"subject": "user:*", "limits": {"runs": 2.0}}]}
    assert "runs 2" in headrace("quota", "list").stdout
