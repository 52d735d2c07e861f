"""Every view over made-up runs: hostile text, tokens, many runs, small screens, the keyboard, axe-core."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from harness.crowd import (
    Crowd,
    CrowdServer,
    write_conversations,
    write_episodes,
    write_timeline,
    write_trajectories,
)
from harness.waiting import wait_for

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>&amp;\u202e{{7*7}}"
RUNS = [
    ("live-1", "RUNNING"),
    ("queued-1", "QUEUED"),
    ("done-1", "SUCCEEDED"),
    ("failed-1", "FAILED"),
    ("talk-1", "SUCCEEDED"),
    ("robot-1", "SUCCEEDED"),
]
MANY = 10_000
SPEC = {
    "name": "sums",
    "model": {"path": "owner/model"},
    "data": {"source": "copy_digits", "heldout": 10},
    "reward": {"scorers": [{"name": "exact"}]},
}
CUT = """[...document.querySelectorAll('.scroll')].filter((each) => each.scrollWidth > each.clientWidth + 1)
    .map((each) => each.getAttribute('aria-label'))"""
VIEWS = {
    "runs": ("#/runs", ".runs tbody tr"),
    "run": ("#/runs/live-1", ".chart"),
    "timeline": ("#/runs/done-1/timeline", ".lanes"),
    "trajectories": ("#/runs/done-1/trajectories", ".trajectory"),
    "proof": ("#/runs/done-1/proof", "table"),
    "spec": ("#/runs/done-1/spec", "pre"),
    "fleet": ("#/fleet", ".devices li"),
    "compare": ("#/compare?runs=done-1,failed-1", ".chart"),
    "submit": ("#/submit", ".section"),
    "evaluations": ("#/evaluations", "tbody tr"),
    "evaluation": ("#/evaluations/eval-0", ".trajectory"),
    "evaluations compared": ("#/evaluations?compare=eval-0,eval-1", ".trajectory"),
}


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data") / "runs"
    (directory.parent / "logs").mkdir()
    lines = [{"level": "info", "message": "ready"}, {"level": "error", "message": "<b>CUDA error</b>"}]
    (directory.parent / "logs" / "rollout-0.log").write_text("\n".join(map(json.dumps, lines)))
    write_trajectories(directory / "done-1", 12, 64, HOSTILE)
    write_timeline(directory / "done-1", 120)
    write_conversations(directory / "talk-1", HOSTILE)
    write_episodes(directory / "robot-1", HOSTILE)
    write_trajectories(directory / "many-0", 1563, 64, "The answer is 42.")
    for number in range(2):
        write_trajectories(directory / f"eval-{number}", 1, 48, HOSTILE, better=number)
    many = [(f"many-{number}", "SUCCEEDED") for number in range(MANY)]
    with CrowdServer(Crowd([*RUNS, *many], ["eval-0", "eval-1"]), directory) as server:
        yield server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    with CrowdServer(Crowd(RUNS), tmp_path_factory.mktemp("runs"), token="s3cret") as server:
        yield server


def opened(open_page, server, view, **options):
    path, mark = VIEWS[view]
    page = open_page(f"{server.url}/{path}", **options)
    page.locator(mark).first.wait_for()
    return page


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_accessible_small_and_fits_a_phone(crowd, open_page, view):
    for width, theme in ((1280, "light"), (390, "dark")):
        page = opened(open_page, crowd, view, width=width, color_scheme=theme, bypass_csp=True)
        page.add_script_tag(path=AXE)
        found = page.evaluate("async () => (await axe.run()).violations")
        grave = [
            (each["id"], [node["html"][:200] for node in each["nodes"][:3]])
            for each in found
            if each["impact"] in ("serious", "critical")
        ]
        assert not grave, (width, theme, grave)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelectorAll('*').length") <= 2000
        assert page.evaluate(CUT) == [], "no table is cut"


def test_hostile_text_stays_text(crowd, open_page):
    page = opened(open_page, crowd, "trajectories")
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    page.locator(".trajectory summary").first.click()
    answer = page.locator(".trajectory .answer").first
    answer.wait_for()
    assert answer.text_content() == HOSTILE
    assert page.locator("main img, main script").count() == 0
    page.goto(f"{crowd.url}/#/runs/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
    page.get_by_text("there is no run <img").wait_for()


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_a_conversation_shows_who_said_what_and_a_tools_text_stays_text(crowd, open_page, width, theme):
    page = open_page(
        f"{crowd.url}/#/runs/talk-1/trajectories", width=width, color_scheme=theme, bypass_csp=True
    )
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    page.locator(".trajectory summary").first.click()
    said = page.locator(".talk").first.locator("> li")
    said.nth(4).wait_for()
    whos = said.locator(".who").all_inner_texts()
    assert [" ".join(who.split()) for who in whos] == [
        "system given, no loss",
        "user given, no loss",
        "assistant, turn 1 reward -0.25 24 tokens with loss, version 1",
        "tool given, no loss",
        "assistant, turn 2 reward 1 6 tokens with loss, version 1",
    ]
    assert said.nth(3).locator("pre").text_content() == HOSTILE
    assert page.locator("main img, main script").count() == 0
    assert said.nth(2).locator(".call").inner_text() == 'calls calculator {"expression": "17 * 23"}'
    assert said.nth(2).locator(".token").count() > 3 and said.nth(4).locator(".token").count() > 1
    assert said.nth(3).locator(".token").count() == 0, "what was given has no log-probs"
    assert "TERMINATED" in page.locator(".trajectory .body").first.inner_text()
    page.add_script_tag(path=AXE)
    found = page.evaluate("async () => (await axe.run()).violations")
    grave = [(each["id"], each["nodes"][0]["html"][:200]) for each in found
             if each["impact"] in ("serious", "critical")]  # fmt: skip
    assert not grave, (width, theme, grave)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if directory := os.environ.get("PICTURES"):
        page.screenshot(path=f"{directory}/conversation-{width}-{theme}.png", full_page=True)


def test_tokens_are_coloured_over_the_text(crowd, open_page):
    page = opened(open_page, crowd, "trajectories")
    page.locator(".trajectory summary").first.click()
    colours = page.get_by_role("group", name="Colour tokens by").first
    answer = page.locator(".trajectory .answer").first
    seen = []
    for name, says in (
        ("log-prob", "lowest -4.6 nats"),
        ("advantage", "made"),
        ("version", "version 11: 10 tokens"),
    ):
        colours.get_by_label(name, exact=True).check()
        assert says in colours.inner_text()
        assert answer.text_content() == HOSTILE, "no token is lost, and none is cut in a character"
        pieces = answer.locator(".token")
        seen.append(pieces.evaluate_all("all => all.map((each) => getComputedStyle(each).backgroundColor)"))
    by_log_prob, by_advantage, by_version = seen
    assert len(set(by_log_prob)) > 3
    assert len(by_advantage) == 1 and len(by_version) == 2
    page.get_by_text("Its group side by side").first.click()
    page.locator(".side article").nth(3).wait_for()


def test_a_robots_episodes_are_told_in_words_of_robots(crowd, open_page):
    page = open_page(f"{crowd.url}/#/runs/robot-1/trajectories?order=oldest")
    lines = page.locator(".trajectory summary")
    lines.nth(2).wait_for()
    found = lines.all_inner_texts()
    assert "episode succeeded after 12 steps, return 0.96" in found[0] and "24 actions" in found[0]
    assert "did not succeed after 24 steps" in found[1] and "lost: its process was killed" in found[2]
    lines.first.click()
    shown = page.locator(".trajectory .body").first.inner_text()
    assert "Log-prob of each action" in shown and "Actions\n24" in shown
    assert not {"Answer", "Reference", "Tokens"} & set(shown.split())


def test_trajectories_are_found_by_text_and_their_rewards_shown_by_step(crowd, open_page):
    page = opened(open_page, crowd, "trajectories")
    heat = page.locator(".heat")
    heat.hover(position={"x": 3, "y": 3})
    page.get_by_text("Step 1: 16 trajectories with a reward from 0.688 to 0.75").wait_for()
    page.get_by_label("Text in prompt").fill("q70: <IMG")
    page.get_by_role("button", name="Show", exact=True).click()
    page.get_by_text("4 trajectories on page 1").wait_for()
    page.get_by_label("Nothing from").select_option("exact")
    page.get_by_role("button", name="Show", exact=True).click()
    page.get_by_text("No trajectory matches.").wait_for()


def test_logs_of_an_instance_are_shown_by_level(crowd, open_page):
    page = opened(open_page, crowd, "fleet")
    page.get_by_label("Instance", exact=True).select_option("rollout-0")
    page.get_by_text("The newest 2 lines of rollout-0").wait_for()
    page.get_by_label("Least level").select_option("error")
    page.get_by_text("The newest 1 line of rollout-0").wait_for()
    assert "<b>CUDA error</b>" in page.locator(".log").inner_text()
    page.get_by_label("Instance", exact=True).select_option("trainer-0")
    page.get_by_text("in containers see").wait_for()


def test_an_instance_is_drained_after_a_question(crowd, open_page):
    page = opened(open_page, crowd, "fleet")
    page.get_by_role("button", name="Drain rollout-0").click()
    page.get_by_role("dialog").get_by_role("button", name="Back").click()
    assert crowd.crowd.drained == []
    page.get_by_role("button", name="Drain rollout-0").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain", exact=True).click()
    page.get_by_text("rollout-0 was told to drain").wait_for()
    assert crowd.crowd.drained == ["rollout-0"]


def test_the_flow_of_the_step_in_hand_says_what_is_behind(crowd, open_page):
    page = opened(open_page, crowd, "run")
    places = page.locator(".flow li")
    wait_for(lambda: places.first.locator("b").inner_text() == "14", "the counts of the step in hand")
    assert places.locator("b").all_inner_texts() == ["14", "18", "6", "8", "16"]
    assert "rollout-0 10, rollout-1 8" in places.nth(1).inner_text()
    page.get_by_text("Step 42: 64 slots. Generation is at work. 2 slots dropped.").wait_for()
    page.goto(f"{crowd.url}/#/runs/done-1")
    page.locator(".chart").first.wait_for()
    assert not page.locator(".flow").is_visible()


def test_curves_fold_what_is_constant_and_are_smoothed_over_samples(crowd, open_page):
    """After 41 steps of 64 samples a rewind at step 20 stands at 1,280; both pages fit two screens."""
    page = opened(open_page, crowd, "run")
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


def test_a_checked_spec_is_previewed_from_the_times_of_a_measured_run(crowd, open_page):
    page = opened(open_page, crowd, "submit")
    page.get_by_role("button", name="Edit as YAML").click()
    page.locator("#text").fill(json.dumps(SPEC))
    page.get_by_role("button", name="Check and preview").click()
    plan = page.get_by_role("region", name="Plan preview")
    plan.get_by_text("The fastest shape is").wait_for()
    assert "live-1" in plan.inner_text() and plan.locator(".gantt li").count() == 3
    assert plan.locator("tbody tr").count() == 4


def test_the_proof_of_a_run_that_runs_ahead_shows_how_far_its_tokens_lag(crowd, open_page, tmp_path):
    """A page of 50 updates, at most two behind: by hand 50, 49 and 48 of them have tokens of each lag."""
    with CrowdServer(Crowd([("ahead-1", "SUCCEEDED")]), tmp_path) as server:
        page = open_page(f"{server.url}/#/runs/ahead-1/proof")
        panel = page.locator("section.panel", has=page.get_by_role("heading", name="Staleness"))
        panel.wait_for()
        cells = [row.split("\t") for row in panel.locator("tbody tr").all_inner_texts()]
        assert [[cell.strip() for cell in row[:3]] for row in cells] == [
            ["0 steps", "300,000", "50.7 %"],
            ["1 step", "196,000", "33.1 %"],
            ["2 steps", "96,000", "16.2 %"],
        ]
        assert "0.66 in the mean" in panel.inner_text()
    page = opened(open_page, crowd, "proof")
    assert page.get_by_role("heading", name="Staleness").count() == 0


def test_evaluations_are_chosen_and_compared_item_by_item(crowd, open_page):
    """Of twelve items each third got a reward that is one higher."""
    page = opened(open_page, crowd, "evaluations")
    for name in ("eval-0", "eval-1"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("link", name="Compare 2").click()
    page.get_by_text("4 items got other rewards").wait_for()
    cells = page.get_by_role("region", name="Differences").locator("tbody td").all_inner_texts()
    assert [cell.strip() for cell in cells] == [
        "0.5", "0.6", "+0.1", "−0.05 to +0.25", "3", "1", "8", "0.625",
    ]  # fmt: skip
    page.locator(".trajectory summary").first.click()
    page.locator(".trajectory .side article").nth(1).wait_for()
    assert page.locator(".trajectory .side article").count() == 2
    assert page.locator("main img, main script").count() == 0, "hostile text is no markup"


def test_an_evaluation_shows_its_figures_and_answers_and_is_a_run_too(crowd, open_page):
    page = opened(open_page, crowd, "evaluation")
    figures = page.get_by_role("region", name="Figures", exact=True).locator("tbody tr").all_inner_texts()
    assert [row.split()[0] for row in figures] == ["greedy", "pass@4"] and "0.4 to 0.7" in figures[0]
    assert page.get_by_role("region", name="Figures by task").locator("tbody tr").count() == 2
    page.get_by_label("Step", exact=True).fill("1")
    page.get_by_role("button", name="Show", exact=True).click()
    page.wait_for_url("**/#/evaluations/eval-0?step=1")
    page.locator(".trajectory").first.wait_for()
    page.get_by_role("link", name="Events and timeline").click()
    page.wait_for_url("**/#/runs/eval-0")


def test_an_episode_is_watched_step_by_step(crowd, open_page):
    """Also where the browser does not play H.264, as here: the slider moves what is said and what the plots mark."""
    page = opened(open_page, crowd, "evaluation")
    watch = page.get_by_role("button", name="Watch item 1, sample 0")
    watch.click()
    said = page.locator(".episode .says")
    said.get_by_text("Step 0 of 5, chunk 1: the start; action 0, -0.5").wait_for()
    assert page.locator(".episode video").get_attribute("src").startswith("blob:")
    slider = page.get_by_label("Step, of 5 actions")
    slider.fill("3")
    said.get_by_text("Step 3 of 5, chunk 2: reward 0.25, return 0.25; action 0.3, -0.5").wait_for()
    slider.press("End")
    said.get_by_text("Step 5 of 5, chunk 3: reward 1, return 1.25, success; the end").wait_for()
    assert page.locator(".episode .chart").count() == 2
    watch.click()
    page.locator(".episode").wait_for(state="detached")


def test_a_training_episode_is_watched_among_the_runs_trajectories(crowd, open_page):
    page = open_page(f"{crowd.url}/#/runs/robot-1/trajectories")
    page.locator(".trajectory").first.wait_for()
    page.get_by_role("button", name="Watch step 3, item 1, sample 0").click()
    page.locator(".episode .says").get_by_text("Step 0 of 5, chunk 1: the start; action 0, -0.5").wait_for()
    assert page.locator(".episode .chart").count() == 2
    page.goto(f"{crowd.url}/#/runs/done-1/trajectories")
    page.locator(".trajectory").first.wait_for()
    assert page.get_by_role("heading", name="Videos").count() == 0


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


def test_ten_thousand_runs_are_paged_searched_and_filtered(crowd, open_page):
    page = opened(open_page, crowd, "runs")
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


def test_a_hundred_thousand_trajectories_are_sorted_and_paged(crowd, open_page):
    page = open_page(f"{crowd.url}/#/runs/many-0/trajectories?order=best")
    rows = page.locator(".trajectory")
    rows.first.wait_for()
    assert rows.count() == 25 and "0.75" in rows.first.inner_text()
    page.get_by_role("button", name="Next").click()
    page.get_by_text("page 2").wait_for()
    page.locator("#step").fill("1563")
    page.get_by_role("button", name="Show").click()
    page.locator(".trajectory", has_text="step 1563").first.wait_for()
    assert page.evaluate("document.querySelectorAll('*').length") <= 2000


def test_the_first_paint_is_quick_and_the_keyboard_reaches_everything(crowd, open_page):
    page = opened(open_page, crowd, "runs")
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


def test_a_timeline_is_walked_zoomed_and_read_as_a_table(crowd, open_page):
    page = opened(open_page, crowd, "timeline")
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
