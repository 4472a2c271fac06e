"""Kernels in C++: built once for this very processor, loaded, and called with tensors.

    open_native(folder) ─► the library of these sources, this compiler and this processor ─► Native ─► Team, Packed …

The library uses what the processor has (AMX, AVX-512 with bfloat16, AVX2, NEON …): the compiler sees to it, and another
processor gets a library of its own. A new one shows in a child process that it computes rightly; where it does not on
AMX, one without AMX is built. Without a compiler there are none, and `kernels/reference.py` computes.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-Wno-psabi")
NATIVE_FLAGS = {"x86_64": ("-march=native", "-mprefer-vector-width=512")}
OTHER_FLAGS = ("-mcpu=native",)
AMX_FLAG = "amx_tile"
"""How Linux names what a processor with AMX has."""
WITHOUT_AMX = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
BUILD_TIMEOUT_S = 300.0
CHECK_TIMEOUT_S = 60.0
CHECK = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
if not library.kvferry_permitted():
    sys.exit("the system does not permit what it is built of")
if not library.kvferry_check():
    sys.exit("it computes wrongly")
"""
"""Of the child that tries a new library; an instruction that the processor refuses ends the child alone."""
MAX_REASON_CHARS = 400


class NativeMissing(RuntimeError):
    """There are no native kernels on this machine; the text says why."""


class NativeUnfit(NativeMissing):
    """They were built, and may not run here or compute wrongly; the text says which."""


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
        *[(name, ctypes.c_void_p) for name in ("attention_post_norm", "mlp_post_norm")],
        *[(name, ctypes.c_int64) for name in ("window", "rotation")],
    ]


class Decoder(ctypes.Structure):
    """A model."""

    _fields_ = [
        *[
            (name, ctypes.c_int64)
            for name in (
                "is_bfloat16",
                "is_quantised",
                "is_gelu",
                "num_layers",
                "hidden_size",
                "intermediate_size",
                "num_heads",
            )
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
    """The loaded library, permitted to this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        if not library.kvferry_permitted():
            raise NativeUnfit(f"the system does not permit what {path} is built of")
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

    Raises NativeMissing where there is no compiler, it cannot build it, or what it built is unfit.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NativeMissing(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    command = [compiler, *FLAGS, *NATIVE_FLAGS.get(platform.machine(), OTHER_FLAGS)]
    if AMX_FLAG not in _processor().split():
        return _open(command, folder)
    try:
        return _open(command, folder)
    except NativeUnfit as error:
        logger.warning("%s: AMX is not used, and prompts take longer", error)
        return _open([*command, *WITHOUT_AMX], folder)


def _open(command: list[str], folder: Path) -> Native:
    path = folder / f"kernels-{_digest(command)}.so"
    unfit = path.with_suffix(".unfit")  # why the library is not there
    if not path.is_file() and not unfit.is_file():
        _build(command, path, unfit)
    if unfit.is_file():
        raise NativeUnfit(f"{path} was not kept: {unfit.read_text()} (remove {unfit.name} to try again)")
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


def _build(command: list[str], path: Path, unfit: Path) -> None:
    """Ends with the library at `path`, or why it is not there at `unfit`. Processes that come meanwhile wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        if path.is_file() or unfit.is_file():
            return
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            done = _run([*command, str(SOURCES / "decoder.cpp"), "-o", str(unfinished)], BUILD_TIMEOUT_S)
            if done.returncode != 0:
                raise NativeMissing(f"{command[0]} cannot build them: {_last_words(done)}")
            flaw = _flaw(unfinished)
            if flaw is not None:
                unfinished.write_text(flaw)
            unfinished.replace(path if flaw is None else unfit)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeMissing(f"{command[0]} cannot build them: {error}") from error
        finally:
            unfinished.unlink(missing_ok=True)


def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip()[:MAX_REASON_CHARS]


def _flaw(library: Path) -> str | None:
    """Why it may not be used, tried in a child."""
    try:
        done = _run([sys.executable, "-I", "-c", CHECK, str(library)], CHECK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"its check did not end within {CHECK_TIMEOUT_S:.0f} s"
    if done.returncode < 0:
        return f"its check was ended by {signal.Signals(-done.returncode).name}"
    return None if done.returncode == 0 else _last_words(done)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
