"""Kernels in C++: built once for this very processor, loaded, and called with tensors.

    open_native(folder) ─► the library of these sources, this compiler and this processor ─► Native ─► Team, Packed …

The library uses what the processor has (AVX-512 with bfloat16, AVX2, NEON …): the compiler sees to it, and another
processor gets a library of its own. Without a compiler there are none, and `kernels/reference.py` computes.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).parent / "cpu"
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-Wno-psabi")
NATIVE_FLAGS = {"x86_64": ("-march=native", "-mprefer-vector-width=512")}
OTHER_FLAGS = ("-mcpu=native",)
BUILD_TIMEOUT_S = 300.0
MAX_REASON_CHARS = 400


class NativeMissing(RuntimeError):
    """There are no native kernels on this machine; the text says why."""


class Linear(ctypes.Structure):
    """A packed weight matrix; `bias` may be null. Of codes: `bits` of one, scales, minimums (null: -128 · scale)."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("minimums", ctypes.c_void_p),
        ("bits", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
    ]


class Layer(ctypes.Structure):
    """One decoder layer; `window` 0: all."""

    _fields_ = [
        *[(name, Linear) for name in ("projection", "output", "gate_up", "down")],
        *[(name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")],
        ("window", ctypes.c_int64),
    ]


class Decoder(ctypes.Structure):
    """A model."""

    _fields_ = [
        *[
            (name, ctypes.c_int64)
            for name in ("is_bfloat16", "is_quantised", "num_layers", "hidden_size", "intermediate_size", "num_heads")
        ],
        *[(name, ctypes.c_float) for name in ("epsilon", "scaling", "softcap")],
        ("layers", ctypes.POINTER(Layer)),
        ("final_norm", ctypes.c_void_p),
        ("head", Linear),
    ]


class Cache(ctypes.Structure):
    """The pool, `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("num_layers", "num_kv_heads", "block_size", "head_dim")],
    ]


class Sequences(ctypes.Structure):
    """As `reference.paged_attention` takes them; int64 all."""

    _fields_ = [
        ("num_sequences", ctypes.c_int64),
        ("max_blocks", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("block_tables", "first_rows", "context_lengths")],
    ]


class AttentionSettings(ctypes.Structure):
    """`window` 0: all; `softcap` 0: none."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("num_heads", "layer", "window")],
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class Step(ctypes.Structure):
    """The rows of one step."""

    _fields_ = [
        ("num_tokens", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("slots", "cosines", "sines", "x")],
        ("cache", Cache),
        ("sequences", Sequences),
    ]


class Native:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        pointer, number, switch = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self.new_team = library.kvferry_team
        self.new_team.argtypes, self.new_team.restype = [switch], pointer
        self.end_team = library.kvferry_end_team
        self.end_team.argtypes, self.end_team.restype = [pointer], None
        self.layers = library.kvferry_layers
        self.layers.argtypes, self.layers.restype = [pointer, ctypes.POINTER(Decoder), ctypes.POINTER(Step)], None
        self.head = library.kvferry_head
        self.head.argtypes = [pointer, ctypes.POINTER(Decoder), pointer, pointer, number, pointer, number]
        self.head.restype = None
        self.attention = library.kvferry_attention
        self.attention.argtypes = [
            pointer,
            switch,
            ctypes.POINTER(Cache),
            ctypes.POINTER(Sequences),
            ctypes.POINTER(AttentionSettings),
            pointer,
            pointer,
        ]
        self.attention.restype = None
        self.linear = library.kvferry_linear
        self.linear.argtypes = [pointer, switch, switch, pointer, number, number, ctypes.POINTER(Linear), pointer]
        self.linear.restype = None


def open_native(folder: Path) -> Native:
    """The library, from `folder` where it was built before.

    Raises NativeMissing where there is no compiler, or it cannot build it.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NativeMissing(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    machine = platform.machine()
    command = [compiler, *FLAGS, *NATIVE_FLAGS.get(machine, OTHER_FLAGS)]
    path = folder / f"kernels-{_digest(command)}.so"
    if not path.is_file():
        _build(command, path)
    try:
        return Native(path)
    except OSError as error:
        raise NativeMissing(f"{path} cannot be loaded: {error}") from error


def _digest(command: list[str]) -> str:
    """Of everything the library depends on."""
    digest = hashlib.sha256("\0".join(command).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(_processor().encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What tells processors apart whose libraries may differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _build(command: list[str], path: Path) -> None:
    """One process builds, others that come meanwhile wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        if path.is_file():
            return
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            done = subprocess.run(
                [*command, str(SOURCES / "decoder.cpp"), "-o", str(unfinished)],
                capture_output=True,
                text=True,
                timeout=BUILD_TIMEOUT_S,
                check=False,
            )
            if done.returncode != 0:
                raise NativeMissing(f"{command[0]} cannot build them: {done.stderr.strip()[:MAX_REASON_CHARS]}")
            unfinished.replace(path)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeMissing(f"{command[0]} cannot build them: {error}") from error
        finally:
            unfinished.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
