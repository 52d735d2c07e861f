"""Families of models in runs: one that mixes answers up learns in rows of its own, and says so; a wrong head ends."""

from headrace_modelkit.presets.families import write_family


def test_a_family_that_mixes_answers_up_learns_in_rows_of_their_own_and_says_so(fleet, spec_of, tmp_path):
    write_family(tmp_path / "nemotron", "nemotron")
    run = fleet.succeed(
        fleet.submit(
            spec_of(model__path=str(tmp_path / "nemotron"), algorithm__options={"kl_loss_coef": 0.1})
        )
    )
    told = [event.data["text"] for event in fleet.events(run) if event.type == "noted"]
    [note] = [text for text in told if text.startswith("model.path: every answer gets a row of its own")]
    assert "log-probs move by" in note
    assert any(text.startswith("the reference model: every answer") for text in told)
    assert all(step.log_prob_mismatch_mean < 1e-3 for step in fleet.client.certificates(run.id))


def test_a_head_that_is_not_the_classes_own_ends_the_run_by_name(fleet, spec_of, tmp_path):
    write_family(tmp_path / "qwen3", "qwen3", logit_scale=0.25)
    run = fleet.submit(spec_of(model__path=str(tmp_path / "qwen3")))
    ended = fleet.state(run, "FAILED", "SUCCEEDED")
    assert ended.state == "FAILED" and not ended.recoveries
    assert (
        "model.path" in ended.reason and "qwen3" in ended.reason and "transformers' own class" in ended.reason
    )
