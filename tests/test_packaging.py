"""The wheel holds everything that ``rlhf init`` needs, and works without the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rlhf_cli.commands.init import FILES

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree, built without network."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of its own into which the wheel is installed; its dependencies are those of here."""
    folder = tmp_path_factory.mktemp("an installation")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, "--target", str(folder), str(wheel)], check=True)
    return folder


def run_installed(installed: Path, *argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(installed / "bin" / "rlhf"), *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )


def test_wheel_holds_code_configs_samples_and_licence_but_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"rlhf_cli/_assets/{source}" for source in FILES.values()} <= set(names)
    assert "rlhf_cli/_assets/configs/sft.yaml" in names
    assert "stages/errors.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rlhf_cli", "stages"}


def test_wheel_holds_no_leftovers(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if "__pycache__" in name or name.endswith(".pyc")] == []


def test_installed_tool_makes_a_project_from_its_own_assets(
    installed: Path, tmp_path: Path
) -> None:
    ended = run_installed(installed, "init", "a project", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for name, source in FILES.items():
        packed = installed / "rlhf_cli" / "_assets" / source
        assert (tmp_path / "a project" / name).read_bytes() == packed.read_bytes()
    assert (tmp_path / "a project" / "base" / "config.json").exists()


def test_installed_tool_knows_its_version(installed: Path, wheel: Path, tmp_path: Path) -> None:
    ended = run_installed(installed, "--version", cwd=tmp_path)
    assert ended.stdout.strip() == f"rlhf {wheel.name.split('-')[1]}"
