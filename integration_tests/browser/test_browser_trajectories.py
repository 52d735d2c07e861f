"""Trajectories, conversations, episodes and evaluations of made-up runs, as the dashboard shows them."""

from __future__ import annotations

import os

import pytest
from harness.crowd_files import HOSTILE
from harness.waiting import wait_for


def test_hostile_text_stays_text(crowd, opened):
    page = opened(crowd, "trajectories")
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    page.locator(".trajectory summary").first.click()
    answer = page.locator(".trajectory .answer").first
    answer.wait_for()
    assert answer.text_content() == HOSTILE
    assert page.locator("main img, main script").count() == 0
    page.goto(f"{crowd.url}/#/runs/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
    page.get_by_text("there is no run <img").wait_for()


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_a_conversation_shows_who_said_what_and_a_tools_text_stays_text(
    crowd, open_page, inaccessible, width, theme
):
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
    assert inaccessible(page) == [], (width, theme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if directory := os.environ.get("PICTURES"):
        page.screenshot(path=f"{directory}/conversation-{width}-{theme}.png", full_page=True)


@pytest.mark.parametrize("width", [1280, 390])
def test_a_long_conversation_is_folded_searched_and_gone_through_by_its_errors(
    crowd, open_page, inaccessible, width
):
    page = open_page(f"{crowd.url}/#/runs/talk-1/trajectories", width=width, bypass_csp=True)
    page.locator(".trajectory summary").nth(4).click()
    talk = page.locator(".talk").last
    said = talk.locator("> li")
    said.nth(600).wait_for(state="attached")
    folded = said.nth(2).locator("details")
    assert folded.locator("summary").inner_text().startswith("60 lines, ")
    assert not folded.locator("pre").is_visible()
    find = page.get_by_role("group", name="Find in this conversation").last
    find.get_by_label("Search this conversation").fill("OF ANSWER 123")
    find.get_by_role("button", name="Next", exact=True).click()
    assert find.get_by_role("status").inner_text() == "match 1 of 1"
    found = talk.locator(".found")
    assert found.locator("pre").is_visible() and "line 59 of answer 123" in found.inner_text()
    assert found.evaluate("each => each.getBoundingClientRect().top < innerHeight")
    for number in ("1", "2", "1"):
        find.get_by_role("button", name="Next error (2)").click()
        assert find.get_by_role("status").inner_text() == f"error {number} of 2"
        assert "error: no such file" in talk.locator(".found").inner_text()
    find.get_by_label("Search this conversation").fill("nowhere")
    find.get_by_label("Search this conversation").press("Enter")
    assert find.get_by_role("status").inner_text() == "no match"
    figures = page.locator(".turns").last
    figures.locator("summary").click()
    rows = figures.locator("tbody tr")
    assert rows.count() == 300
    assert rows.nth(8).locator("th, td").all_inner_texts() == ["9", "2", "-0.5", "0", "–", "19", "1"]
    assert inaccessible(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if directory := os.environ.get("PICTURES"):
        page.screenshot(path=f"{directory}/long-conversation-{width}.png")


def test_a_session_is_a_tree_of_its_branches_and_shows_what_the_model_read(crowd, open_page, inaccessible):
    """A search opens the branch that has what it found; messages that a branch begins with are no matches again."""
    page = open_page(f"{crowd.url}/#/runs/agent-1/trajectories", bypass_csp=True)
    page.locator(".trajectory summary").first.click()
    below = page.locator(".branches").first.locator(":scope > li")
    heads = page.locator(".branches > li > details > summary").all_inner_texts()
    assert [" ".join(head.split()) for head in heads] == [
        "Branch 1 2 turns; reward 0.25; 1 error",
        "Branch 2 2 turns; reward 0.75; begins as branch 1 for 2 messages",
        "Branch 3 1 turn; reward 0.25",
    ]
    assert below.count() == 2 and below.first.locator(".branches > li").count() == 1
    page.locator(".branches .branches > li > details > summary").click()
    find = page.get_by_role("group", name="Find in this conversation")
    for text, says in (("def test", "match 1 of 1"), ("work on files", "match 1 of 1")):
        find.get_by_label("Search this conversation").fill(text)
        find.get_by_role("button", name="Next", exact=True).click()
        assert find.get_by_role("status").inner_text() == says
        assert page.locator(".found").is_visible()
    find.get_by_role("button", name="Next error (1)").click()
    assert "error: no such file" in page.locator(".found").inner_text()
    page.get_by_text("As the model read it").click()
    read = page.locator(".read pre")
    read.nth(2).wait_for()
    assert read.count() == 3 and read.nth(1).locator("mark").all_inner_texts() == [
        "Read.<|end|>",
        "Done.<|end|>",
    ]
    assert read.first.inner_text().startswith("<|system|>You work on files.")
    assert inaccessible(page) == []


def test_tokens_are_coloured_over_the_text(crowd, opened):
    page = opened(crowd, "trajectories")
    page.locator(".trajectory summary").first.click()
    colours = page.get_by_role("group", name="Colour tokens by").first
    answer = page.locator(".trajectory .answer").first
    seen = []
    for name, says in (
        ("log-prob", "lowest -4.6 nats"),
        ("advantage", "made"),
        ("version", "version 11: 10 tokens"),
        ("ratio", "against that when it was sampled: 0.779 to 1.284"),
    ):
        colours.get_by_label(name, exact=True).check()
        assert says in colours.inner_text()
        assert answer.text_content() == HOSTILE, "no token is lost, and none is cut in a character"
        pieces = answer.locator(".token")
        seen.append(pieces.evaluate_all("all => all.map((each) => getComputedStyle(each).backgroundColor)"))
    by_log_prob, by_advantage, by_version, by_ratio = seen
    assert len(set(by_log_prob)) > 3 and len(set(by_ratio)) == 2, "likelier or less likely, by as much"
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
    assert "Return" in page.locator("main").inner_text().split()
    shown = page.evaluate("getComputedStyle(document.querySelector('.trajectory .excerpt bdi')).unicodeBidi")
    assert shown == "isolate", "a mark of direction in a prompt turns nothing beside it"
    lines.first.click()
    shown = page.locator(".trajectory .body").first.inner_text()
    assert "Log-prob of each action" in shown and "Actions\n24" in shown
    assert not {"Answer", "Reference", "Tokens"} & set(shown.split())


def test_a_start_state_is_played_again_by_one_click(crowd, open_page):
    page = open_page(f"{crowd.url}/#/runs/robot-1/trajectories")
    page.get_by_role("button", name="Play again: 0001-0-push-seed-1-success.mp4").click()
    page.wait_for_url("**/#/evaluations/eval-0")
    (asked,) = crowd.crowd.asked
    assert (asked.checkpoint.run, asked.suite.options["only"], asked.suite.options["videos"]) == (
        "robot-1",
        1,
        1,
    )
    page.goto(f"{crowd.url}/#/runs/robot-1/trajectories")
    page.locator(".trajectory summary").first.click()
    page.locator(".trajectory .body").get_by_role("button", name="Play again").click()
    page.locator(".trajectory .body").get_by_role("alert").get_by_text(
        "robot-1 has no start state"
    ).wait_for()
    assert len(crowd.crowd.asked) == 1, "words that name no start state begin nothing"


def test_demonstrations_are_browsed_as_episodes_are(crowd, opened):
    page = opened(crowd, "demonstrations")
    page.get_by_text("2 episodes of").wait_for()
    page.get_by_role("button", name="Watch demonstration 1").click()
    shown = page.locator(".episode")
    picture = shown.get_by_alt_text("Camera front")
    picture.wait_for()
    read = """async (image) => {
        const canvas = new OffscreenCanvas(1, 1).getContext("2d");
        await image.decode();
        canvas.drawImage(image, 0, 0);
        return canvas.getImageData(0, 0, 1, 1).data[0];
    }"""
    wait_for(lambda: picture.evaluate(read) == 0, "the picture of the start")
    shown.get_by_role("slider").fill("3")
    shown.get_by_text("Step 3 of 6").wait_for()
    wait_for(lambda: picture.evaluate(read) == 120, "the picture of step 3")
    assert "action 0.5, 1" in shown.locator(".says").inner_text()
    page.get_by_role("button", name="Watch demonstration 1").click()
    shown.wait_for(state="detached")


def test_trajectories_are_found_by_text_and_their_rewards_shown_by_step(crowd, opened):
    page = opened(crowd, "trajectories")
    heat = page.locator(".heat")
    heat.hover(position={"x": 3, "y": 3})
    page.get_by_text("Step 1: 16 trajectories with a reward from 0.688 to 0.75").wait_for()
    page.get_by_label("Text in prompt").fill("q70: <IMG")
    page.get_by_role("button", name="Show", exact=True).click()
    page.get_by_text("4 trajectories on page 1").wait_for()
    page.get_by_label("Nothing from").select_option("exact")
    page.get_by_role("button", name="Show", exact=True).click()
    page.get_by_text("No trajectory matches.").wait_for()


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


def test_evaluations_are_chosen_and_compared_item_by_item(crowd, opened):
    """Of twelve items each third got a reward that is one higher."""
    page = opened(crowd, "evaluations")
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


def test_an_evaluation_shows_its_figures_and_answers_and_is_a_run_too(crowd, opened):
    page = opened(crowd, "evaluation")
    figures = page.get_by_role("region", name="Figures", exact=True).locator("tbody tr").all_inner_texts()
    assert [row.split()[0] for row in figures] == ["greedy", "pass@4"] and "0.4 to 0.7" in figures[0]
    assert page.get_by_role("region", name="Figures by task").locator("tbody tr").count() == 2
    page.get_by_label("Step", exact=True).fill("1")
    page.get_by_role("button", name="Show", exact=True).click()
    page.wait_for_url("**/#/evaluations/eval-0?step=1")
    page.locator(".trajectory").first.wait_for()
    page.get_by_role("link", name="Events and timeline").click()
    page.wait_for_url("**/#/runs/eval-0")


def test_an_episode_is_watched_step_by_step(crowd, opened):
    """Also where the browser does not play H.264, as here: the slider moves what is said and what the plots mark."""
    page = opened(crowd, "evaluation")
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


def test_two_policies_are_watched_side_by_side_from_the_same_start(crowd, open_page, inaccessible):
    page = open_page(f"{crowd.url}/#/evaluations?compare=eval-0,eval-1", bypass_csp=True)
    page.get_by_role("button", name="Watch both").first.click()
    said = page.locator(".pairs .episode .says")
    said.nth(1).get_by_text("Step 0 of 5").wait_for()
    heads = page.locator(".pairs article h3").all_inner_texts()
    assert [head for head in heads if ":" in head] == ["eval-0: failure", "eval-1: success"]
    page.get_by_role("button", name="Play both from the start").click()
    assert inaccessible(page) == []
    page.goto(f"{crowd.url}/#/evaluations/eval-0")
    success = page.get_by_role("region", name="Videos").locator("td[data-head=Success]")
    success.nth(1).wait_for()
    assert success.all_inner_texts() == ["no", "yes"], "failures first"


def test_a_training_episode_is_watched_among_the_runs_trajectories(crowd, open_page):
    page = open_page(f"{crowd.url}/#/runs/robot-1/trajectories")
    page.locator(".trajectory").first.wait_for()
    page.get_by_role("button", name="Watch step 3, item 1, sample 0").click()
    page.locator(".episode .says").get_by_text("Step 0 of 5, chunk 1: the start; action 0, -0.5").wait_for()
    assert page.locator(".episode .chart").count() == 2
    page.goto(f"{crowd.url}/#/runs/done-1/trajectories")
    page.locator(".trajectory").first.wait_for()
    assert page.get_by_role("heading", name="Videos").count() == 0
