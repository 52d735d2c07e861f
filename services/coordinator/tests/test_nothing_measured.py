"""A figure that nobody measured is absent, on its way to every reader; it is never 0."""

import math
from types import SimpleNamespace

from headrace_coordinator.api.http.routes.service import run_families
from headrace_coordinator.api.reading.presenters import certificate_view
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.totals import Shape, Totals
from headrace_coordinator.projections.tensorboard import step_scalars
from headrace_coordinator.projections.transcripts import Answer
from headrace_coordinator.run.evaluation.suite_figures import result_of
from headrace_coordinator.suites import open_suite
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.resources.views import StepView

UNMEASURED = ("reward_mean", "tokens_per_s", "max_staleness")
COUNTS = {"tokens", "trained", "dropped", "filtered", "refilled"}


def step(**known):
    given = dict.fromkeys(UNMEASURED) | known
    return StepView(
        step=1, version=2, wall_s=1.5, tokens=0, stage_s={}, devices={}, trained=0, dropped=8, figures={}, **given
    )  # fmt: skip


def certificate(**more):
    given = {"tokens": 0, "tokens_by_version": {}, "max_staleness": 0, "mean_staleness": 0.0} | more
    return ev.Certificate(
        number=2, parent=1, ordinal=1, digest="d", step=0, attempt=1, trained=[], dropped={}, set_digest="s",
        log_prob_mismatch_mean=None, drop_rate_by_length={}, drop_rate_by_pass_rate={}, **given,
    )  # fmt: skip


def test_no_figure_of_a_step_without_a_measurement_is_zero():
    view = step()
    zeros = {name for name, value in view.model_dump().items() if value == 0}
    assert zeros <= COUNTS, "counts of what was trained may be 0, and figures may not"
    scalars = step_scalars(view)
    assert not {"train/reward", "train/max_staleness", "speed/tokens_per_second"} & scalars.keys()
    assert all(math.isfinite(value) for value in scalars.values())


def test_prometheus_gets_what_was_measured():
    counts = SimpleNamespace(max_staleness=None, trained=0, dropped=8)
    run = SimpleNamespace(
        id="r",
        state="RUNNING",
        stalled=False,
        step=1,
        recoveries=0,
        last_step=step(),
        counts=counts,
        engine_restarts=None,
        uploads=None,
    )
    found = {family.name: [sample.value for sample in family.samples] for family in run_families([run])}
    unmeasured = ("reward_mean", "max_staleness", "tokens_per_second")
    assert [found[f"headrace_run_{name}"] for name in unmeasured] == [[], [], []]
    assert found["headrace_run_step_seconds"] == [1.5]


def test_staleness_of_no_token_is_not_known():
    none, some = certificate(), certificate(tokens=3, tokens_by_version={1: 3})
    assert (
        certificate_view(none, True).max_staleness is None
        and certificate_view(none, True).mean_staleness is None
    )
    assert certificate_view(some, True).max_staleness == certificate_view(some, True).mean_staleness == 0


def test_whether_a_run_was_judged_outlives_the_coordinator():
    """Totals are folded from the log: a restarted coordinator knows what the steps before it say."""
    totals, shape = Totals(), Shape(0, 8, 8)
    totals.apply(ev.ScorerFailed(at=0.0, run="r", text="t", detail="the judge said hm"), shape)
    committed = ev.StepCommitted(at=0.0, run="r", certificate=certificate(), view=step().model_dump())
    totals.apply(committed, shape)
    assert not totals.judged and totals.scorer_failed == "the judge said hm"
    judged = ev.StepCommitted(
        at=0.0, run="r", certificate=certificate(), view=step(reward_mean=0.0).model_dump()
    )
    totals.apply(judged, shape)
    assert totals.judged, "a reward of 0 that somebody gave is one"


def test_a_part_is_the_mean_over_the_answers_that_have_it():
    """A scorer that abstains from an answer says nothing of it."""
    spec = {
        "suite": {"name": "math500"},
        "model": {"path": "m"},
        "samples": 2,
        "sampling": {"temperature": 1.0},
    }
    one, two = Answer(1.0, {"judge.py:score": 0.8}, "1", 5, cut=False), Answer(1.0, {}, "1", 5, cut=False)
    asked = EvaluationSpec.model_validate(spec)
    assert result_of(asked, open_suite("math500", {}), {(0, 0): one, (0, 1): two}, [None]).parts == {
        "judge.py:score": 0.8
    }
