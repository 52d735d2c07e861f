"""What honest code of users does in a worker: it works behind the walls too, or its error says what to do."""

from __future__ import annotations

import asyncio
import venv
from pathlib import Path

import pytest
from headrace_servicekit.process.confine import other_user
from headrace_servicekit.process.worker import UsersCode, Worker, hide_from_workers
from headrace_servicekit.process.worker_pipes import JSON_CODEC

CODE = """
import getpass, os, subprocess, sys, tempfile
from pathlib import Path
from headrace_servicekit.process.confine import explained
from headrace_servicekit.process.worker_pipes import become_worker, encode_json, frame

_, writer = become_worker()
HERE, FOUND = Path({here!r}), {{}}


def tried(name, deed):
    try:
        FOUND[name] = str(deed())
    except OSError as error:
        FOUND[name] = f"{{type(error).__name__}}{{explained(error)}}"


def cached():
    import datasets
    rows = Path("~/rows.jsonl").expanduser()
    rows.write_text('{{"a": 1}}')
    return len(datasets.load_dataset("json", data_files=str(rows), split="train"))


def downloaded():
    from huggingface_hub import constants, snapshot_download
    Path(constants.HF_HUB_CACHE, "models--me--other").mkdir()
    return Path(snapshot_download("me/one", local_files_only=True), "config.json").read_text()


def appended():
    with Path("results/log.txt").open("a+") as log:
        log.write("line ")
        log.seek(0)
        return log.read()


tried("current folder", os.getcwd)
tried("data by a relative path", lambda: Path("data/answers.txt").read_text())
tried("temporary file", lambda: tempfile.mkstemp() and "made")
tried("caches", lambda: [Path(name).expanduser().mkdir(parents=True) for name in ("~/.cache/x", "~/.config/x")])
tried("name of the user", getpass.getuser)
tried("data set", cached)
tried("model", downloaded)
tried("named folder that is open to all", appended)
tried("own Python", lambda: subprocess.check_output([sys.executable, "-c", "import numpy; print(1)"], text=True))
tried("Python of another environment", lambda: subprocess.check_output(
    [HERE / "agent/bin/python", "-c", "import of_the_agent; print(2)"], text=True))
tried("closed file of a named folder", lambda: Path("model/model.safetensors").read_text())
tried("file beside", lambda: Path("scorers/log.txt").write_text("x"))
tried("file that no spec names", lambda: Path({there!r}, "unnamed.txt").read_text())
writer.write(frame(encode_json(FOUND)))
writer.flush()
"""


def project(home: Path) -> Path:
    """A project as users have it below a home that is closed to others, with a virtual environment beside it."""
    here = home / "project"
    for name, text in (
        *(
            ("scorers/users_code.py", CODE.format(here=str(here), there=str(home))),
            ("data/answers.txt", "42"),
            ("model/model.safetensors", "tensors"),
        ),
        *(("results/.keep", ""), ("../unnamed.txt", "x"), ("state/token", "secret")),
        ("../.cache/huggingface/hub/models--me--one/refs/main", "abc"),
        ("../.cache/huggingface/hub/models--me--one/snapshots/abc/config.json", "weights"),
        ("../.cache/huggingface/datasets/json/kept/old.arrow", "x"),
    ):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    venv.create(here / "agent", with_pip=False)
    library = next((here / "agent/lib").glob("python3*/site-packages"))
    (library / "of_the_agent.py").write_text("")
    (here / "results").chmod(0o777)
    (here / "model/model.safetensors").chmod(0o600)  # as the library writes it, whatever the umask
    home.chmod(0o700)
    return here


async def asked(here: Path) -> dict[str, str]:
    """What the project's scorer found, as its spec names it."""
    hide_from_workers(here / "state/token", here / "state")
    names = {
        "name": "scorers/users_code.py:score",
        "command": ["agent/bin/python"],
        "log": "results",
        "path": "model",
    }
    worker = await Worker.start("users_code", JSON_CODEC, code=UsersCode(names, here))
    try:
        return await worker.receive(100.0)
    finally:
        await worker.kill()
        hide_from_workers()


WORKS = {
    "data by a relative path": "42",
    "temporary file": "made",
    "caches": "[None, None]",
    "data set": "1",
    "model": "weights",
    "closed file of a named folder": "tensors",
    "own Python": "1\n",
    "Python of another environment": "2\n",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    here = project(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(here / "scorers"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(here)
    return here


def test_what_honest_code_does_works_below_a_closed_home(here):
    first, second = asyncio.run(asked(here)), asyncio.run(asked(here))
    assert {name: first[name] for name in WORKS} == WORKS
    assert first["current folder"] == str(here)
    assert [each["named folder that is open to all"] for each in (first, second)] == ["line ", "line line "]
    if other_user():
        assert first["name of the user"] == "headrace"
        assert not (here.parent / ".cache/huggingface/hub/models--me--other").exists()


def test_an_error_of_the_walls_names_the_path_and_what_to_do(here):
    if not other_user():
        pytest.skip("this process may not change user ids: the code is the same user")
    found = asyncio.run(asked(here))
    beside = found["file beside"]
    assert "another user" in beside and f"chmod 777 {here / 'scorers'}" in beside and "home (~)" in beside
    unnamed = found["file that no spec names"]
    assert f"To read {here.parent / 'unnamed.txt'}, name it or its folder in the spec" in unnamed
