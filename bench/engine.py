"""Engines without servers on the same cores: ours on native kernels, ours on plain torch, and the peers, in turn.

    .venv/bin/python -m bench engine --peers VLLM_DIR --json out.json

Each engine is a process of its own that answers one question at a time, so that one computes and the others wait.
Prefill tokens/s: n · prompt / time to n first tokens. Decode tokens/s: n · (output - 1) / (time of the whole -
prefill). Beside them what limits them: reading memory of the model's size, and products of the model's shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.environment import describe
from bench.report import Reporter, Spread, add_json_option, at_least_one
from kernels.decoder import NativeKernels, pack
from kernels.native import Linear, open_native
from kvferry.config import Config, child_environment
from kvferry.model_store import ModelStore

OUTPUT = 64
CASES = ((1, 128), (8, 128), (32, 128), (1, 2_000), (8, 2_000))
"""Sequences at a time, tokens of each prompt."""
READY_TIMEOUT_S = 600.0
PEERS = Path(__file__).parent / "peers"
LIBRARIES = ("libiomp5.so", "libtcmalloc_minimal.so.4")
"""vLLM asks to preload them."""


@dataclass(slots=True)
class Child:
    """One engine's process."""

    name: str
    process: subprocess.Popen[str]
    decode: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    prefill: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def answer(self) -> dict[str, Any]:
        """The next line of JSON."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def measure(self, n: int, prompt: int) -> None:
        """One measurement, kept."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"n": n, "prompt": prompt, "output": OUTPUT}) + "\n")
        self.process.stdin.flush()
        answer = self.answer()
        self.prefill.setdefault((n, prompt), []).append(n * prompt / answer["prefill_s"])
        decode_s = answer["whole_s"] - answer["prefill_s"]
        self.decode.setdefault((n, prompt), []).append(n * (OUTPUT - 1) / decode_s)


def _start(name: str, command: Sequence[str], environment: Mapping[str, str]) -> Child:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=dict(environment),
    )
    return Child(name, process)


def _ours(folder: Path, threads: int, kernels: str) -> Child:
    command = [
        sys.executable,
        "-m",
        "bench.engine_worker",
        str(folder),
        "--threads",
        str(threads),
        "--kernels",
        kernels,
    ]
    return _start(f"kvferry, {kernels}", command, child_environment(threads))


def _vllm(directory: Path, folder: Path, threads: int) -> Child:
    roots = (directory, Path("/usr/lib"))
    preload = [str(path) for name in LIBRARIES for root in roots for path in sorted(root.rglob(name))[:1]]
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(preload),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(directory / "bin" / "python"), str(PEERS / "vllm_engine.py"), str(folder)]
    return _start("vLLM", command, environment)


def best_s(work: Callable[[], object], times: int = 7) -> float:
    """The shortest of several times."""
    took_s = []
    for _ in range(times):
        begin_s = time.perf_counter()
        work()
        took_s.append(time.perf_counter() - begin_s)
    return min(took_s)


def limits(weight_bytes: int, threads: int, folder: Path) -> dict[str, float]:
    """What the machine can do: bytes read a second, and operations of products of SmolLM2's shapes."""
    torch.set_num_threads(threads)
    memory = torch.ones(weight_bytes // 4)
    read_s = best_s(memory.sum)
    kernels = NativeKernels(open_native(folder), threads)
    rows = torch.randn(512, 576).bfloat16()
    weight = torch.randn(3072, 576).bfloat16()
    packed = pack(weight, torch.bfloat16)
    linear = Linear(packed=packed.values.data_ptr(), num_inputs=576, num_outputs=3072)
    operations = 2 * 512 * 576 * 3072
    return {
        "read_bytes_per_s": weight_bytes / read_s,
        "own_product_flops": operations / best_s(lambda: kernels.linear(rows, linear)),
        "torch_product_flops": operations / best_s(lambda: torch.nn.functional.linear(rows, weight)),
    }


def _table(children: Sequence[Child], figures: str) -> list[str]:
    lines = ["| n, prompt | " + " | ".join(child.name for child in children) + " |", "|---" * (len(children) + 1) + "|"]
    for case in CASES:
        cells = [Spread.of(getattr(child, figures)[case]).text(0) for child in children]
        lines.append(f"| {case[0]}, {case[1]} | " + " | ".join(cells) + " |")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench engine", description=__doc__)
    parser.add_argument("--peers", default="", metavar="VLLM_DIR", help="environment that has vLLM")
    parser.add_argument("--threads", type=at_least_one, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--plain", action="store_true", help="plain torch, too, which takes long")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    report = Reporter()
    model = Config().model
    folder = ModelStore(model.cache_path).prepare(model.name, report)
    weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    found = limits(weight_bytes, options.threads, model.kernels_path)
    report(f"limits: {found}")
    with ExitStack() as stack:
        children = [_ours(folder, options.threads, "native")]
        if options.plain:
            children.append(_ours(folder, options.threads, "reference"))
        if options.peers:
            children.append(_vllm(Path(options.peers), folder, options.threads))
        for child in children:
            stack.callback(child.process.kill)
        for child in children:
            child.answer()
            report(f"{child.name} is ready")
        _measure(children, options.rounds, report)
    lines = ["prefill, tokens/s", *_table(children, "prefill"), "", "decode, tokens/s", *_table(children, "decode")]
    _write(options.json, found, children, lines)
    return 0


def _measure(children: Sequence[Child], rounds: int, report: Reporter) -> None:
    """The first round, in which caches fill and compilers run, is not kept."""
    for number in range(rounds + 1):
        for n, prompt in CASES:
            for child in children:
                child.measure(n, prompt)
                if number == 0:
                    child.prefill.clear()
                    child.decode.clear()
        report(f"round {number} of {rounds}")


def _write(target: str | None, found: Mapping[str, float], children: Sequence[Child], lines: Sequence[str]) -> None:
    figures = {
        "environment": describe(),
        "limits": dict(found),
        "engines": {
            child.name: [
                {"n": n, "prompt": prompt, "prefill": child.prefill[n, prompt], "decode": child.decode[n, prompt]}
                for n, prompt in CASES
            ]
            for child in children
        },
    }
    if target != "-":
        print("\n".join(lines))
    if target == "-":
        print(json.dumps(figures, indent=2))
    elif target:
        Path(target).write_text(json.dumps(figures, indent=2) + "\n")
