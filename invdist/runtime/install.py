"""The versions of torch, TorchRec and FBGEMM that work together, checked without importing them."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata

from invdist.runtime.errors import UserError

TORCH = "2.13.0"
TORCHREC = "1.8.0"
FBGEMM = "1.8.0"
_FBGEMM_PACKAGES = ("fbgemm-gpu", "fbgemm-gpu-cpu")


def installed(package: str) -> str | None:
    """The installed version of a package without its local part (`+cpu`), or None."""
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def stack_problem(version_of: Callable[[str], str | None] = installed) -> str | None:
    """One sentence on what is wrong with the installed versions and how to fix it, or None."""
    torch, torchrec = version_of("torch"), version_of("torchrec")
    fbgemm = {name: version for name in _FBGEMM_PACKAGES if (version := version_of(name)) is not None}
    if torch != TORCH:
        return _advice("torch", torch, f"pip install torch=={TORCH}")
    if len(fbgemm) == 2:
        return (
            "fbgemm-gpu and fbgemm-gpu-cpu are both installed and overwrite each other: "
            "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu, then pip install the one for this machine "
            f"(fbgemm-gpu-cpu=={FBGEMM} without a GPU, fbgemm-gpu=={FBGEMM} with one)"
        )
    if not fbgemm:
        return (
            f"fbgemm is not installed: pip install fbgemm-gpu-cpu=={FBGEMM} on a machine without a GPU, "
            f"fbgemm-gpu=={FBGEMM} on one with"
        )
    name, version = next(iter(fbgemm.items()))
    if version != FBGEMM:
        return _advice(name, version, f"pip install {name}=={FBGEMM}")
    if torchrec != TORCHREC:
        # Without --no-deps, TorchRec installs fbgemm-gpu beside fbgemm-gpu-cpu.
        return _advice("torchrec", torchrec, f"pip install --no-deps torchrec=={TORCHREC}")
    return None


def environment() -> dict[str, str | None]:
    """The versions of Python and of the packages that decide what a run computes."""
    packages = ("invdist", "torch", "torchrec", "ray", "pyarrow", "numpy")
    return {"python": platform.python_version(), **{name: installed(name) for name in packages}}


def check_stack() -> None:
    """Raises `UserError` if torch, TorchRec and FBGEMM do not match; call it before importing torch."""
    problem = stack_problem()
    if problem is not None:
        raise UserError(problem)


def _advice(name: str, version: str | None, command: str) -> str:
    found = "is not installed" if version is None else f"{version} does not match the rest of the stack"
    return f"{name} {found}: {command}"
