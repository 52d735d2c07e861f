"""Engine and trainer are compared at the start and after every resume, on a step that has something to compare."""

import asyncio
import contextlib

import pytest
from headrace_coordinator.domain import events as ev
from headrace_simulation.fleet.trainer import Trainer
from headrace_simulation.judging.judge import Violation
from headrace_simulation.virtual_time import run_virtual
from headrace_simulation.world import World

GOOD = {"log_prob_compared_tokens": 40.0, "log_prob_mismatch_mean": 1e-5}
BAD = {"log_prob_compared_tokens": 40.0, "log_prob_mismatch_mean": 2.0}
NONE = {"log_prob_compared_tokens": 0.0}


@pytest.fixture
def live(monkeypatch):
    """Runs a calm world whose trainers report the figures of `script(version ordinal, restores)`."""

    def run(script, trouble=None, **options):
        commit, restore, restores = Trainer.CommitStep, Trainer.Restore, []

        async def committed(self, request):
            response = await commit(self, request)
            response.figures.clear()
            response.figures.update(script(response.version.ordinal, len(restores)))
            return response

        async def restored(self, request):
            restores.append(request.number)
            return await restore(self, request)

        monkeypatch.setattr(Trainer, "CommitStep", committed)
        monkeypatch.setattr(Trainer, "Restore", restored)
        world = World(5, faults=False)
        rollouts = [spec.rollout.model_copy(update={"engine_options": options}) for spec in world.specs]
        world.specs = [
            spec.model_copy(update={"rollout": rollout})
            for spec, rollout in zip(world.specs, rollouts, strict=True)
        ]
        if trouble is not None:
            monkeypatch.setattr(World, "trouble", trouble)
        with contextlib.suppress(Violation):  # the judge of a calm world wants success
            run_virtual(world.live())
        run, history = world.ended, world.history
        steps = [event for _, event in history if isinstance(event, ev.StepCommitted)]
        said = [event for _, event in history if isinstance(event, ev.Noted) and "agree:" in event.text]
        assert not [event for event in said if not event.plain], "agreement is no warning"
        assert said or run.state == "FAILED"
        return run, [step.certificate for step in steps]

    return run


def test_a_step_without_a_comparison_leaves_the_check_to_the_next(live):
    run, certificates = live(lambda ordinal, _: NONE if ordinal < 3 else BAD)
    assert run.state == "FAILED" and "engine and trainer disagree" in run.reason and "step 3" in run.reason
    assert [(c.log_prob_mismatch_mean, c.log_prob_compared_tokens) for c in certificates] == [(None, 0)] * 2


def test_the_first_step_with_a_comparison_decides(live):
    run, certificates = live(lambda ordinal, _: GOOD if ordinal == 1 else BAD)
    assert run.state == "SUCCEEDED"
    assert (certificates[0].log_prob_mismatch_mean, certificates[0].log_prob_compared_tokens) == (1e-5, 40)


def test_an_engine_with_fewer_bits_may_be_further_off(live):
    """0.2 is more than bfloat16 explains, and less than fp8 does."""

    def further(ordinal, _):
        return {"log_prob_compared_tokens": 40.0, "log_prob_mismatch_mean": 0.2}

    run, _ = live(further)
    assert run.state == "FAILED" and "above 0.1 for bfloat16" in run.reason
    run, certificates = live(further, quantization="fp8")
    assert run.state == "SUCCEEDED" and len(certificates) == len(run.lineage.versions) - 1
    run, _ = live(lambda ordinal, _: BAD, quantization="fp8")
    assert run.state == "FAILED" and "above 0.3 for fp8 weights" in run.reason


def test_the_check_is_made_again_after_a_resume(live):
    async def kills_a_trainer(self):
        while True:
            await asyncio.sleep(0.05)
            run = self._run()
            if run is not None and len(run.lineage.versions) > 2:
                victim = next(i for i in self.instances.values() if isinstance(i, Trainer) and i.alive)
                await self.kill(victim.incarnation)
                return

    run, _ = live(lambda _, restores: GOOD if restores == 1 else BAD, kills_a_trainer)
    assert run.recoveries and run.state == "FAILED" and "engine and trainer disagree" in run.reason


@pytest.mark.parametrize(("kl", "state"), [(1e-7, "SUCCEEDED"), (0.5, "FAILED"), (float("nan"), "FAILED")])
def test_the_first_kl_to_the_reference_is_zero_or_the_run_fails(live, kl, state):
    run, certificates = live(lambda ordinal, _: {**GOOD, "reference_kl": kl if ordinal == 1 else 0.7})
    assert run.state == state
    assert state == "SUCCEEDED" or ("KL to the reference" in run.reason and not certificates)


@pytest.mark.parametrize(("kl", "state"), [(0.01, "SUCCEEDED"), (0.7, "FAILED"), (float("nan"), "FAILED")])
def test_a_kl_above_the_bound_fails_the_run_before_the_step_is_recorded(live, kl, state):
    run, certificates = live(
        lambda ordinal, _: {**GOOD, "log_prob_mismatch_kl": kl if ordinal == 3 else 1e-9}
    )
    assert run.state == state
    if state == "FAILED":
        assert (
            "; in step 3 " in run.reason
            and run.reason.endswith("(limits.max_mismatch_kl)")
            and "above 0.1" in run.reason
        )
        assert [certificate.log_prob_mismatch_kl for certificate in certificates] == [1e-9, 1e-9]
    else:
        assert certificates[2].log_prob_mismatch_kl == kl
