"""From the names of leased GPUs to torch's devices and back to the driver's names."""

import pytest
import torch
from headrace_modelkit import devices
from headrace_modelkit.devices import DeviceNotSeen, driver_name, torch_devices

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
