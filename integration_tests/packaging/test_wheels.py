"""What is inside the wheels."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest


def members(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_there_is_a_wheel_for_every_pyproject_file(wheels, repository):
    folders = {
        path.parent.relative_to(repository).parts for path in repository.glob("[!.]*/**/pyproject.toml")
    }
    # A package in examples is a user's, as it were; what lies in tools is for development, in no wheel.
    folders = {
        folder
        for folder in folders
        if folder[0] not in ("examples", "tools") and not any(part.startswith(".") for part in folder)
    }
    assert len(wheels) == len(folders)


def test_wheels_hold_typed_packages_and_no_tests(wheels):
    for name, wheel in wheels.items():
        names = members(wheel)
        assert any(member.endswith("py.typed") for member in names), name
        strays = [member for member in names if "test" in member or member.endswith((".pyc", ".proto~"))]
        assert not strays, (name, strays)


def test_no_wheel_splits_the_namespace(wheels):
    for name, wheel in wheels.items():
        assert "headrace/__init__.py" not in members(wheel), name


@pytest.mark.parametrize(
    ("dist", "member"),
    [
        ("headrace-proto", "headrace/trainer/v1/trainer.proto"),
        ("headrace-coordinator", "headrace_coordinator/store/append_if.lua"),
        ("headrace-coordinator", "headrace_coordinator/dashboard/index.html"),
        ("headrace-coordinator", "headrace_coordinator/dashboard/vendor/uPlot.LICENSE.txt"),
        ("headrace", "headrace_cli/examples/tiny.yaml"),
    ],
)
def test_files_that_are_no_code_travel_along(wheels, dist, member):
    assert member in members(wheels[dist])


def test_two_wheels_never_bring_the_same_file(wheels):
    owners = {}
    for name, wheel in wheels.items():
        for member in members(wheel):
            assert owners.setdefault(member, name) == name, member


def test_every_wheel_carries_the_license(wheels, repository):
    for name, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            (license,) = [member for member in archive.namelist() if member.endswith("licenses/LICENSE")]
            assert archive.read(license) == (repository / "LICENSE").read_bytes(), name
            metadata = next(member for member in archive.namelist() if member.endswith("METADATA"))
            assert b"License-Expression: Apache-2.0" in archive.read(metadata), name


@pytest.mark.parametrize(
    ("dist", "folder"), [("headrace-proto", "proto"), ("headrace-servicekit", "libs/servicekit")]
)
def test_a_wheel_that_is_built_again_elsewhere_is_the_same(wheels, repository, dist, folder, tmp_path):
    """In a folder of another name, with other modes and times of files. `ci/release.sh` does so with every wheel."""
    copy = tmp_path / "another name" / dist
    shutil.copytree(repository / folder, copy, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    for path in copy.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
        os.utime(path, (1, 1))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        copy,
    ]
    subprocess.run(command, check=True, timeout=120)
    (again,) = tmp_path.glob("*.whl")
    assert again.name == wheels[dist].name and again.read_bytes() == wheels[dist].read_bytes()
