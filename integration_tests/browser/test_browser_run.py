"""A user and a real fleet: submit in the form, watch curves, pause, resume, lose a rollout, reload, restart."""

from __future__ import annotations

import json
import re
import tarfile

import pytest
from harness.specs import BATCH
from harness.waiting import wait_for

PLOTTED = "document.querySelector('.chart .hidden')?.textContent ?? ''"


def plotted_step(page):
    """The newest step of the first plot, as it says to those who cannot see it; -1 before the first one."""
    found = re.search(r"at step (\d+)", page.evaluate(PLOTTED))
    return int(found[1]) if found else -1


def button(page, name):
    return page.get_by_role("button", name=name, exact=True)


def says(page, text):
    page.locator(".row.head .chip", has_text=re.compile(f"^{text}$")).wait_for()


@pytest.fixture
def held(fleet, spec_of, gate):
    """A run of 6 steps that stands still in its third, and its gate."""
    gate.hold_after(2 * BATCH + 3)
    run = fleet.submit(spec_of(steps=6, reward=gate.reward))
    gate.wait_until_held()
    return fleet.reach(run, 2)


def shows_whole(page, fleet, run):
    """Waits until the page shows the newest events of a run that has ended, each once and the newest first."""
    stream = [event.id for event in fleet.client.events(run)]

    def whole():
        shown = page.locator(".events li").evaluate_all(
            "items => items.map((item) => Number(item.dataset.event))"
        )
        return shown and shown == stream[::-1][: len(shown)]

    wait_for(whole, "every event once, the newest first")


def test_a_run_is_submitted_in_the_form_and_its_curves_move(fleet, spec_of, gate, open_page):
    gate.hold_after(2 * BATCH + 3)
    page = open_page(f"{fleet.url}/#token={fleet.token}&/submit")
    page.get_by_role("button", name="Edit as YAML").click()
    wrong = spec_of(name="formed", steps=-3, export=True, reward=gate.reward)
    page.locator("#text").fill(json.dumps(wrong))
    page.get_by_role("button", name="Edit as a form").click()
    button(page, "Check and preview").click()
    page.get_by_text("1 problem").wait_for()
    assert "1" in page.locator("[id='field-steps-problem']").inner_text()
    page.locator("[id='field-steps']").fill("12")
    button(page, "Check and preview").click()
    page.get_by_text("finds nothing wrong").wait_for()
    button(page, "Submit").click()
    page.wait_for_url(re.compile(r"#/runs/formed-"))
    wait_for(lambda: plotted_step(page) == 2, "the step before the one that is held in the plot")
    gate.open()
    wait_for(lambda: plotted_step(page) > 2, "the curve to move")
    says(page, "SUCCEEDED")
    wait_for(lambda: plotted_step(page) == 12, "the last step in the plot")
    run = page.url.rpartition("/")[2]
    shows_whole(page, fleet, run)
    page.goto(f"{fleet.url}/#/runs/{run}/proof")
    links = page.get_by_role("link", name="Download")
    for link, folder in ((links.first, "lineage-1-step-"), (links.last, "export/")):
        with page.expect_download() as found:
            link.click()
        with tarfile.open(found.value.path()) as tar:
            names = tar.getnames()
        assert any(name.startswith(f"{run}-{folder}") for name in names), names


def test_a_run_is_paused_resumed_and_reloaded_and_a_lost_rollout_is_named(fleet, held, gate, open_page):
    page = open_page(f"{fleet.url}/#token={fleet.token}&/runs/{held.id}")
    button(page, "Pause now").click()
    says(page, "PAUSED")
    gate.hold_after(BATCH + 3)
    button(page, "Resume").click()
    fleet.reach(held, 3)
    gate.wait_until_held()
    wait_for(lambda: plotted_step(page) == 3, "step 3 in the plot")
    page.reload()
    wait_for(lambda: plotted_step(page) == 3, "step 3 in the plot after a reload")
    killed = fleet.kill("rollout-0")
    page.locator(".events li, .waits li, .reason", has_text="rollout-0").first.wait_for()
    fleet.replaced("rollout-0", killed)
    gate.open()
    says(page, "SUCCEEDED")
    wait_for(lambda: plotted_step(page) == 6, "the last step in the plot")
    page.get_by_role("link", name="Trajectories").click()
    page.locator(".trajectory summary").first.click()
    page.locator(".trajectory .answer").first.wait_for()
    page.get_by_text("As the model read it").first.click()
    assert page.locator(".read pre").first.inner_text(), "its rollout noted it"
    page.get_by_role("group", name="Colour tokens by").first.get_by_label("advantage").check()
    assert "for each token of this answer" in page.locator(".colours").first.inner_text()
    page.get_by_role("button", name="Its group side by side").first.click()
    page.locator(".side article").first.wait_for()
    assert page.locator(".side article").count() == 4
    page.get_by_role("link", name="Timeline").click()
    page.get_by_text("As a table").click()
    lanes = page.get_by_role("region", name="Seconds by device and stage").locator("tbody tr")
    lanes.first.wait_for()
    holders = " ".join(lanes.locator("td").all_text_contents())
    assert "rollout-0" in holders and "trainer-0" in holders
    page.get_by_role("link", name="Proof").click()
    page.get_by_text("No slot is trained or dropped twice.").wait_for()
    certificates = page.get_by_role("region", name="Certificates").locator("tbody tr:not(.rewind)")
    certificates.first.wait_for()
    assert certificates.count() == 6


def test_a_timeline_shows_nothing_before_its_spans_are_there(fleet, held, gate, open_page):
    page = open_page(f"{fleet.url}/#token={fleet.token}&/runs/{held.id}")
    shown = []

    def note_and_answer(route):
        shown.append((page.get_by_text("As a table").is_visible(), page.locator(".empty").is_visible()))
        route.continue_()

    page.route("**/timeline?*", note_and_answer)
    page.get_by_role("link", name="Timeline").click()
    page.get_by_text("As a table").wait_for()
    assert shown[0] == (False, False)
    gate.open()


def test_a_step_that_is_committed_while_the_curves_are_loaded_again_is_plotted(fleet, held, gate, open_page):
    page = open_page(f"{fleet.url}/#token={fleet.token}&/runs/{held.id}")
    wait_for(lambda: plotted_step(page) == 2, "step 2 in the plot")
    late = []

    def answer_late(route):
        answer = route.fetch()
        if not late:
            late.append(route.request.url)
            gate.hold_after(BATCH + 3)
            fleet.reach(held, 3)
            page.locator(".events li", has_text="Step 3").first.wait_for(state="attached")
        route.fulfill(response=answer)

    page.route("**/curves*", answer_late)
    button(page, "Pause now").click()
    says(page, "PAUSED")
    button(page, "Resume").click()
    wait_for(lambda: plotted_step(page) == 3, "step 3 in the plot")
    gate.open()


def test_a_page_goes_on_without_gap_or_repeat_when_the_coordinator_was_away(fleet, held, gate, open_page):
    page = open_page(f"{fleet.url}/#token={fleet.token}&/runs/{held.id}")
    wait_for(lambda: plotted_step(page) == 2, "step 2 in the plot")
    killed = fleet.kill("coordinator")
    page.get_by_text("Reconnecting…").wait_for()
    fleet.replaced("coordinator", killed)
    gate.open()
    says(page, "SUCCEEDED")
    wait_for(lambda: plotted_step(page) == 6, "the last step in the plot")
    page.locator("#link:empty").wait_for(state="attached")
    shows_whole(page, fleet, held.id)


def test_a_chart_of_ones_own_is_in_the_address_and_any_chart_is_saved(crowd, open_page):
    page = open_page(f"{crowd.url}/#/runs/live-1")
    page.locator("#own-figure").select_option("train/reward")
    button(page, "Add").click()
    page.locator("#own-figure").select_option("speed/step_seconds")
    page.locator("#own-chart").select_option("0")
    button(page, "Add").click()
    own = page.locator(".chart", has=page.get_by_role("heading", name="reward, step seconds"))
    own.wait_for()
    page = open_page(page.url)  # a link that somebody else opens
    own = page.locator(".chart", has=page.get_by_role("heading", name="reward, step seconds"))
    with page.expect_download() as found:
        own.get_by_role("button", name="as CSV").click()
    rows = found.value.path().read_text(encoding="utf-8").splitlines()
    assert found.value.suggested_filename == "reward-step-seconds.csv"
    assert rows[0] == "step,reward,step seconds" and len(rows) > 10 and rows[1].startswith("1,")
    with page.expect_download() as found:
        own.get_by_role("button", name="as PNG").click()
    assert found.value.path().read_bytes().startswith(b"\x89PNG")
    button(page, "Remove reward, step seconds").click()
    own.wait_for(state="detached")
    assert "own=" not in page.url


def test_a_policy_that_acts_has_returns_and_actions_in_place_of_rewards_and_tokens(crowd, open_page):
    page = open_page(f"{crowd.url}/#/runs/robot-1")
    page.locator(".chart").first.wait_for()
    heads = " ".join(page.locator(".chart h3").all_inner_texts())
    assert "Return, mean ± spread" in heads and "Actions per second" in heads
    assert not re.search("[Tt]oken|Reward|Answer", heads)
    page = open_page(f"{crowd.url}/#/runs/live-1")
    page.get_by_role("heading", name="Reward, mean ± spread").wait_for()
