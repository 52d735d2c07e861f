"""What users' code is given: the variables that Python, libraries and a spec name, and the paths that its strings name.

Whether it may read them is `confine`'s.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from headrace_schema.references import secret_file

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


def named_paths(given: object, closed: Iterable[Path], base: Path) -> list[str]:
    """Folders of the files, and the folders, that the strings of a JSON value name below `base`.

    PATH:NAME counts as PATH. Of a file in the home directory, in a `closed` folder or at the top, and of one with a
    secret, itself alone; of a `closed` folder no secret.
    """
    if isinstance(given, dict):
        return [path for each in given.values() for path in named_paths(each, closed, base)]
    if isinstance(given, list | tuple):
        return [path for each in given for path in named_paths(each, closed, base)]
    if not isinstance(given, str) or not given or len(given) > 4096 or "\0" in given:
        return []
    if secret := secret_file(given):
        own = any(os.path.realpath(secret).startswith(f"{os.path.realpath(each)}/") for each in closed)
        return [] if own or not os.path.isfile(secret) else [secret]
    text = given if ".py:" not in given else given.rpartition(":")[0]
    # Path's own ways raise where a user has neither HOME nor a name.
    path = (base / os.path.expanduser(text)).absolute()
    narrow = {Path("/"), Path(os.path.expanduser("~")), Path("/tmp"), *closed}
    if os.path.isdir(path):
        return [] if path in narrow or os.path.realpath(path) in map(str, narrow) else [str(path)]
    if not os.path.isfile(path):
        found = shutil.which(given) if "/" not in given and len(given) < 64 else None
        return _program(Path(found)) if found else []
    if os.access(path, os.X_OK) and path.parent.name in ("bin", "sbin"):
        return _program(path)
    return [str(path)] if path.parent in narrow else [str(path.parent)]


def _program(path: Path) -> list[str]:
    """What a program in a folder of programs needs, and what it links to, as a Python of a virtual environment does."""
    found = []
    for _ in range(8):
        prefix = path.parent.parent
        found += [str(path.parent), *(str(prefix / name) for name in ("lib", "lib64", "pyvenv.cfg"))]
        if not path.is_symlink():
            break
        path = Path(os.path.abspath(path.parent / path.readlink()))
    return [each for each in found if os.path.exists(each)]
