"""Views read JSON of an older or newer coordinator."""

import math

from headrace_schema.resources.fleet import LeaseListView
from headrace_schema.resources.views import CertificateView, CountsView, PolicyView, RunView, StepView


def test_what_is_absent_is_empty_and_what_is_unknown_is_in_raw():
    run = RunView.from_json({"id": "r", "counts": {"trained": 2, "brand_new": 1}, "brand_new": 5})
    assert (run.id, run.counts.trained, run.counts.dropped) == ("r", 2, 0)
    assert (run.policy, run.waiting_for, run.spec, run.started_at) == (None, [], {}, None)
    assert (run.raw["brand_new"], run.counts.raw["brand_new"]) == (5, 1)
    assert not run.ended and RunView.from_json({"state": "FAILED"}).ended


def test_null_is_none_where_nothing_was_measured_and_nan_among_figures():
    step = StepView.from_json({"reward_mean": None, "figures": {"loss": None}, "trained": None})
    assert step.reward_mean is None and math.isnan(step.figures["loss"]) and step.trained == 0


def test_nested_resources_and_json_keys_have_the_types_of_the_view():
    found = CertificateView.from_json(
        {"version": {"number": 3}, "trained": [[1, 2, 3]], "tokens_by_version": {"2": 7}}
    )
    assert (found.version.number, found.version.parent) == (3, 0)
    assert (found.trained, found.tokens_by_version) == ([(1, 2, 3)], {2: 7})
    leases = LeaseListView.from_json({"leases": [{"epoch": 4}], "devices": [{"name": "h/cpu:0"}]})
    assert (leases.leases[0].epoch, leases.devices[0].name, leases.next_page_token) == (4, "h/cpu:0", "")


def test_a_view_read_from_its_own_json_equals_it():
    counts = CountsView(trained=1, dropped=2, duplicates=0, max_staleness=0, frontier=3)
    assert CountsView.from_json(counts.model_dump(mode="json")) == counts
    assert counts != PolicyView.from_json({})
