"""The environment of a process with users' code: what Python and libraries need, and what a spec names."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

_KEPT = (
    *(
        "PATH",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TERM",
        "LD_LIBRARY_PATH",
        "VIRTUAL_ENV",
        "PYTHONPATH",
        "PYTHONHASHSEED",
    ),
    *("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONWARNINGS", "DISPLAY", "TOKENIZERS_PARALLELISM"),
    *(
        "HF_HUB_OFFLINE",
        "HF_DATASETS_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HF_ENDPOINT",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
    ),
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    *(
        "NUMEXPR_NUM_THREADS",
        "CUDA_HOME",
        "CUDA_DEVICE_ORDER",
        "CUDA_VISIBLE_DEVICES",
        "MUJOCO_GL",
        "MUJOCO_EGL_DEVICE_ID",
    ),
    *("PYOPENGL_PLATFORM", "VK_ICD_FILENAMES", "VK_DRIVER_FILES", "__EGL_VENDOR_LIBRARY_FILENAMES"),
    *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "LIBGL_ALWAYS_SOFTWARE", "GALLIUM_DRIVER"),
    *("MS_ASSET_DIR", "LIBERO_CONFIG_PATH", "TRITON_CACHE_DIR"),
)
_KEPT_PREFIXES = ("LC_",)
_FOLDERS = ("MS_ASSET_DIR", "LIBERO_CONFIG_PATH")
OWN_PREFIX = "HEADRACE_"
"""Of this service's own settings, which no spec can name."""


def environment_of(given: Mapping[str, str], named: Collection[str], scratch: Path) -> dict[str, str]:
    """Of the environment `given` what is kept and what is `named`; home and temporary files are in `scratch`."""
    kept = {
        name: value
        for name, value in given.items()
        if name in _KEPT or name.startswith(_KEPT_PREFIXES) or name in named
    }
    own = {"HOME": str(scratch), "TMPDIR": str(scratch), "HF_HOME": str(_models(given))}
    return {name: value for name, value in kept.items() if not name.startswith(OWN_PREFIX)} | own


def caches(given: Mapping[str, str]) -> list[str]:
    """Folders of models and assets that are there to be read."""
    return [
        str(_models(given) / "hub"),
        str(_models(given) / "datasets"),
        *(given.get(name, "") for name in _FOLDERS),
    ]


def _models(given: Mapping[str, str]) -> Path:
    home = Path(given.get("XDG_CACHE_HOME") or Path(given.get("HOME") or os.path.expanduser("~")) / ".cache")
    return Path(given.get("HF_HOME") or home / "huggingface")
