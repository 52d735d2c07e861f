"""Web pages in a real Chromium: the made shop's three tasks, and a site of one's own.

Where Playwright is: `make simulators SIM=web`, then .envs/web/bin/python -m pytest.
"""

from __future__ import annotations

import io
import re
import shutil
from importlib.util import find_spec

import pytest
from headrace.simulator.v1 import simulator_pb2
from headrace_environments.web.browser import NAMES
from headrace_environments.web.shop import ADDRESS, Shop
from headrace_simulator.backends import create
from headrace_simulator.backends.base import BackendError

OK = simulator_pb2.OUTCOME_STATUS_OK
LOST = simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST
with_browser = pytest.mark.skipif(
    find_spec("playwright") is None or not any(map(shutil.which, NAMES)), reason="make simulators SIM=web"
)
# Keeps what is typed in the browser, asks another host for something, and may fall over.
SITE = """
PAGE = '''<title>form</title><form><input aria-label="name">
<select aria-label="size"><option>small<option>large</select><button>go</button></form><script>
document.title = localStorage.told || "new"; localStorage.told = "old";
fetch("http://other.test/").catch(() => document.body.append(Object.assign(document.createElement("button"),
  {{ innerText: "alone" }})));
document.forms[0].onsubmit = event => {{ event.preventDefault();
  document.title = [...document.forms[0].elements].map(each => each.value).join(" ") }}
</script>'''


class Form:
    def __init__(self, broken=False):
        self.broken = broken

    def open(self, seed, item):
        return "http://form.test/", item.get("question", "fill")

    def serve(self, method, url, body):
        return PAGE.replace("{{", "{").replace("}}", "}") if url.startswith("http://form.test/") else None

    def judge(self, page, answer):
        if self.broken:
            raise RuntimeError("the judge fell over")
        if answer is not None:
            return float(answer == "done"), True
        return 0.1 * (page.title() == "Ada large"), False
"""


def told(outcome) -> str:
    assert outcome.status == OK, outcome.detail
    return outcome.messages[-1].content if outcome.messages else ""


def number_of(text: str, words: str) -> str:
    """The number that the list gives to what begins with some words."""
    return next(
        line.partition(" ")[0] for line in text.split("\n") if line.partition(" ")[2].startswith(words)
    )


@with_browser
async def test_the_shop_s_three_tasks_are_solved_by_who_reads_the_page(simulator):
    for task in ("find", "cheapest", "several"):
        pool = await simulator.open(
            f"shop/{task}", backend="web", options={"observe": "list", "mistake": -0.1}, step_timeout_s=30.0
        )
        for seed in (2,):
            asked, page, *lines = told(await pool.reset(seed=seed)).split("\n")
            assert page == "shop" and len(lines) == 3
            prices = {line.split()[1]: int(line.split()[2]) for line in lines}
            wanted = min(prices, key=prices.__getitem__) if task == "cheapest" else asked.split()[-1]
            wrong = await pool.say("9")
            assert (
                told(wrong).startswith("error: there is no '9'; there are 1 to 3")
                and round(wrong.reward, 9) == -0.1
            )
            done = await pool.say(number_of("\n".join(lines), wanted))
            if task != "find":
                text = told(done)
                assert text.startswith(f"{wanted}\n")
                if task == "several":
                    text = told(await pool.say(f"type {number_of(text, 'textbox')} {asked.split()[0]}"))
                done = await pool.say(f"click {number_of(text, 'pay')}")
            assert (done.status, done.reward, done.terminated, done.success) == (OK, 1.0, True, True), (
                done.detail
            )
        # Whatever else is ordered is worth less.
        lines = told(await pool.reset(seed=1)).split("\n")[2:]
        other = next(at for at, line in enumerate(lines, 1) if asked.split()[-1] not in line)
        done = await pool.say(str(other))
        if task != "find":
            done = await pool.say(number_of(told(done), "pay"))
        assert done.reward in (0.2, 0.5) and done.terminated and not done.success


@with_browser
async def test_a_site_of_one_s_own_is_alone_and_each_episode_is_new(simulator, tmp_path):
    (tmp_path / "form.py").write_text(SITE)
    pool = await simulator.open(
        "form.py:Form", backend="web", options={"observe": "tree"}, count=2, processes=1, step_timeout_s=30.0
    )
    for place in range(2):
        tree = told(await pool.reset(place, seed=1, options={"question": "go on"}))
        assert tree.startswith("go on\n") and 'textbox "name" [ref=e' in tree and "[box=" not in tree
    name, size, go = (tree.partition(f'{words}"')[2].partition("[ref=")[2].partition("]")[0] for words in (
        'textbox "name', 'combobox "size', 'button "go'
    ))  # fmt: skip
    assert "error: there is no 'e99' on this page" in told(await pool.say("click e99"))
    for said in (f"type {name} Ada", f"choose {size} large"):
        assert (await pool.say(said)).reward == 0.0
    done = await pool.say(f"click {go}")
    assert round(done.reward, 9) == 0.1 and not done.terminated
    ended = await pool.say("answer done")
    assert (ended.reward, ended.terminated, ended.success) == (1.0, True, True)
    listed = await simulator.open(
        "form.py:Form", backend="web", options={"observe": "list"}, step_timeout_s=30.0
    )
    for _ in range(2):  # What a page stored is gone, and another host is not asked.
        text = told(await listed.reset(seed=1))
        while "alone" not in text:
            text = told(await listed.say("scroll down"))
        assert text.split("\n")[-5] == "new", text
    broken = await simulator.open(
        "form.py:Form", backend="web", options={"site": {"broken": True}}, step_timeout_s=30.0
    )
    await broken.reset(seed=1)
    lost = await broken.say("scroll down")
    assert lost.status == LOST and "the judge fell over" in lost.detail


@with_browser
async def test_a_screenshot_is_an_image_in_which_what_may_be_used_is_numbered(simulator):
    from PIL import Image

    options = {"observe": "screenshot", "width": 160, "height": 96}
    pool = await simulator.open("shop/several", backend="web", options=options, step_timeout_s=30.0)
    assert pool.opened.images
    begun = await pool.reset(seed=1)
    (message,) = begun.messages
    assert message.content.endswith("<image>") and len(message.content.split("\n")) == 2
    picture = Image.open(io.BytesIO(message.images[0].data)).convert("RGB")
    assert picture.size == (160, 96)
    yellow = sum(pixel == (255, 255, 0) for pixel in picture.getdata())
    assert yellow > 60, "three numbers"
    (message,) = (await pool.say("1")).messages
    assert message.images[0].digest != begun.messages[0].images[0].digest


def test_the_shop_s_words_are_of_the_tiny_model_s_letters():
    characters = set("0123456789 =+->:,.?\nacdoprsty")
    for task in ("find", "cheapest", "several"):
        for seed in range(30):
            site = Shop(task, things=13)
            url, asked = site.open(seed, {})
            assert set(asked) <= characters and url == f"{ADDRESS}/"
            page = site.serve("GET", url, "")
            assert page is not None and set(re.sub("<title>shop</title>|<[^>]*>", "", page)) <= characters
    assert site.serve("GET", "http://elsewhere.test/", "") is None
    assert site.judge(None, "cat") == (0.0, False)


@with_browser
@pytest.mark.parametrize(
    ("name", "options", "field", "words"),
    [
        ("shop/fnid", {}, "environment.name", "did you mean 'shop/find'?"),
        ("shop/find", {"observe": "lsit"}, "options_json.observe", "list"),
        ("shop/find", {"site": {"things": 99}}, "options_json.site", "between 2 and 13"),
        ("gone.py:Site", {}, "environment.name", "no such file"),
    ],
)
def test_what_is_no_site_is_refused_by_key(name, options, field, words):
    with pytest.raises(BackendError) as caught:
        create("web").converse(name, options)
    assert caught.value.field == field and words in caught.value.message, caught.value.message


@pytest.mark.skipif(find_spec("playwright") is not None, reason="of a Python without Playwright")
def test_a_python_without_playwright_says_what_makes_one():
    with pytest.raises(BackendError, match="make simulators SIM=web"):
        create("web")
