"""What `make engines` puts into .envs/ENGINE by device, and that pip resolves it: here from what was recorded of the
package index, in the part `engine-resolution` from the index itself.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from harness.processes import ROOT

from ci.engines import environments, resolution
from ci.engines.environments import ENGINES, Refused, Source, commands, device_of, make, require_build
from ci.engines.resolution import (
    TARGETS,
    Package,
    Unresolved,
    recorded,
    resolve,
    resolve_recorded,
    write_wheel,
)

VLLM, SGLANG = ENGINES["vllm"], ENGINES["sglang"]
TARGET = {target.name: target for target in TARGETS}


class Here:
    """A maker with so many GPUs on an imaginary machine."""

    def __init__(self, count):
        from headrace_servicekit.lease.gpus import Gpu

        self._gpus = [Gpu(f"GPU-{index}", str(index)) for index in range(count)]

    def gpus(self):
        return self._gpus

    def variables(self, environ):
        return [environ["CUDA_VISIBLE_DEVICES"]] if "CUDA_VISIBLE_DEVICES" in environ else []


def machine(cuda=0, rocm=0):
    return {"makers": {"cuda": Here(cuda), "rocm": Here(rocm)}, "environ": {}}


def test_the_device_is_what_the_machine_has_or_what_is_said():
    assert device_of(VLLM, "auto", **machine()) == "cpu"
    assert device_of(VLLM, "auto", **machine(cuda=8)) == "cuda"
    hidden = machine(cuda=8) | {"environ": {"CUDA_VISIBLE_DEVICES": ""}}
    assert device_of(VLLM, "auto", **hidden) == "cpu"
    assert device_of(VLLM, "cpu", **machine(cuda=8)) == "cpu"
    assert device_of(SGLANG, "cuda", elsewhere=True, **machine()) == "cuda"  # a login node
    wheels = Source(find_links="/wheels")
    assert device_of(VLLM, "auto", wheels, **machine(rocm=1)) == "rocm"


@pytest.mark.parametrize(
    ("engine", "asked", "here", "words"),
    [
        (VLLM, "cuda", {}, "DEVICE=cuda: this machine shows no NVIDIA GPU .*leave DEVICE out .*ELSEWHERE=1"),
        (VLLM, "rocm", {"cuda": 1}, "DEVICE=rocm: this machine shows no AMD GPU"),
        (
            VLLM,
            "auto",
            {"rocm": 1},
            "DEVICE=rocm: the package index has no build of vllm==.*TORCH_INDEX_URL=",
        ),
        (
            SGLANG,
            "auto",
            {"rocm": 1},
            "DEVICE=rocm: sglang publishes no build for an AMD GPU: take ENGINE=vllm",
        ),
        (VLLM, "gpu", {"cuda": 1}, "DEVICE: 'gpu' is no kind of device: write cpu, cuda or rocm"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_key_and_the_fix(engine, asked, here, words):
    with pytest.raises(Refused, match=words):
        device_of(engine, asked, **machine(**here))


def test_make_hands_its_variables_on_and_a_refusal_ends_it():
    """On a machine without a GPU, like this one in CI."""
    asked = ["make", "-s", "engines", "ENGINE=sglang", f"PYTHON={sys.executable}"]
    done = subprocess.run([*asked, "DEVICE=rocm"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode and "DEVICE=rocm: sglang publishes no build" in done.stderr
    dry = subprocess.run(
        ["make", "-n", "engines", "DEVICE=cuda", "ELSEWHERE=1"], cwd=ROOT, capture_output=True, text=True
    )
    assert '"vllm" --device "cuda" --elsewhere' in dry.stdout


@pytest.mark.parametrize("name", TARGET)
def test_pip_resolves_every_target_below_its_pins(name, tmp_path):
    """A requirement of our dists that the engine refuses is seen here, without an index."""
    target = TARGET[name]
    found = resolve_recorded(target, target.requirements, tmp_path)
    assert {(each.name, each.version) for each in found} == {
        (each.name, each.version) for each in recorded(target)
    }


def test_an_engine_and_the_trainer_go_into_environments_of_their_own(tmp_path):
    """The trainer wants a transformers that vLLM 0.32 refuses: were they one, no host could have both."""
    trainer = TARGET["torch-cuda"].requirements
    assert any(each.startswith("transformers>=5.20") for each in trainer)
    for package in recorded(TARGET["torch-cuda"]):
        write_wheel(tmp_path, package)
    with pytest.raises(Unresolved, match=r"conflict|ResolutionImpossible"):
        resolve_recorded(TARGET["vllm-cuda"], [*TARGET["vllm-cuda"].requirements, *trainer], tmp_path)


def test_torch_is_the_one_that_each_engines_kernels_were_built_for():
    """vLLM shares the trainer's torch and its NCCL. SGLang's kernels are of a later one, which NCCL does not mix."""
    pinned = {name: {each.name: each.version for each in recorded(target)} for name, target in TARGET.items()}
    wanted = {
        name: next(each for each in recorded(TARGET[f"{name}-cuda"]) if each.name == name).wants
        for name in ("vllm", "sglang")
    }
    for engine, wants in wanted.items():
        assert f"torch=={pinned[f'{engine}-cuda']['torch']}" in wants
    assert pinned["vllm-cuda"]["torch"] == pinned["torch-cuda"]["torch"]
    assert pinned["vllm-cuda"]["nvidia-nccl-cu13"] == pinned["torch-cuda"]["nvidia-nccl-cu13"]
    assert environments.pin(SGLANG.pins("cuda"), "torch") == environments.pin(SGLANG.pins("cpu"), "torch")


def test_gpus_get_the_pins_that_the_cpu_tests_run_with():
    """But for what an engine's own metadata says otherwise, torch's kernels and what only GPUs need."""
    for engine in ENGINES.values():
        cpu = dict(line.split("==") for line in engine.pins("cpu").read_text().splitlines() if "==" in line)
        cpu = {resolution.plain(name): version for name, version in cpu.items()}
        gpu = {each.name: each for each in recorded(TARGET[f"{engine.name}-cuda"])}
        shared = gpu.keys() & cpu.keys()
        same = {name for name in shared if gpu[name].version == cpu[name]}
        assert len(same) > 0.85 * len(shared) and {"transformers", "numpy", "tokenizers"} <= same
        assert gpu[engine.name].version == engine.version


def test_the_images_install_below_the_same_pins():
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "COPY constraints/vllm-${VLLM_BUILD}.txt /constraints.txt" in text
    assert "ARG VLLM_BUILD=cuda" in text and "COPY constraints/sglang-cuda.txt /constraints.txt" in text
    for target in ("vllm-cuda", "sglang-cuda"):
        assert TARGET[target].file.is_file()


def test_commands_take_torch_from_where_it_is_said_and_the_engine_with_our_dists():
    source = Source(index_url="the-index")
    _, torch, engine, check = commands(VLLM, "cuda", source, ["pip"])
    assert torch[-3:] == ["--index-url", "the-index", "torch==2.13.0"] and "--no-deps" in torch
    assert engine[engine.index("-c") + 1].endswith("constraints/vllm-cuda.txt")
    assert "vllm==0.32.0" in engine and "./services/rollout[vllm]" in engine and check == ["pip", "check"]
    whole = commands(SGLANG, "cpu", source, ["pip"])
    assert (
        "--no-deps" not in whole[0]
    )  # pip's own index has a CUDA build, which is not imported without its libraries
    assert all("--no-deps" in command for command in whole[1:]) and "-r" in whole[1]
    assert "./plugins/sglang" in [word.partition("[")[0] for word in whole[2]]


def test_an_environment_on_amd_gpus_takes_the_build_of_the_place_that_was_named(tmp_path):
    """The index has a build of the same release for NVIDIA; pip prefers the local version of the named place."""
    for folder, suffix, torch in (("index", "", "2.13.0"), ("amd", "+rocm721", "2.13.0+rocm7.2")):
        (tmp_path / folder).mkdir()
        write_wheel(tmp_path / folder, Package("vllm", f"0.32.0{suffix}", (f"torch=={torch}",)))
        write_wheel(tmp_path / folder, Package("torch", torch, ()))
    source = Source(find_links=str(tmp_path / "amd"))
    command = commands(VLLM, "rocm", source, ["pip"])[1]
    options = [word for word in command[2:] if word not in ("-q", "--no-compile", "--no-build-isolation")]
    named = options[: options.index("-e")]
    found = resolve(named[-1:], *named[:-1], "--no-index", "--find-links", str(tmp_path / "index"))
    assert [f"{each.name}=={each.version}" for each in found] == [
        "torch==2.13.0+rocm7.2",
        "vllm==0.32.0+rocm721",
    ]


def stand_in(folder, code):
    """A Python of an environment, whose torch says what it was built for."""
    file = folder / "python"
    file.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}"\n')
    file.chmod(0o755)
    return str(file)


def test_a_torch_for_other_devices_is_seen_and_the_environment_is_not_whole(tmp_path, monkeypatch):
    require_build("cuda", stand_in(tmp_path, "print('cuda')"))
    with pytest.raises(
        Refused, match=r"DEVICE=cuda: pip took a torch that was built for cpu.*TORCH_INDEX_URL="
    ):
        require_build("cuda", stand_in(tmp_path, "print('cpu')"))
    monkeypatch.setattr(environments, "commands", lambda engine, device, source, pip: [])

    def built_for_cpu(device, python):
        raise Refused("cpu")

    monkeypatch.setattr(environments, "require_build", built_for_cpu)
    folder = tmp_path / "env"
    with pytest.raises(Refused):
        make(VLLM, "cuda", Source(), sys.executable, folder)
    assert not (folder / ".complete").exists()


def test_an_environment_is_made_anew_for_another_device_and_left_alone_for_its_own(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        environments, "commands", lambda engine, device, source, pip: asked.append(device) or []
    )
    monkeypatch.setattr(environments, "require_build", lambda device, python: None)
    folder = tmp_path / "env"
    for device in ("cpu", "cpu", "cuda", "cuda"):
        make(SGLANG, device, Source(), sys.executable, folder)
        assert (folder / ".complete").read_text() == f"{device}\n"
    assert asked == ["cpu", "cuda"]


def test_what_an_index_says_otherwise_is_named(tmp_path):
    target = TARGET["torch-cuda"]
    found = recorded(target)
    assert resolution.differences(target, found) == []
    other = [each for each in found if each.name != "numpy"] + [Package("new", "1", ())]
    assert resolution.differences(target, other) == [
        "new==1 is missing",
        *[f"numpy=={each.version} is not wanted" for each in found if each.name == "numpy"],
    ]
