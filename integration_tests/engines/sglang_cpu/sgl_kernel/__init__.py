"""Names of SGLang's CUDA kernels for a machine that has no GPU; calling one raises. See README.md."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NoReturn


def _missing(name: str) -> Callable[..., NoReturn]:
    def call(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{name} is a CUDA kernel; this environment runs SGLang on the CPU")

    return call


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{self.__name__}.{name}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes `sgl_kernel.anything` an empty module of the same kind."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return


sys.meta_path.append(_Submodules())


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(f"{__name__}.{name}")
