"""What `/metrics` says of the fleet, of runs and of requests."""

import re

from headrace_coordinator.domain import events as ev
from history_parts import train


async def test_prometheus_shows_the_fleet_the_runs_and_requests(api, served, run_id):
    await train(served.event_log, 1, run=run_id)
    served.fleet.online[run_id].ended["lost"] = 1
    answer = await api.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    for line in (
        'headrace_runs{state="QUEUED"} 1.0',
        'headrace_runs{state="RECOVERING"} 0.0',
        'headrace_instances{kind="simulator",state="SILENT"} 0.0',
        'headrace_leases{state="REVOKING"} 0.0',
        'headrace_instances_wanted{kind="trainer"} 1.0',
        'headrace_instances{kind="rollout",state="READY"} 3.0',
        'headrace_instance_busy_cores{instance="rollout-1",kind="rollout"} 0.5',
        'headrace_gpu_busy_ratio{device="GPU-aa/gpu:0"} 0.5',
        'headrace_devices{state="LEASED"} 1.0',
        f'headrace_run_reward_mean{{run="{run_id}"}} 0.5',
        f'headrace_run_sessions_total{{outcome="lost",run="{run_id}"}} 1.0',
        'headrace_http_requests_total{method="POST",route="/v1/runs",status="201"}',
    ):
        assert line in answer.text


async def test_what_fills_waits_and_ages_has_figures(api, served, run_id):
    waited = re.compile(r"(?m)^headrace_queue_wait_seconds (\S+)$")
    assert float(waited.search((await api.get("/metrics")).text)[1]) > 0, "a run waits"
    run = served.event_log.state.runs[run_id]
    run.queued_at = served.event_log.now() - 90
    assert 90 <= float(waited.search((await api.get("/metrics")).text)[1]) < 100
    run.spec["checkpoint"]["enabled"] = True
    run.state, run.admitted_at = "RUNNING", served.event_log.now() - 500
    text = (await api.get("/metrics")).text
    assert float(waited.search(text)[1]) == 0, "nobody waits: 0, and not absent"
    age = re.compile(rf'headrace_run_checkpoint_age_seconds{{run="{run_id}"}} (\S+)')
    assert 500 <= float(age.search(text)[1]) < 510, "there is none: since its admission"
    saved = ev.CheckpointSaved(
        at=served.event_log.now() - 30, run=run_id, name="lineage-1/step-1-2", number=2
    )
    run.apply(saved)
    assert 30 <= float(age.search((await api.get("/metrics")).text)[1]) < 40
    run.spec["checkpoint"]["enabled"] = False
    assert not age.search((await api.get("/metrics")).text)
