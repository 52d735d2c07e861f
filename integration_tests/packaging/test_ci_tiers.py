"""What decides which tests a change runs, the ceilings of the code's size, and what is recorded of its behaviour."""

import ast
import json
import subprocess
import sys

import pytest


@pytest.fixture(autouse=True)
def tools_importable(monkeypatch, repository):
    monkeypatch.syspath_prepend(str(repository))


def test_a_figure_above_its_ceiling_fails_and_a_low_one_is_told_of():
    from ci.ceilings import compare

    bad, lower = compare(
        {"lines": 101, "words": 900, "new": 1, "same": 99}, {"lines": 100, "words": 1000, "same": 100}
    )
    assert [sentence.partition(":")[0] for sentence in bad] == ["new", "lines"]
    assert "above its ceiling of 100" in bad[1] and "--raise 'lines'" in bad[1]
    assert [sentence.partition(":")[0] for sentence in lower] == ["words"]


@pytest.mark.parametrize(
    ("figure", "ceiling"), [(0, 0), (95, 95), (426, 426), (127293, 128000), (22.54, 22.6), (1000, 1000)]
)
def test_ceilings_have_three_digits(figure, ceiling):
    from ci.ceilings import rounded_up

    assert rounded_up(figure) == ceiling


def test_ceilings_only_fall_unless_they_are_raised_by_name(monkeypatch, tmp_path, capsys):
    from ci import ceilings

    file = tmp_path / "ceilings.json"
    file.write_text(json.dumps({"lines": 100, "words": 1000, "walk answer, files": 7}))
    monkeypatch.setattr(ceilings, "figures", lambda: {"lines": 101, "words": 900})
    assert ceilings.main(["--lower", "--file", str(file)]) == 1
    assert json.loads(file.read_text()) == {"lines": 100, "words": 900, "walk answer, files": 7}
    assert ceilings.main(["--raise", "lines", "--file", str(file)]) == 0
    assert json.loads(file.read_text())["lines"] == 101
    with pytest.raises(SystemExit):
        ceilings.main(["--raise", "liness", "--file", str(file)])
    assert "no figure liness; there are: lines, words" in capsys.readouterr().err


def test_conditions_that_name_a_workflow_are_counted_by_line():
    from ci.ceilings import _conditions

    code = """
if run.workflow == "embodied" and ready:
    kind = "embodied"
kept = [each for each in runs if each.episodes]
match kind:
    case "texts":
        pass
name = embodied_name or ""
"""
    assert _conditions(ast.parse(code)) == 4


INPUTS = ("libs/planner/pyproject.toml", ":(glob)ci/*.sh")


def test_a_part_is_left_out_while_its_files_are_those_with_which_it_passed(monkeypatch, tmp_path):
    from ci import changes

    passed = tmp_path / "passed.json"
    monkeypatch.delenv("CI_BASE", raising=False)
    monkeypatch.delenv("CI", raising=False)
    changes.record_pass("engine", INPUTS, passed)
    assert not passed.exists(), "outside CI, tests may have been skipped"
    monkeypatch.setenv("CI", "true")
    changes.record_pass("engine", INPUTS, passed)
    assert "passed last" in changes.reason_to_leave_out("engine", INPUTS, passed)
    assert not changes.reason_to_leave_out("other", INPUTS, passed)
    assert not changes.reason_to_leave_out("engine", INPUTS[:1], passed)
    with pytest.raises(ValueError, match="no/such names no file"):
        changes.digest_of(["no/such"])


def test_where_the_last_commit_is_known_git_says_what_changed(monkeypatch, tmp_path):
    from ci import changes

    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    for name in ("engine", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("")
    git("add", ".")
    git("commit", "-qm", "a")
    monkeypatch.setattr(changes, "ROOT", tmp_path)
    monkeypatch.setenv("CI_BASE", "HEAD")
    (tmp_path / "engine" / "new.py").write_text("")
    (tmp_path / "other" / "a.py").write_text("changed")
    needed = [name for name in ("engine", "other", ".") if not changes.reason_to_leave_out(name, [name])]
    assert needed == ["engine", "other", "."], "a file that git does not know yet is a change"
    git("add", ".")
    git("commit", "-qm", "b")
    assert "its files are those of HEAD" in changes.reason_to_leave_out("engine", ["engine"])
    monkeypatch.setenv("CI_BASE", "HEAD~1")
    assert not changes.reason_to_leave_out("engine", ["engine"])


def test_parts_without_a_change_are_told_of_unless_they_are_named(monkeypatch, capsys):
    from ci import parts
    from ci.plan import Part

    def python(text):
        return (sys.executable, "-c", f"print({text!r})")

    plan = [
        Part("always", python("a"), 60),
        Part("browser-environment", python("b"), 60, inputs=INPUTS),
        Part("browser", python("c"), 60, inputs=INPUTS),
    ]
    monkeypatch.setitem(parts.PLANS, "test", plan)
    monkeypatch.setitem(parts.PLANS, "nightly", [])
    monkeypatch.delenv("CI", raising=False)  # nothing is recorded
    monkeypatch.setattr(
        parts, "reason_to_leave_out", lambda name, inputs: "nothing changed" * (name == "browser")
    )
    for arguments, passed in (["test"], 1), (["test", "browser"], 1), (["test", "nightly"], 3):
        assert parts.main(arguments) == 0
        shown = capsys.readouterr().out
        assert f"{passed} passed, 0 failed" in shown
        assert ("browser: left out, as nothing changed" in shown) == (arguments == ["test"])


def test_every_nightly_test_is_in_a_nightly_part(repository):
    from ci.plan import NIGHTLY

    words = {word for part in NIGHTLY for word in part.command}
    folders = [word for word in words if (repository / word).is_dir()]
    marked = [
        path
        for path in repository.glob("[!.]*/**/test_*.py")
        if "pytest.mark.nightly" in path.read_text(encoding="utf-8") and path.name != "test_ci_tiers.py"
    ]
    assert len(marked) > 50
    left = [
        name
        for name in (str(path.relative_to(repository)) for path in marked)
        if not any(name.startswith(f"{folder}/") for folder in folders)
    ]
    # These run in an environment of their own, by scripts that take `-m ""`.
    assert not [name for name in left if "/engines/" not in name and "megatron" not in name], left


def test_inputs_of_parts_name_files_that_there_are():
    from ci.changes import digest_of
    from ci.plan import PLANS

    found = {part.name: digest_of(part.inputs) for plan in PLANS.values() for part in plan if part.inputs}
    assert {"vllm", "megatron", "browser", "simulator-metaworld"} <= found.keys()


def test_tests_of_a_change_are_its_own_those_of_its_module_and_of_its_importers():
    from ci.check import tests_of

    module = "libs/servicekit/src/headrace_servicekit/weights/delta.py"
    own = "services/reward/tests/test_reward_leases.py"
    found = tests_of([module, own])
    fuzzed = "integration_tests/bad_input/test_decoders.py"
    assert found[:3] == [own, fuzzed, "libs/servicekit/tests/test_kit_weight_delta.py"]
    importer = "libs/servicekit/tests/test_kit_weight_store.py"
    assert found.index(importer) > 2, "weights.store imports weights.delta"
    assert not [name for name in found if name.startswith("integration_tests/flows")]
    assert "integration_tests/packaging/test_ci_tools.py" in tests_of(["ci/parts.py"])


@pytest.mark.parametrize(
    ("body", "seconds", "status", "said"),
    [("pass", 60, 0, ""), ("assert False", 60, 1, ""), ("pass", 0, 0, "2 tests did not run within 0 s")],
)
def test_tests_of_a_check_end_with_their_time(body, seconds, status, said, tmp_path, repository):
    file = tmp_path / "test_three.py"
    file.write_text("".join(f"def test_{n}():\n    {body}\n" for n in range(3)))
    code = (
        "import sys; from ci.check import run_tests; sys.exit(run_tests([sys.argv[1]], float(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(file), str(seconds)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert said in done.stdout


def test_a_seeds_events_are_the_recorded_ones_and_another_worlds_are_not(repository, tmp_path):
    from ci.recorded import compare_events, digest_of_seed

    record = {"events": [digest_of_seed(seed) for seed in range(2)]}
    assert compare_events(record, 2) == []
    assert compare_events({"events": record["events"][::-1]}, 1) == ["seed 0: other events"]


def test_weights_are_compared_with_the_record_on_an_equal_machine_alone(monkeypatch):
    from contextlib import nullcontext

    from ci import recorded

    hashes = iter("abab")
    monkeypatch.setattr(recorded, "fleet", lambda folder: nullcontext(lambda name: next(hashes)))
    record = {"machine": recorded.machine(), "weights": {"tiny": "a", "cartpole": "c"}}
    assert recorded.compare_weights(record, ["tiny", "cartpole"]) == [
        "cartpole: the weights have the hash b, the record has c"
    ]
    elsewhere = {**record, "machine": {"processor": "another"}}
    assert recorded.compare_weights(elsewhere, ["tiny"]) == [
        "tiny: the weights have the hash a, a second run has b"
    ]


def test_a_hash_of_tensors_is_of_names_and_bytes_whatever_the_files(tmp_path):
    import torch
    from safetensors.torch import save_file

    from ci.recorded import hash_of_tensors

    def saved(name, *files):
        folder = tmp_path / name
        folder.mkdir()
        for index, tensors in enumerate(files):
            save_file(tensors, folder / f"{index}.safetensors")
        return hash_of_tensors(folder)

    one, two = torch.ones(3), torch.tensor(2)
    whole = saved("whole", {"one": one, "two": two})
    assert saved("apart", {"one": one}, {"two": two}) == whole
    assert (
        len({whole, saved("named", {"one": one, "three": two}), saved("other", {"one": one, "two": two + 1})})
        == 3
    )
    with pytest.raises(RuntimeError, match="holds no tensors"):
        hash_of_tensors(tmp_path / "nothing")
