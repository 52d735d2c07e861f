"""The environment of a process with users' code: what Python and libraries need, and what a spec names."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
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
    *("MS_ASSET_DIR", "LIBERO_CONFIG_PATH", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
_KEPT_PREFIXES = ("LC_",)
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
"""Kept where they hold no password."""
_MOST_LINKS = 60
_FOLDERS = ("MS_ASSET_DIR", "LIBERO_CONFIG_PATH")
OWN_PREFIX = "HEADRACE_"
"""Prefix of this service's own settings, which no spec can name."""


def environment_of(
    given: Mapping[str, str], named: Collection[str], scratch: Path, models: Path | None = None
) -> dict[str, str]:
    """The variables of `given` that are kept or `named`; home and temporary files are in `scratch`."""
    kept = {
        name: value
        for name, value in given.items()
        if name in _KEPT
        or name.startswith(_KEPT_PREFIXES)
        or (name.upper() in _PROXIES and "@" not in value)
        or name in named
    }
    # An id that no file of users knows has a name by these alone: `getpass.getuser`, and so caches of torch.
    own = {"HOME": str(scratch), "TMPDIR": str(scratch), "USER": "headrace", "LOGNAME": "headrace"}
    own |= {"HF_HOME": str(models or _models(given))}
    own |= {} if models else {name: str(path) for name, path in _model_folders(given).items()}
    return {name: value for name, value in kept.items() if not name.startswith(OWN_PREFIX)} | own


def caches(given: Mapping[str, str]) -> list[str]:
    """Folders of models and assets that are there to be read."""
    return [*map(str, _model_folders(given).values()), *(given[name] for name in _FOLDERS if given.get(name))]


def own_caches(given: Mapping[str, str], scratch: Path, user: int) -> Path:
    """A HF_HOME in `scratch` for another user: what was downloaded is in it by links, what is new is written there."""
    own = scratch / "huggingface"
    hub, datasets = _model_folders(given).values()
    _link(hub, own / "hub", 0)  # whole repositories
    _link(
        datasets, own / "datasets", _MOST_LINKS
    )  # files: a data set is locked, and mapped, in its innermost folder
    for folder, _, _ in os.walk(own):
        os.chown(folder, user, user)
    return own


def _link(source: Path, into: Path, left: int) -> int:
    """Makes the folders of `source` again, with links to its files; whole folders are links once `left` is used up."""
    into.mkdir(parents=True)
    with suppress(OSError), os.scandir(source) as entries:
        for entry in entries:
            left -= 1
            if left > 0 and entry.is_dir(follow_symlinks=False):
                left = _link(Path(entry.path), into / entry.name, left)
            elif not entry.name.endswith(".lock"):
                (into / entry.name).symlink_to(entry.path)
    return left


def _model_folders(given: Mapping[str, str]) -> dict[str, Path]:
    hub = given.get("HF_HUB_CACHE") or given.get("HUGGINGFACE_HUB_CACHE") or _models(given) / "hub"
    return {
        "HF_HUB_CACHE": Path(hub),
        "HF_DATASETS_CACHE": Path(given.get("HF_DATASETS_CACHE") or _models(given) / "datasets"),
    }


def _models(given: Mapping[str, str]) -> Path:
    home = Path(given.get("XDG_CACHE_HOME") or Path(given.get("HOME") or os.path.expanduser("~")) / ".cache")
    return Path(given.get("HF_HOME") or home / "huggingface")
