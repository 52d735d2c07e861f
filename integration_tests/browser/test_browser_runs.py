"""The list of runs, runs beside each other, and specs as text, over made-up runs."""

from __future__ import annotations

from typing import get_args

from harness.crowd import Crowd, CrowdServer, reward_at
from harness.waiting import wait_for
from headrace_schema.workflow import WorkflowChoice

NOTE = "<img src=x onerror=alert(1)>"
MARKDOWN = "## Why\n**Halved** the `lr` of [#7](https://example.org/7), not [this](javascript:alert(1))\n- one\n- two"


def test_runs_are_sorted_labelled_and_seeds_of_one_spec_are_one_line(open_page, tmp_path):
    """Two seeds at steps 120 and 41: their rewards by hand, the mean between them."""
    runs = [("other-1", "FAILED"), ("seeds-0", "SUCCEEDED"), ("seeds-1", "RUNNING"), ("queued-1", "QUEUED")]
    with CrowdServer(Crowd(runs), tmp_path) as server:
        page = open_page(f"{server.url}/#/runs/seeds-1")
        page.get_by_text("Tags and note").click()
        page.get_by_label("Tags", exact=True).fill("paper lr=2e-5")
        page.get_by_label("Note", exact=True).fill(NOTE)
        page.get_by_role("button", name="Save").click()
        page.locator(".labels .tag", has_text="lr=2e-5").wait_for()
        assert page.locator(".labels .note").text_content() == NOTE
        page.goto(f"{server.url}/#/runs?sort=score")
        names = page.locator(".runs tbody .name > a")
        wait_for(lambda: names.count() == 4, "the runs")
        assert names.all_inner_texts() == ["seeds-0", "other-1", "seeds-1", "queued-1"]
        assert page.locator(".runs .tag").all_inner_texts() == ["paper", "lr=2e-5"]
        assert "grpo" in page.locator(".runs .algorithm").first.inner_text()
        page.get_by_role("button", name="Run", exact=True).click()
        page.locator("[aria-sort=ascending]", has_text="Run").wait_for()
        assert names.all_inner_texts() == ["other-1", "queued-1", "seeds-0", "seeds-1"]
        page.get_by_label("seeds together").check()
        wait_for(lambda: names.count() == 3, "the seeds in one line")
        low, high = sorted((reward_at(41), reward_at(120)))
        spread = (high - low) / 2**0.5
        words = [f"{value:.3f}".rstrip("0") for value in ((low + high) / 2, spread, low, high)]
        assert (
            f"{words[0]} ± {words[1]} ({words[2]} to {words[3]})"
            in page.locator(".family .reward").inner_text()
        )
        page.get_by_role("link", name="seeds, 2 seeds").click()
        page.locator(".legend", has_text="2 seeds").wait_for()
        reward = page.locator(".chart", has_text="Mean reward")
        at = f"{reward_at(41):.3f}".rstrip("0")
        assert f"at step 41: seeds {at}, most {at}, least {at}" in reward.locator(".hidden").text_content()
        page.locator(".same-item summary").click()
        shown = page.locator(".same-item article")
        assert ["It is 490." in each for each in shown.all_inner_texts()] == [True, False]
        page.get_by_label("Left").select_option("trainer/entropy")
        page.get_by_label("Right").select_option("trainer/answer_length_mean")
        page.locator(".chart", has_text="entropy and answer length mean").wait_for()


def test_runs_are_a_table_of_any_columns_with_conditions_kept_in_the_address(
    open_page, tmp_path, inaccessible
):
    runs = [("other-1", "FAILED"), ("seeds-0", "SUCCEEDED"), ("seeds-1", "RUNNING"), ("queued-1", "QUEUED")]
    with CrowdServer(Crowd(runs), tmp_path) as server:
        page = open_page(f"{server.url}/#/runs", accept_downloads=True, bypass_csp=True)
        names = page.locator(".runs tbody .name > a")
        wait_for(lambda: names.count() == 4, "the runs")
        page.locator(".columns summary").click()
        page.locator("#every-column option[value='stage_s.learn']").wait_for(state="attached")
        for name in ("optimizer.lr", "stage_s.learn"):
            page.get_by_label("Column", exact=True).fill(name)
            page.get_by_role("button", name="Add", exact=True).click()
        cells = page.locator(".runs tbody .own")
        wait_for(lambda: cells.count() == 8, "two columns of four runs")
        assert cells.all_inner_texts() == [
            "3.00e-5",
            "1.4",
            "1.00e-5",
            "1.4",
            "1.00e-5",
            "1.4",
            "1.00e-5",
            "–",
        ]
        page.get_by_label("Only runs where").fill("optimizer.lr<2e-5, score>0.1")
        wait_for(lambda: names.all_inner_texts() == ["seeds-0", "seeds-1"], "those that meet it")
        page.get_by_text("2 runs").wait_for()
        link = page.url
        page.goto("about:blank")
        page.goto(link)
        wait_for(lambda: names.all_inner_texts() == ["seeds-0", "seeds-1"], "the same by the address")
        page.get_by_label("seeds together").check()
        wait_for(lambda: cells.count() == 2, "the seeds in one line")
        assert cells.first.inner_text() == "1.00e-5 ± 0 (1.00e-5 to 1.00e-5)"
        with page.expect_download() as found:
            page.get_by_role("button", name="CSV").click()
        lines = found.value.path().read_text(encoding="utf-8").splitlines()
        assert lines[0].endswith("optimizer.lr,stage_s.learn") and len(lines) == 3
        assert lines[1].startswith("seeds-0,SUCCEEDED,grpo") and lines[1].endswith("0.00001,1.4")
        assert inaccessible(page) == []
        page.get_by_label("Only runs where").fill("what is this")
        page.get_by_text("what is this is no condition").wait_for()


def test_notes_are_markdown_of_which_nothing_becomes_markup_or_runs(open_page, tmp_path):
    with CrowdServer(Crowd([("done-1", "SUCCEEDED")]), tmp_path) as server:
        page = open_page(f"{server.url}/#/runs/done-1")
        page.get_by_text("Tags and note").click()
        page.get_by_label("Note", exact=True).fill(MARKDOWN)
        page.get_by_role("button", name="Save").click()
        note = page.locator(".labels .note")
        note.locator("strong", has_text="Halved").wait_for()
        assert note.locator("code").inner_text() == "lr" and note.locator("li").all_inner_texts() == [
            "one",
            "two",
        ]
        assert note.locator("a").evaluate_all("all => all.map((a) => [a.href, a.rel])") == [
            ["https://example.org/7", "noopener noreferrer"]
        ]
        assert "[this](javascript:alert(1))" in note.inner_text()


def test_a_spec_is_written_as_yaml_from_an_example_beside_what_its_keys_mean(open_page, tmp_path):
    with CrowdServer(Crowd([("done-1", "SUCCEEDED")]), tmp_path) as server:
        _write_a_spec(server, open_page(f"{server.url}/#/submit"))


def _write_a_spec(server, page):
    text = page.locator("#text")
    begin = page.get_by_role("group", name="Begin with a workflow")
    begin.get_by_role("button").nth(3).wait_for()
    workflows = {text.replace(" ", "_") for text in begin.locator("b").all_inner_texts()}
    assert workflows == set(get_args(get_args(get_args(get_args(WorkflowChoice)[0])[0])[0])), (
        "each workflow has an example"
    )
    for example in begin.get_by_role("button").all():
        example.click()
        page.get_by_role("button", name="Check and preview").click()
        page.get_by_text("finds nothing wrong").wait_for()
    begin.get_by_role("button", name="own data and reward").click()
    lines = text.input_value().split("\n")
    at = next(n for n, line in enumerate(lines) if line.startswith("algorithm:"))
    lines[at] = "algorithm:\n  name: grpo\n  group_size: none"
    text.fill("\n".join(lines))
    page.get_by_role("button", name="Check and preview").click()
    page.get_by_role("button", name=f"Line {at + 3}").click()
    chosen = text.evaluate("each => each.value.slice(each.selectionStart, each.selectionEnd)")
    assert chosen == "  group_size: none"
    help = page.get_by_role("complementary", name="About the key")
    assert "algorithm.group_size" in help.inner_text() and "at least 1" in help.inner_text()
    text.fill("name: a\nsteps: [1")
    page.get_by_role("button", name="Check and preview").click()
    page.get_by_role("button", name="Line 2").wait_for()
    page.goto(f"{server.url}/#/submit?from=done-1&at=120")
    page.get_by_role("heading", name="Fork done-1 at step 120").wait_for()
    page.get_by_role("button", name="Edit as YAML").click()
    assert "from_checkpoint:\n  run: done-1\n  step: 120" in text.input_value()
