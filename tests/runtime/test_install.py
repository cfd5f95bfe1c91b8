"""The stack check, against faked metadata: which combination is refused and with which words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from invdist.runtime import install
from invdist.runtime.errors import UserError

GOOD = {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}


def _problem(**changes: str | None) -> str | None:
    versions = GOOD | {name.replace("_", "-"): version for name, version in changes.items()}
    return install.stack_problem(versions.get)  # type: ignore[arg-type]


def test_the_two_right_stacks_pass() -> None:
    assert _problem() is None
    assert _problem(fbgemm_gpu_cpu=None, fbgemm_gpu="1.8.0") is None


@pytest.mark.parametrize(
    ("changes", "names", "command"),
    [
        ({"torch": "2.12.1"}, "torch 2.12.1", "pip install torch==2.13.0"),
        ({"torch": None}, "torch is not installed", "pip install torch==2.13.0"),
        ({"torchrec": "1.7.0"}, "torchrec 1.7.0", "pip install --no-deps torchrec==1.8.0"),
        ({"torchrec": None}, "torchrec is not installed", "pip install --no-deps torchrec==1.8.0"),
        ({"fbgemm_gpu_cpu": "1.7.0"}, "fbgemm-gpu-cpu 1.7.0", "pip install fbgemm-gpu-cpu==1.8.0"),
        ({"fbgemm_gpu_cpu": None}, "fbgemm is not installed", "pip install fbgemm-gpu-cpu==1.8.0"),
        ({"fbgemm_gpu": "1.8.0"}, "both installed", "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu"),
        ({"fbgemm_gpu_cpu": None, "fbgemm_gpu": "1.6"}, "fbgemm-gpu 1.6", "pip install fbgemm-gpu==1.8.0"),
    ],
)
def test_a_wrong_stack_is_one_sentence_with_the_remedy(
    changes: dict[str, str | None], names: str, command: str
) -> None:
    problem = _problem(**changes)
    assert problem is not None
    assert names in problem
    assert command in problem
    assert "\n" not in problem


def test_this_environment_passes_and_local_versions_count_as_their_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install.check_stack()
    monkeypatch.setattr(install.metadata, "version", lambda name: "2.13.0+cpu")
    assert install.installed("torch") == "2.13.0"


def test_a_wrong_stack_stops_a_command_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "installed", lambda name: "0")
    monkeypatch.setattr(install.stack_problem, "__defaults__", (lambda name: "0",))
    with pytest.raises(UserError, match="torch 0 does not match"):
        install.check_stack()


def test_importing_the_package_and_its_settings_stays_light() -> None:
    code = (
        "import sys, invdist, invdist.cli.main, invdist.config, invdist.runtime.install, invdist.runtime.private_ray;"
        "sys.exit(', '.join(m for m in ('torch', 'ray', 'numpy', 'pyarrow') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, f"heavy imports: {done.stderr}"
