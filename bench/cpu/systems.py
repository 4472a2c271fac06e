"""The engines of a run and how each is started: the same cores for all, the settings that each recommends."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.cpu.cases import Case
from bench.cpu.child import Child
from kvferry.config import child_environment

PEERS = Path(__file__).parents[1] / "peers"
PRELOADED = ("libiomp5.so", "libtcmalloc_minimal.so.4")
"""vLLM asks for them."""
VLLM_CACHE_GB = "2"
MOST_PLAIN_TOKENS = 4_096
"""Plain torch takes too long for larger batches."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What all have in common."""

    folder: Path
    gguf: Path | None
    threads: int


@dataclass(frozen=True, slots=True)
class System:
    """One engine.

    Attributes:
        kind: ours, torch (ours on plain torch), vllm, openvino.
        precision: of the weights: bf16, int8, int4 or gguf.
        directory: a peer's environment.
    """

    name: str
    kind: str
    precision: str
    directory: Path | None = None

    @property
    def environment(self) -> Path:
        """A peer's."""
        assert self.directory is not None, "ours run in this one"
        return self.directory

    def takes(self, case: Case) -> bool:
        return self.kind != "torch" or case.num_tokens <= MOST_PLAIN_TOKENS

    def open(self, on: Machine) -> Child:
        """Starts it; it is not ready yet."""
        if self.kind == "vllm":
            return self._vllm(on)
        if self.kind == "openvino":
            assert on.gguf is not None
            command = [_python(self.environment), str(PEERS / "openvino_engine.py"), str(on.gguf), str(on.threads)]
            return Child(self.name, command, dict(os.environ))
        quantization = "none" if self.precision == "bf16" else self.precision
        kernels = "reference" if self.kind == "torch" else "native"
        command = [sys.executable, "-m", "bench.engine_worker", str(on.folder), "--threads", str(on.threads)]
        command += ["--kernels", kernels, "--quantization", quantization]
        return Child(self.name, command, child_environment(on.threads))

    def _vllm(self, on: Machine) -> Child:
        environment = {
            **os.environ,
            "LD_PRELOAD": ":".join(map(str, preloaded(self.environment))),
            "OMP_NUM_THREADS": str(on.threads),
            "VLLM_CPU_KVCACHE_SPACE": VLLM_CACHE_GB,
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[: on.threads])),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
        }
        return Child(self.name, [_python(self.environment), str(PEERS / "vllm_engine.py"), str(on.folder)], environment)


def preloaded(directory: Path) -> list[Path]:
    """The first of each library that vLLM asks for, in its environment or the system."""
    found = [[*directory.rglob(name), *Path("/usr/lib").rglob(name)][:1] for name in PRELOADED]
    return [path for paths in found for path in paths]


def ours(quantizations: list[str], *, plain: bool) -> list[System]:
    """Ours in each precision, and on plain torch."""
    systems = [
        System(f"kvferry {precision}", "ours", precision)
        for precision in ("bf16" if name == "none" else name for name in quantizations)
    ]
    return systems + ([System("plain torch bf16", "torch", "bf16")] if plain else [])


def peers(directories: list[Path]) -> list[System]:
    """Of environments; what they have installed says which peer each is. Raises ValueError for one that is none."""
    systems = []
    for directory in directories:
        if any(directory.glob("lib/python*/site-packages/vllm")):
            systems.append(System("vLLM bf16", "vllm", "bf16", directory))
        elif any(directory.glob("lib/python*/site-packages/openvino_genai")):
            systems.append(System("OpenVINO GGUF", "openvino", "gguf", directory))
        else:
            raise ValueError(f"{directory}: an environment with neither vLLM nor OpenVINO GenAI")
    return systems


def peer_versions(systems: list[System]) -> dict[str, str]:
    """Of the peers' packages, as their environments name them."""
    versions = {}
    for system in systems:
        if system.directory is not None:
            package = {"vllm": "vllm_cpu", "openvino": "openvino_genai"}[system.kind]
            info = next(system.directory.glob(f"lib/python*/site-packages/{package}-*.dist-info"), None)
            versions[system.name] = info.name.removesuffix(".dist-info").split("-")[1] if info else "unknown"
    return versions


def _python(directory: Path) -> str:
    return str(directory / "bin" / "python")
