"""Scorers of files by their file's name, with the folders that tell two of one name apart."""

import pytest
from headrace_schema.sections.scoring import short_names

LONG = "/home/me/project/rewards/judge.py:score"


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ([LONG], ["judge.py:score"]),
        (["exact", LONG, "owner/entry.point"], ["exact", "judge.py:score", "owner/entry.point"]),
        ([LONG, LONG], ["judge.py:score", "judge.py:score"]),
        ([LONG, "/home/me/project/style/judge.py:score"], ["rewards/judge.py:score", "style/judge.py:score"]),
        (["/a/x/r/judge.py:score", "/a/y/r/judge.py:score"], ["x/r/judge.py:score", "y/r/judge.py:score"]),
        (["/judge.py:score", "/a/judge.py:score"], ["/judge.py:score", "a/judge.py:score"]),
        ([LONG, LONG.replace(":score", ":style")], ["judge.py:score", "judge.py:style"]),
        (["judge.py:score"], ["judge.py:score"]),
        ([], []),
    ],
)
def test_a_scorer_is_shown_by_its_files_name(names, shown):
    found = short_names(names)
    assert [found[name] for name in names] == shown
    assert len(set(found.values())) == len(set(names)), "each has a name of its own"
