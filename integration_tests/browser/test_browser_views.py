"""Every view over made-up runs: many runs, small screens, the keyboard, axe-core."""

from __future__ import annotations

import json

import pytest
from harness.crowd import OTHER, SCORER, Crowd, CrowdServer
from harness.crowd_files import LONG_RUN, MANY, RUNS, VIEWS
from harness.waiting import wait_for

SPEC = {
    "name": "sums",
    "model": {"path": "owner/model"},
    "data": {"source": "copy_digits", "heldout": 10},
    "reward": {"scorers": [{"name": "exact"}]},
}
CUT = """[...document.querySelectorAll('.scroll')].filter((each) => each.scrollWidth > each.clientWidth + 1)
    .map((each) => each.getAttribute('aria-label'))"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    with CrowdServer(Crowd(RUNS), tmp_path_factory.mktemp("runs"), token="s3cret") as server:
        yield server


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_accessible_small_and_fits_a_phone(crowd, opened, inaccessible, view):
    for width, theme in ((1280, "light"), (390, "dark")):
        page = opened(crowd, view, width=width, color_scheme=theme, bypass_csp=True)
        assert inaccessible(page) == [], (width, theme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelectorAll('*').length") <= 2000
        assert page.evaluate(CUT) == [], "no table is cut"


@pytest.mark.parametrize("view", VIEWS)
def test_long_names_never_scroll_a_phone_sideways(crowd, open_page, view):
    path, mark = VIEWS[view]
    for run in ("done-1", "live-1"):
        path = path.replace(run, LONG_RUN)
    page = open_page(f"{crowd.url}/{path}", width=390)
    page.locator(mark).first.wait_for()
    for summary in page.locator(".trajectory > summary").all()[:2]:
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("view", ["trajectories", "evaluation"])
def test_a_scorer_is_shown_by_its_files_name_with_its_path_in_a_tooltip(crowd, opened, view):
    page = opened(crowd, view)
    page.locator(".trajectory > summary").first.click()
    shown = page.locator(".trajectory").first.get_by_text("Scorer rewards/judge.py:score", exact=True)
    shown.wait_for()
    assert shown.get_attribute("title") == SCORER
    own = page.locator(".trajectory").first.get_by_text("Scorer style/judge.py:score/tone", exact=True)
    assert own.get_attribute("title") == OTHER
    assert (
        page.locator(".trajectory").first.get_by_text("Scorer exact", exact=True).get_attribute("title")
        is None
    )
    assert "/home/me" not in page.locator("main").inner_text()


def test_logs_of_an_instance_are_shown_by_level(crowd, opened):
    page = opened(crowd, "fleet")
    page.get_by_label("Instance", exact=True).select_option("rollout-0")
    page.get_by_text("The newest 2 lines of rollout-0").wait_for()
    page.get_by_label("Least level").select_option("error")
    page.get_by_text("The newest 1 line of rollout-0").wait_for()
    assert "<b>CUDA error</b>" in page.locator(".log").inner_text()
    page.get_by_label("Least level").select_option("info")
    page.get_by_label("Search the log").fill("cuda")
    page.get_by_role("button", name="Show", exact=True).click()
    page.get_by_text("The newest 1 line of rollout-0 with “cuda”").wait_for()
    page.get_by_label("Instance", exact=True).select_option("trainer-0")
    page.get_by_text("in containers see").wait_for()


def test_an_instance_is_drained_after_a_question(crowd, opened):
    page = opened(crowd, "fleet")
    page.get_by_role("button", name="Drain rollout-0").click()
    page.get_by_role("dialog").get_by_role("button", name="Back").click()
    assert crowd.crowd.drained == []
    page.get_by_role("button", name="Drain rollout-0").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain", exact=True).click()
    page.get_by_text("rollout-0 was told to drain").wait_for()
    assert crowd.crowd.drained == ["rollout-0"]


def test_the_flow_of_the_step_in_hand_says_what_is_behind(crowd, opened):
    page = opened(crowd, "run")
    places = page.locator(".flow li")
    wait_for(lambda: places.first.locator("b").inner_text() == "14", "the counts of the step in hand")
    assert places.locator("b").all_inner_texts() == ["14", "18", "6", "8", "16"]
    assert "rollout-0 10, rollout-1 8" in places.nth(1).inner_text()
    page.get_by_text("Step 42: 64 slots. Generation is at work. 2 slots dropped.").wait_for()
    page.goto(f"{crowd.url}/#/runs/done-1")
    page.locator(".chart").first.wait_for()
    assert not page.locator(".flow").is_visible()


def test_agreement_and_a_yield_are_no_trouble(crowd, opened):
    page = opened(crowd, "run")
    events = page.locator(".events li")
    events.get_by_text("engine and trainer agree").wait_for()
    assert page.locator(".events .grave").all_inner_texts()[0].endswith("longer than max_context")
    assert page.locator(".events .grave").count() == 1
    events.get_by_text("goes on from step 20 (step-20), version 22").wait_for()
    page.get_by_label("only notes and trouble").check()
    assert events.get_by_text("engine and trainer agree").is_visible()
    assert not events.get_by_text("goes on from step 20").is_visible()


def test_curves_fold_what_is_constant_and_are_smoothed_over_samples(crowd, opened):
    """After 41 steps of 64 samples a rewind at step 20 stands at 1,280; both pages fit two screens."""
    page = opened(crowd, "run")
    said = page.locator(".constant").inner_text()
    assert "learning rate 1.00e-5" in said and "clipped 0" in said and "Worst" not in said
    titles = page.locator(".chart h3").all_inner_texts()
    assert not {"Learning rate", "Slots of a step"} & set(titles) and "Gradient norm" in titles
    reward = page.locator(".chart", has_text="Reward, mean")
    assert "at step 41" in reward.locator(".hidden").text_content()
    stages = page.locator(".chart", has_text="by stage").locator(".hidden").text_content()
    assert "whole step 3.95" in stages and "score 0.28" in stages, "each as it was measured, in no stack"
    assert "recoveries at 20" in reward.locator(".hidden").text_content()
    before = reward.locator("canvas").evaluate("canvas => canvas.toDataURL()")
    page.get_by_label("By", exact=True).select_option("samples")
    reward.locator(".hidden", has_text="at samples 2624").wait_for(state="attached")
    assert "recoveries at 1,280" in reward.locator(".hidden").text_content()
    page.get_by_label("Smoothing").fill("0.9")
    page.get_by_label("Log scale").check()
    page.reload()
    reward.locator(".hidden", has_text="at samples 2624").wait_for(state="attached")
    assert page.get_by_label("Log scale").is_checked()
    assert reward.locator("canvas").evaluate("canvas => canvas.toDataURL()") != before
    assert page.evaluate("document.documentElement.scrollHeight") <= 2 * 900


def test_a_checked_spec_is_previewed_from_the_times_of_a_measured_run(crowd, opened):
    page = opened(crowd, "submit")
    page.get_by_role("button", name="Edit as YAML").click()
    page.locator("#text").fill(json.dumps(SPEC))
    page.get_by_role("button", name="Check and preview").click()
    plan = page.get_by_role("region", name="Plan preview")
    plan.get_by_text("The fastest shape is").wait_for()
    assert "live-1" in plan.inner_text() and plan.locator(".gantt li").count() == 3
    assert plan.locator("tbody tr").count() == 4


def test_the_proof_of_a_run_that_runs_ahead_shows_how_far_its_tokens_lag(crowd, open_page, tmp_path, opened):
    """The newest 50 updates, 12,000 tokens each: half of them are of the base, a third and a sixth lag behind.

    Of the oldest one the version before its base is on the next page: its 4,000 tokens count as its worst ones.
    """
    with CrowdServer(Crowd([("ahead-1", "SUCCEEDED")]), tmp_path) as server:
        page = open_page(f"{server.url}/#/runs/ahead-1/proof")
        panel = page.locator("section.panel", has=page.get_by_role("heading", name="Staleness"))
        panel.wait_for()
        cells = [row.split("\t") for row in panel.locator("tbody tr").all_inner_texts()]
        assert [[cell.strip() for cell in row[:3]] for row in cells] == [
            ["0 steps", "300,000", "50 %"],
            ["1 step", "196,000", "32.7 %"],
            ["2 steps", "104,000", "17.3 %"],
        ]
        assert "0.67 in the mean" in panel.inner_text()
    page = opened(crowd, "proof")
    assert page.get_by_role("heading", name="Staleness").count() == 0


def test_a_token_in_the_link_is_kept_for_the_tab_and_leaves_the_address(guarded, open_page):
    page = open_page(f"{guarded.url}/#token=s3cret")
    page.locator(".runs tbody tr").first.wait_for()
    assert "s3cret" not in page.url
    page.reload()
    page.locator(".runs tbody tr").first.wait_for()
    page.get_by_role("link", name="live-1").click()
    page.locator(".chart").first.wait_for()
    fresh = open_page(guarded.url)
    fresh.get_by_text("needs a token").wait_for()
    fresh.locator("#token").fill("s3cret")
    fresh.keyboard.press("Enter")
    fresh.locator(".runs tbody tr").first.wait_for()


def test_ten_thousand_runs_are_paged_searched_and_filtered(crowd, opened):
    page = opened(crowd, "runs")
    rows = page.locator(".runs tbody tr")
    page.get_by_text(f"of {MANY + len(RUNS):,} runs, page 1").wait_for()
    assert rows.count() == 50
    page.get_by_role("button", name="Older").click()
    page.get_by_text("page 2").wait_for()
    page.get_by_role("link", name="many-46", exact=True).wait_for()
    page.get_by_label("Search run ids").fill("many-9999")
    wait_for(lambda: rows.count() == 1, "one run to match")
    page.get_by_label("Search run ids").fill("")
    page.get_by_role("button", name="FAILED").click()
    page.get_by_role("link", name="failed-1").wait_for()
    wait_for(lambda: rows.count() == 1, "one run to be FAILED")
    page.reload()
    page.get_by_role("link", name="failed-1").wait_for()
    assert rows.count() == 1, "the filter survives a reload"


def test_the_first_paint_is_quick_and_the_keyboard_reaches_everything(crowd, opened):
    page = opened(crowd, "runs")
    timing = json.loads(
        page.evaluate("JSON.stringify(performance.getEntriesByName('first-contentful-paint'))")
    )
    print("first contentful paint", timing[0]["startTime"], "ms")
    sizes = page.evaluate("performance.getEntriesByType('resource').map((e) => [e.name, e.decodedBodySize])")
    assert sum(size for name, size in sizes if "/v1/" not in name) < 300_000
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.get_by_role("link", name="live-1").focus()
    page.keyboard.press("Enter")
    page.locator(".chart").first.wait_for()
    assert page.evaluate("document.activeElement.id") == "main"
    button = page.locator("#theme")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    button.press("Enter")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.reload()
    page.locator(".chart").first.wait_for()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    button = page.get_by_role("button", name="Cancel", exact=True)
    button.press("Enter")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="hidden")


def test_a_timeline_is_walked_zoomed_and_read_as_a_table(crowd, opened):
    page = opened(crowd, "timeline")
    used = page.locator(".chart", has_text="Utilisation").locator(".hidden")
    assert "at step 120: gpu:0 " in used.text_content()
    page.get_by_text("Steps 101 to 120").wait_for()
    page.locator(".lanes").focus()
    told = page.locator(".told")
    for keys, said in (
        (["ArrowRight"], "gpu:0: rollout-0 held it to generate for 2.6 s"),
        (["ArrowRight"], "gpu:0: generate, step 101: 2.2 s"),
        (["ArrowDown"], "gpu:1: generate, step 101: 2 s"),
        (["ArrowDown", "ArrowRight"], "no device: switch, step 101: 0.3 s"),
    ):
        for key in keys:
            page.keyboard.press(key)
        assert said in told.text_content()
    before = page.locator(".lanes").evaluate("canvas => canvas.toDataURL()")
    page.get_by_role("button", name="Zoom in").click()
    assert page.locator(".lanes").evaluate("canvas => canvas.toDataURL()") != before
    page.get_by_text("As a table").click()
    row = page.get_by_role("region", name="Seconds by device and stage").locator("tbody tr").first
    assert row.locator("td").all_text_contents()[0] == "rollout-0 52 s, trainer-0 48 s"
    page.get_by_role("button", name="Older steps").click()
    page.get_by_text("Steps 81 to 100").wait_for()
    page.goto(f"{crowd.url}/#/runs/queued-1/timeline")
    page.get_by_text("Nobody has held a device for this run yet.").wait_for()


def test_without_any_run_the_page_says_what_to_do(open_page, tmp_path):
    with CrowdServer(Crowd([]), tmp_path) as server:
        page = open_page(server.url)
        page.get_by_text("There is no run yet.").wait_for()
        page.goto(f"{server.url}/#/compare")
        page.get_by_text("Choose two runs or more.").wait_for()
