"""A GPU of CUDA for fake tensors, in a build of torch that has no CUDA: streams that do nothing, and a backward pass.

What the trainer does for `device.type == "cuda"` alone is done here: pinned memory, kernels, waits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from headrace_fake_world.device import Event, Stream
from headrace_fake_world.engine import PythonEngine

CUDA = torch.device("cuda", 0)
KIND = 1
"""Of CUDA among torch's types of devices."""
REGISTER = "_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"
"""c10::impl::registerDeviceGuard(DeviceType, const DeviceGuardImplInterface*)."""
SLOTS = 64
"""More than a guard has methods."""


@contextmanager
def fake_cuda() -> Iterator[None]:
    """torch.cuda with one GPU, for the body; torch goes on saying that there is none to who asks."""
    _let_tensors_say_cuda()
    stream = Stream()
    parts: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: stream,
        "stream": lambda stream: nullcontext(),
        "current_device": lambda: CUDA.index,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "device_count": lambda: 1,
        "is_initialized": lambda: True,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    with patch.multiple(torch.cuda, **parts), PythonEngine().running():
        yield


@cache
def _let_tensors_say_cuda() -> Any:
    """Gives torch what it asks for a CUDA device's streams, once a process and for good; returns what must live on.

    torch has a guard that does nothing, and takes it in place of one that knows of no device; a build without CUDA has
    neither. So one is registered first whose methods, of which only `deviceCount` is called, all answer 0.
    """
    if torch.version.cuda:
        return None
    none = ctypes.CFUNCTYPE(ctypes.c_int8)(lambda: 0)
    methods = (ctypes.c_void_p * SLOTS)(*[ctypes.cast(none, ctypes.c_void_p).value] * SLOTS)
    guard = ctypes.c_void_p(ctypes.addressof(methods))
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    library[REGISTER](ctypes.c_int8(KIND), ctypes.byref(guard))
    torch._C._ensureCUDADeviceGuardSet()
    return none, methods, guard
