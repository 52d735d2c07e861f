"""What an agent leaves is a stranger's: names, links and sizes that lead elsewhere are not carried."""

from __future__ import annotations

import io
import tarfile

import pytest
from headrace_containers.provider import Ran
from headrace_containers.tasks import carrying
from headrace_containers.tasks.carrying import NotCarried, is_restored, take

RESTORED = ("conftest.py", "*.pyc", ".git", "tests/**")


class Gives:
    """A container whose `tar` gives this."""

    def __init__(self, data, **more):
        self._ran = Ran(0, data, b"", **more)

    def exec(self, command, **given):
        return self._ran


def archive(*entries):
    """A tar of (name, type, content or link)."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as file:
        for name, kind, what in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.uid = kind, 0o4755, 0
            data = what if isinstance(what, bytes) else b""
            entry.size = len(data)
            entry.linkname = what if isinstance(what, str) else ""
            file.addfile(entry, io.BytesIO(data))
    return made.getvalue()


FILE, FOLDER, LINK, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


def carried(*entries):
    left = take(Gives(archive(*entries)), "/app", RESTORED)
    with tarfile.open(fileobj=io.BytesIO(left.archive)) as file:
        return {each.name: each for each in file}, left


@pytest.mark.parametrize(
    "entry",
    [
        ("../out", FILE, b"1"),
        ("/etc/passwd", FILE, b"1"),
        ("a/../../out", FILE, b"1"),
        ("link", LINK, "/tests/check.py"),
        ("link", LINK, "../tests"),
        ("a/link", LINK, "b/../../../tests"),
        ("device", tarfile.CHRTYPE, b""),
        ("pipe", tarfile.FIFOTYPE, b""),
        ("./conftest.py", FILE, b"1"),
        ("a/b/conftest.py", FILE, b"1"),
        ("tests/test_a.py", FILE, b"1"),
        ("a/x.pyc", FILE, b"1"),
        (".git/hooks/pre-commit", FILE, b"1"),
    ],
    ids=lambda entry: f"{entry[0]} {entry[2]!r}",
)
def test_what_leads_elsewhere_or_is_the_images_is_left_out(entry):
    assert carried(entry)[0].keys() == set()


def test_what_is_the_agents_is_carried_without_its_rights():
    found, left = carried(
        ("a", FOLDER, b""),
        ("a/b.py", FILE, b"code"),
        ("a/again.py", HARD, "a/b.py"),
        ("a/link", LINK, "../c"),
        ("c", FILE, b"2"),
    )
    assert found.keys() == {"a", "a/b.py", "a/again.py", "a/link", "c"}
    assert {each.mode for each in found.values() if each.isreg()} == {0o755}, "no set-user-id"
    assert found["a/again.py"].size == 4 and left.files == {"a/b.py", "a/again.py", "a/link", "c"}


def test_nothing_is_written_through_a_link():
    """A folder that is a link would lead into one that the image keeps: tests/ by another name."""
    found, _ = carried(
        ("d", LINK, "tests"), ("d/test_a.py", FILE, b"1"), ("e", FILE, b"1"), ("e/f", FILE, b"2")
    )
    assert found.keys() == {"d", "e"}
    found, _ = carried(("twice", FILE, b"1"), ("twice", LINK, "other"))
    assert found["twice"].isreg()


def test_too_much_is_named(monkeypatch):
    with pytest.raises(NotCarried, match="/app has more than 256 MiB"):
        take(Gives(b"1", left_out=1), "/app", RESTORED)
    with pytest.raises(NotCarried, match="/app was not read in"):
        take(Gives(b"1", ended="time"), "/app", RESTORED)
    with pytest.raises(NotCarried, match="/app cannot be read"):
        take(Gives(b"no tar" * 500), "/app", RESTORED)
    monkeypatch.setattr(carrying, "MOST_BYTES", 10)
    with pytest.raises(NotCarried, match="more than 50,000 files, or"):
        carried(("a", FILE, b"123456"), ("b", FILE, b"123456"))


def test_names_that_stay():
    assert is_restored("tests/unit/a.py", ["tests/**"]) and is_restored("tests", ["tests/**"])
    assert is_restored("a/__pycache__/b.py", ["__pycache__"]) and not is_restored("a/b.py", ["b", "a/c.py"])
