"""An accelerator that no machine has: torch's spare device type, named "gpu", with streams that do nothing.

Fake tensors named "cuda" cannot run backward in a build of torch without CUDA; these can. An operation that mixes them
with tensors on the host raises FakeTensorDeviceMismatchError.
"""

from __future__ import annotations

import types
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg
from torch.utils import backend_registration

NAME = "gpu"


class Event:
    """Of a stream on which all is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    wait = synchronize = record


class Stream:
    """All is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, *_: Any) -> Event:
        return Event()

    def wait_stream(self, *_: Any) -> None:
        pass

    wait_event = synchronize = wait_stream


@cache
def fake_device() -> torch.device:
    """The device, after it is registered with torch: once a process, and for good."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    for name in dir(torch.cpu):
        if not name.startswith("__"):
            setattr(module, name, getattr(torch.cpu, name))
    module.Stream, module.Event = Stream, Event
    module.current_stream = lambda device=None: Stream()
    module.stream = lambda stream: nullcontext()
    module.is_initialized = module.is_available = lambda: True
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device_count = lambda: 1
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    registration: Any = backend_registration
    registration._setup_privateuseone_for_python_backend(NAME, module)
    group: Any = fake_pg
    dist.Backend.register_backend(NAME + "_fake", group._create_fake_pg, extended_api=True, devices=[NAME])
    return torch.device(NAME, 0)
