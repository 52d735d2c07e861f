"""From the names of leased GPUs to torch's devices and back to the driver's names."""

import os
import subprocess
import sys

import pytest
import torch
from headrace_modelkit import devices
from headrace_modelkit.devices import DeviceNotSeen, driver_name, torch_devices, variables_for

AMD_SEEN = "37326666-3964-3161-3361-346261366262"
"""torch's writing of AMD's identifier 72ff9d1a3a4ba6bb: the digits' own bytes."""


def test_a_mig_device_is_the_one_that_the_process_was_started_with(monkeypatch):
    """torch may give it the whole GPU's UUID, so its place among the variable's names decides."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-two, MIG-one")
    monkeypatch.setattr(devices, "_seen", lambda: ["aa"])
    assert torch_devices(["MIG-two"]) == (torch.device("cuda", 0),)
    assert driver_name(torch.device("cuda", 0)) == "MIG-two"
    with pytest.raises(DeviceNotSeen, match="MIG-three is leased"):
        torch_devices(["MIG-three"])


def test_amds_identifiers_are_found_as_torch_writes_them(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_seen", lambda: ["0a" * 16, AMD_SEEN])
    assert torch_devices(["GPU-72ff9d1a3a4ba6bb"]) == (torch.device("cuda", 1),)
    assert driver_name(torch.device("cuda", 0)) == "GPU-" + "0a" * 16


def test_an_engine_that_sees_fewer_gpus_than_were_leased_says_which(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_seen", lambda: ["aa"])
    with pytest.raises(DeviceNotSeen, match="GPU-bb is leased and this process sees aa"):
        torch_devices(["GPU-aa", "GPU-bb"])


GPUS = tuple(torch.device("cuda", index) for index in range(3))


@pytest.mark.parametrize(
    ("hip", "environ", "shown"),
    [
        (None, {}, {"CUDA_VISIBLE_DEVICES": "2,0"}),
        (None, {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b ,GPU-c"}, {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-a"}),
        ("7.0", {}, {"CUDA_VISIBLE_DEVICES": "2,0"}),
        (
            "7.0",
            {"CUDA_VISIBLE_DEVICES": "9", "HIP_VISIBLE_DEVICES": "5,6,7"},
            {"CUDA_VISIBLE_DEVICES": "7,5", "HIP_VISIBLE_DEVICES": "7,5"},
        ),
    ],
)
def test_a_child_sees_the_leased_gpus_alone(monkeypatch, hip, environ, shown):
    """Of AMD's the variable that HIP reads first decides what this process sees, and what its child does."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert variables_for([GPUS[2], GPUS[0]]) == shown
    assert variables_for([torch.device("cpu")]) == {}


def test_memory_of_amds_gpus_is_counted_by_process(monkeypatch, tmp_path):
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for index, (number, unique) in enumerate([(0, 0), (51110, 0x72FF9D1A3A4BA6BB), (4098, 0x0A0A)]):
        (nodes / str(index)).mkdir(parents=True)
        (nodes / str(index) / "gpu_id").write_text(f"{number}\n")
        (nodes / str(index) / "properties").write_text(f"simd_count 416\nunique_id {unique}\n")
    for pid, used in ((7, {51110: 3000, 4098: 50}), (8, {51110: 400})):
        folder = tmp_path / f"sys/class/kfd/kfd/proc/{pid}"
        folder.mkdir(parents=True)
        for number, size in used.items():
            (folder / f"vram_{number}").write_text(f"{size}\n")
    first = "72ff9d1a3a4ba6bb"
    assert devices.used_by_kfd([first], [7, 8, 9], tmp_path) == 3400
    assert devices.used_by_kfd([first, f"{0x0A0A:016x}"], [7], tmp_path) == 3050
    assert devices.used_by_kfd([first], [9], tmp_path) is None, "ids of a container's own"
    assert devices.used_by_kfd(["00"], [7], tmp_path) is None
    monkeypatch.setattr(devices.used_by_kfd, "__defaults__", (tmp_path,))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(devices, "_seen", lambda: [AMD_SEEN])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.process_bytes([GPUS[0]], [7]) == 3000


SEGMENTS = """
import torch
from headrace_modelkit.devices import fixed_segments, grow_segments
grow_segments()
said = torch._C._accelerator_getAllocatorSettings
print(said())
with fixed_segments():
    print(said())
print(said())
"""


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, ["expandable_segments:True", "expandable_segments:False", "expandable_segments:True"]),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, ["max_split_size_mb:512"] * 3),
    ],
    ids=["default", "the user's"],
)
def test_segments_grow_but_for_what_others_map(own, expected):
    done = subprocess.run(
        [sys.executable, "-c", SEGMENTS], env=os.environ | own, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == expected
