"""The built package works without the checkout: `pip install` the wheel, then `invdist local` in an empty folder."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY


def _run(*command: str | Path, cwd: Path, **options: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment | options, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _environment(folder: Path) -> Path:
    """An environment with the wheel of this checkout and the dependencies of the running one, without its invdist."""
    source = folder / "source"
    shutil.copytree(REPOSITORY / "invdist", source / "invdist", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    _run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, cwd=folder)
    environment = folder / "environment"
    _run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    packages = next((environment / "lib").glob("python*/site-packages"))
    # A path in a .pth file: editable installs over there, which need their own .pth files read, stay behind.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    (wheel,) = folder.glob("*.whl")
    install = ("install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    _run(*pip, "--python", environment / "bin" / "python", *install, cwd=folder)
    return environment / "bin"


@pytest.mark.slow
def test_the_wheel_trains_in_an_empty_folder(tmp_path: Path) -> None:
    programs, empty = _environment(tmp_path), tmp_path / "empty"
    empty.mkdir()
    where = _run(programs / "python", "-c", "import invdist; print(invdist.__file__)", cwd=empty)
    assert where.startswith(str(tmp_path / "environment"))
    settings = ("training.epochs=1", "data.batch_size=256", "name=first")
    shown = _run(programs / "invdist", "local", "--preset", "tiny", *settings, cwd=empty)
    assert f"run: {empty}/runs/first\n" in shown
    assert f"run: {empty}/runs/first-plain\n" in shown, "plain training beside it"
    assert "ig, exposure vectors" in shown.split("first-plain\n")[1], "one table of both"
    assert sorted(path.name for path in empty.iterdir()) == ["data", "runs"]
    assert (empty / "data" / "tiny" / "dataset.json").exists()
    assert (empty / "runs" / "first" / "report.html").exists()


def test_files_that_are_not_python_are_packaged() -> None:
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    package = REPOSITORY / "invdist"
    missing = []
    for path in package.rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            owner = ".".join(path.parent.relative_to(REPOSITORY).parts)
            if not any(fnmatch.fnmatch(path.name, pattern) for pattern in declared.get(owner, [])):
                missing.append(str(path.relative_to(REPOSITORY)))
    assert missing == []


def test_the_config_of_the_checkout_is_the_one_in_the_package() -> None:
    from invdist.config.defaults import LOCAL

    assert (REPOSITORY / "configs" / "local.yaml").resolve() == LOCAL.resolve()
