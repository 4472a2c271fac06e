"""pyproject, lock file, generated stubs, and the two import names that others use too."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import kvferry
from tests.architecture.source_tree import PACKAGES, ROOT, module_name, source_files


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _locked() -> dict[str, Version]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pins}


def test_every_package_is_listed() -> None:
    found = {module_name(file) for file in source_files() if file.name == "__init__.py"}
    found |= {"proto", "proto.kvferry", "proto.kvferry.v1"}
    assert set(_project()["tool"]["setuptools"]["packages"]) == found


def test_import_rules_and_types_cover_every_package() -> None:
    tools = _project()["tool"]
    assert set(PACKAGES) | {"proto"} == set(tools["importlinter"]["root_packages"])
    assert set(PACKAGES) | {"proto", "tests"} <= set(tools["mypy"]["packages"])


def test_lock_file_satisfies_every_range() -> None:
    project, locked = _project()["project"], _locked()
    wanted = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["dev"]]
    unmet = [
        str(requirement)
        for requirement in wanted
        if not requirement.specifier.contains(locked.get(canonicalize_name(requirement.name), Version("0")))
    ]
    assert unmet == []
    assert locked["torch"] == Version("2.13.0")


def test_lock_file_holds_what_is_needed_through_others_too() -> None:
    """Every requirement of a locked package, as installed here, is locked."""
    locked = _locked()
    missing = {
        f"{name} needs {requirement.name}"
        for name in locked
        for requirement in map(Requirement, importlib.metadata.requires(name) or [])
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if canonicalize_name(requirement.name) not in locked
    }
    assert missing == set()


def test_version_is_said_once_and_is_none_that_transformers_takes_for_its_kernels() -> None:
    version = _project()["project"]["version"]
    assert kvferry.__version__ == version
    assert Version(version).release[:2] != (0, 18)


def test_generated_stubs_are_fresh(tmp_path: Path) -> None:
    """`make protos` again gives what is committed."""
    protos = sorted(path.relative_to(ROOT) for path in (ROOT / "proto").rglob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python", "mypy_grpc")]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    assert shutil.which("protoc-gen-mypy_grpc", path=environment["PATH"])
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *map(str, protos)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2*"))
    assert len(made) == 4 * len(protos)
    assert [path for path in made if (tmp_path / path).read_bytes() != (ROOT / path).read_bytes()] == []


def _python(code: str, cwd: Path) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("place", ["root", "elsewhere"])
def test_names_that_others_use_are_ours(place: str, tmp_path: Path) -> None:
    """transformers probes for a package `kernels`; proto-plus is imported as `proto`."""
    cwd = ROOT if place == "root" else tmp_path
    code = (
        "import proto, kernels; from transformers.utils import is_kernels_available; "
        "print(is_kernels_available(), proto.__file__, kernels.__file__)"
    )
    expected = f"False {ROOT / 'proto' / '__init__.py'} {ROOT / 'kernels' / '__init__.py'}"
    assert _python(code, cwd).splitlines()[-1] == expected


def test_torch_free_processes_load_no_torch() -> None:
    """Everything of the router, the common ground and the transfer in one fresh interpreter."""
    free = ("router", "kvferry", "kvtransfer")
    modules = [module_name(file) for file in source_files() if file.relative_to(ROOT).parts[0] in free]
    modules = [name for name in modules if not name.endswith("__main__")]
    heavy = "('torch', 'triton', 'safetensors.torch', 'transformers.modeling_utils')"
    code = (
        f"import importlib, sys; [importlib.import_module(name) for name in {modules!r}]; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert _python(code, ROOT) == "[]"
