"""Native linears and decoder: equal to plain torch, each row's bits its own; and machines that cannot build them."""

from __future__ import annotations

import logging
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.forward_batch import SequenceSlice
from engine.kv_cache import PagedKvCache
from engine.lean_decoder import LeanDecoder
from engine.loader import LoadedModel, load_model
from engine.model_runner import ModelRunner
from engine.paged_attention import build_paged_batch
from engine.runner import RunnerConfig
from kernels import native
from kernels.decoder import NativeKernels, pack, pack_gate_up, padded
from kernels.native import NativeMissing, open_native
from kvferry.config import Config
from kvferry.errors import FailedPrecondition
from tests.support.models import VOCAB_SIZE, save_tiny_model

LEAN = ("llama", "llama_tied", "mistral", "qwen2", "qwen3", "gemma3")
DTYPES = (torch.float32, torch.bfloat16)
NUM_BLOCKS = 64
EMULATES_AMX = (*native.FLAGS, "-O1", "-DKVFERRY_EMULATE_AMX")


def kernels(num_threads: int = 1) -> NativeKernels:
    return NativeKernels(open_native(Config().model.kernels_path), num_threads)


@pytest.fixture
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is named by the parameter: the processor's own, or AMX in plain code."""
    if request.param == "amx-emulated":
        monkeypatch.setattr(native, "FLAGS", EMULATES_AMX)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("build", "dtype"),
    [("native", torch.float32), ("native", torch.bfloat16), ("amx-emulated", torch.bfloat16)],
    indirect=["build"],
)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(2, 1), (64, 320), (98, 33), (576, 960)])
@pytest.mark.usefixtures("build")
def test_linear_is_the_product_and_a_row_depends_on_itself_alone(
    dtype: torch.dtype, num_inputs: int, num_outputs: int
) -> None:
    weight = (draw(num_outputs, num_inputs) * num_inputs**-0.5).to(dtype)
    rows = draw(61, num_inputs, seed=1).to(dtype)
    packed = pack(weight, dtype)
    linear = packed.linear(num_inputs, num_outputs)
    whole = kernels().linear(rows, linear)
    torch.testing.assert_close(whole, rows.float() @ weight.float().T, rtol=1e-4, atol=1e-4)
    for team in (kernels(1), kernels(3)):
        for count in (1, 2, 5, 11, 12, 13, 16, 17, 32, 33, 48, 49, 60):
            assert torch.equal(team.linear(rows[:count], linear), whole[:count])
            assert torch.equal(team.linear(rows[-count:], linear), whole[-count:])


@pytest.mark.parametrize("build", ["amx-emulated"], indirect=True)
@pytest.mark.usefixtures("build")
def test_amx_adds_up_as_the_manual_says() -> None:
    """32 inputs at a time: sums of the even and of the odd ones, then both, then what was there; nothing subnormal."""
    rows, weight = draw(5, 70).bfloat16(), draw(40, 70, seed=1).bfloat16()
    rows[1, ::3] = weight[2, ::5] = 1e-39
    rows[2], weight[3] = rows[2] * 2.0**-70, weight[3] * 2.0**-70
    packed = pack(weight, torch.bfloat16)
    linear = packed.linear(70, 40)
    smallest = torch.finfo(torch.float32).tiny
    exact_rows, exact_weight = (torch.where(part.abs() < smallest, 0, part).float() for part in (rows, weight))
    right = torch.zeros(5, 40)
    for first in range(0, 70, 32):
        sums = torch.zeros(2, 5, 40)
        for place in range(first, min(first + 32, 70)):
            product = exact_rows[:, place, None] * exact_weight[None, :, place]  # which float32 has exactly
            sums[place % 2] += product
            sums[sums.abs() < smallest] = 0
        right += sums[0] + sums[1]
    assert torch.equal(kernels().linear(rows, linear), right)


def rounded(values: Tensor, scales_dtype: torch.dtype) -> Tensor:
    """Every 32 values of a row in 255 steps of a scale of their own."""
    groups = values.view(len(values), -1, 32)
    scales = (groups.abs().amax(dim=2, keepdim=True) / 127).to(scales_dtype).float()
    return ((groups / scales.clamp_min(2.0**-24)).round().clamp(-127, 127) * scales).view(values.shape)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(32, 1), (64, 320), (576, 65)])
def test_linear_in_int8_is_the_product_of_what_was_rounded(num_inputs: int, num_outputs: int) -> None:
    weight = draw(num_outputs, num_inputs) * num_inputs**-0.5
    weight[0, :32] = 0.0
    rows = draw(50, num_inputs, seed=1)
    rows[3] *= 1e4
    rows[4] = 0.0
    packed = pack(weight, torch.int8)
    assert packed.scales is not None
    linear = packed.linear(num_inputs, num_outputs)
    ours = kernels(2).linear(rows, linear)
    right = rounded(rows, torch.float32).double() @ rounded(weight, torch.float16).double().T
    torch.testing.assert_close(
        ours.double(), right, rtol=2e-3, atol=2e-3
    )  # a value between two steps may go either way
    for count in (1, 5, 6, 7, 13, 49):
        assert torch.equal(kernels().linear(rows[:count], linear), ours[:count])
    for bad in (float("nan"), float("inf")):
        rows[1, num_inputs - 1] = bad
        assert not torch.isfinite(kernels().linear(rows, linear)[1]).any()


def test_gates_and_their_partners_share_a_tile() -> None:
    gate, up = torch.full((20, 4), 1.0), torch.full((20, 4), 2.0)
    packed = pack_gate_up(gate, up, torch.float32).values  # [2 tiles, 4 units, 32]
    assert packed.shape == (2, 4, 32)
    assert packed[0, 0].tolist() == [1.0] * 16 + [2.0] * 16
    assert packed[1, 3].tolist() == [1.0] * 4 + [0.0] * 12 + [2.0] * 4 + [0.0] * 12


def test_units_must_be_whole() -> None:
    with pytest.raises(ValueError, match="whole number of units"):
        pack(torch.zeros(4, 3), torch.bfloat16)
    assert padded(33) == 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny_model(root / name, name) for name in (*LEAN, "gemma2")}


def logits(
    loaded: LoadedModel,
    prompts: list[list[int]],
    *,
    chunk: int,
    block_size: int = 16,
    together: bool = False,
    kernels_of: NativeKernels | None = None,
) -> list[Tensor]:
    """Of every position of every prompt, computed in chunks; `together`: all prompts' chunks in the same steps."""
    cache = PagedKvCache(loaded.layout, NUM_BLOCKS)
    each = NUM_BLOCKS // len(prompts)
    tables = [list(range(number * each, (number + 1) * each))[::-1] for number in range(len(prompts))]
    told: list[list[Tensor]] = [[] for _ in prompts]
    groups = [list(range(len(prompts)))] if together else [[number] for number in range(len(prompts))]
    for group in groups:
        for start in range(0, max(len(prompts[number]) for number in group), chunk):
            going = [number for number in group if start < len(prompts[number])]
            parts = [
                SequenceSlice(str(number), prompts[number][start : start + chunk], start, tables[number], sample=None)
                for number in going
            ]
            more = {} if kernels_of is None else {"attend": kernels_of.paged_attention}
            batch = build_paged_batch(parts, block_size, cache.tensor, **more)  # type: ignore[arg-type]
            rows = loaded.forward.logits(batch, torch.arange(batch.input_ids.shape[1]))
            for number, part in zip(going, torch.split(rows, [len(one.token_ids) for one in parts]), strict=True):
                told[number].append(part.clone())
    return [torch.cat(parts) for parts in told]


PROMPTS = [
    [(number * 31 + place * 7 + place * place) % VOCAB_SIZE for place in range(5 + 29 * number)] for number in range(4)
]


@pytest.mark.parametrize("architecture", LEAN)
def test_lean_decoder_is_transformers_in_float32(folders: dict[str, Path], architecture: str) -> None:
    lean = load_model(folders[architecture], dtype="float32", block_size=16, kernels=kernels(2))
    generic = load_model(folders[architecture], dtype="float32", block_size=16)
    assert isinstance(lean.forward, LeanDecoder)
    for ours, theirs in zip(
        logits(lean, PROMPTS, chunk=100, together=True), logits(generic, PROMPTS, chunk=100), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("build", "architecture", "precision"),
    [
        *[("native", name, precision) for name in LEAN for precision in ("float32", "bfloat16", "int8", "int4")],
        ("amx-emulated", "llama", "bfloat16"),
        ("amx-emulated", "qwen2", "bfloat16"),
    ],
    indirect=["build"],
)
@pytest.mark.usefixtures("build")
def test_the_bits_of_a_row_depend_on_nothing_beside_it(
    folders: dict[str, Path], architecture: str, precision: str
) -> None:
    """Alone or beside others, in chunks of any size, on any blocks, with any number of threads."""
    dtype, quantization = ("bfloat16", precision) if precision in ("int8", "int4") else (precision, "none")
    loaded = load_model(
        folders[architecture], dtype=dtype, block_size=16, kernels=kernels(1), quantization=quantization
    )
    right = logits(loaded, PROMPTS, chunk=1000)
    for num_threads, block_size, chunk, together in (
        (1, 16, 1, True),
        (2, 16, 16, True),
        (3, 8, 7, True),
        (1, 32, 33, False),
    ):
        other = load_model(
            folders[architecture],
            dtype=dtype,
            block_size=block_size,
            kernels=kernels(num_threads),
            quantization=quantization,
        )
        ours = logits(other, PROMPTS, chunk=chunk, block_size=block_size, together=together)
        assert all(torch.equal(a, b) for a, b in zip(ours, right, strict=True))


@pytest.mark.parametrize("build", ["native", "amx-emulated"], indirect=True)
@pytest.mark.usefixtures("build")
def test_bfloat16_is_as_near_to_float32_as_plain_torch(folders: dict[str, Path]) -> None:
    exact = torch.cat(logits(load_model(folders["llama"], dtype="float32", block_size=16), PROMPTS, chunk=100))
    lean = load_model(folders["llama"], dtype="bfloat16", block_size=16, kernels=kernels())
    plain = load_model(folders["llama"], dtype="bfloat16", block_size=16)
    ours, theirs = (torch.cat(logits(loaded, PROMPTS, chunk=100)) for loaded in (lean, plain))
    assert (ours - exact).norm() < (theirs - exact).norm()


def test_rounded_weights_are_another_model_and_near_the_exact_one(folders: dict[str, Path]) -> None:
    exact = load_model(folders["llama"], dtype="float32", block_size=16, kernels=kernels())
    int8, int4 = (
        load_model(folders["llama"], dtype="float32", block_size=16, kernels=kernels(), quantization=quantization)
        for quantization in ("int8", "int4")
    )
    assert len({loaded.layout.model_fingerprint for loaded in (exact, int8, int4)}) == 3
    ours, theirs = (torch.cat(logits(loaded, PROMPTS, chunk=100)) for loaded in (int8, exact))
    assert 0.0 < (ours - theirs).norm() / theirs.norm() < 0.2  # these weights amplify every difference


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_cannot_be_rounded_is_refused(folders: dict[str, Path], quantization: str) -> None:
    for name, team in (("gemma2", kernels()), ("llama", None)):
        with pytest.raises(FailedPrecondition, match=f"quantization {quantization} needs"):
            load_model(folders[name], dtype="float32", block_size=16, kernels=team, quantization=quantization)
    with pytest.raises(ValueError, match="groups of 32"):
        pack(torch.zeros(4, 40), torch.int8)


def test_other_models_run_their_attention_natively(folders: dict[str, Path]) -> None:
    team = kernels()
    native_attention = load_model(folders["gemma2"], dtype="float32", block_size=16, kernels=team)
    generic = load_model(folders["gemma2"], dtype="float32", block_size=16)
    assert not isinstance(native_attention.forward, LeanDecoder)
    ours = logits(native_attention, PROMPTS, chunk=16, together=True, kernels_of=team)
    for one, other in zip(ours, logits(generic, PROMPTS, chunk=16), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-4)


def test_a_machine_without_compiler_computes_on_torch_with_one_warning(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "COMPILERS", ("no-such-compiler",))
    config = RunnerConfig(num_blocks=4, kernels="auto", kernels_folder=tmp_path)
    with caplog.at_level(logging.WARNING):
        runner = ModelRunner(folders["llama"], config)
    assert runner.run([SequenceSlice("a", [1, 2], 0, [0], sample=None)]) == [None]
    assert [record.getMessage() for record in caplog.records if "no-such-compiler" in record.getMessage()]
    with pytest.raises(FailedPrecondition, match="no C\\+\\+ compiler"):
        ModelRunner(folders["llama"], RunnerConfig(num_blocks=4, kernels="native", kernels_folder=tmp_path))


def test_a_compiler_that_fails_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken-compiler"
    compiler.write_text("#!/bin/sh\necho out of luck >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(native, "COMPILERS", (str(compiler),))
    with pytest.raises(NativeMissing, match="out of luck"):
        open_native(tmp_path / "built")
    assert not list((tmp_path / "built").glob("*.so*"))


def compiled_for_amx(source: str, *flags: str) -> str:
    """What the compiler makes of it for a processor with AMX, which none of these tests needs."""
    compiler = next(filter(None, map(shutil.which, native.COMPILERS)), None)
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("no compiler for x86-64")
    kept = [flag for flag in native.FLAGS if flag != "-shared"]
    command = [compiler, *kept, "-march=sapphirerapids", *flags, "-I", str(native.SOURCES), "-x", "c++", "-", "-o", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=100)
    if "sapphirerapids" in done.stderr:
        pytest.skip("the compiler is older than AMX")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_amx_is_compiled_to_as_many_products_as_loads() -> None:
    compiled_for_amx('#include "decoder.cpp"', "-fsyntax-only")
    code = compiled_for_amx(
        """
        #include "amx.h"
        using namespace kvferry::amx;
        void sums(const uint32_t* rows, int64_t stride, const uint32_t* weights, int64_t count, float (&to)[32][32]) {
          sum_rows<2>(rows, stride, weights, count, to);
        }
        """,
        "-S",
    )
    blocks = [
        [line.split()[0] for line in block.splitlines() if line.startswith("\t") and not line.startswith("\t.")]
        for block in code.split("\n.L")
    ]
    products = [block for block in blocks if "tdpbf16ps" in block]
    assert len(products) == 2  # the loop, and what is left after it
    assert all(block.count("tdpbf16ps") == block.count("tileloadd") == 4 for block in products)
    assert len(min(products, key=len)) <= 20  # the loop has little else


STUB = """
extern "C" {
#define NOTHING(name) void kvferry_##name() {}
NOTHING(team) NOTHING(end_team) NOTHING(layers) NOTHING(head) NOTHING(attention) NOTHING(linear)
#if defined(__AMX_TILE__)
int kvferry_permitted() { return %s; }
int kvferry_check() { %s }
#else
int kvferry_permitted() { return 1; }
int kvferry_check() { return 1; }
#endif
}
"""


def stub(folder: Path, text: str) -> Path:
    """Sources that are compiled in no time."""
    folder.mkdir()
    (folder / "decoder.cpp").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("permitted", "check", "reason"),
    [
        ("1", "__builtin_trap();", "ended by SIGILL"),
        ("1", "return 0;", "computes wrongly"),
        ("0", "return 1;", "does not permit"),
        ("1", "return 1;", None),
    ],
)
def test_where_amx_fails_another_library_is_built_once(
    permitted: str,
    check: str,
    reason: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if platform.machine() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("no compiler for x86-64")
    monkeypatch.setattr(native, "SOURCES", stub(tmp_path / "sources", STUB % (permitted, check)))
    built = tmp_path / "built"
    monkeypatch.setattr(native, "NATIVE_FLAGS", {"x86_64": ("-mamx-tile",)})
    monkeypatch.setattr(native, "_processor", lambda: "flags : fpu amx_bf16 amx_tile")
    first = open_native(built).path
    messages = [record.getMessage() for record in caplog.records]
    if reason is None:
        assert not messages
        assert len(list(built.glob("*.so"))) == 1
        return
    (message,) = messages
    assert reason in message
    monkeypatch.setattr(native, "_run", None)  # nothing is built or tried again
    assert open_native(built).path == first
    assert len(list(built.glob("*.so"))) == len(list(built.glob("*.unfit"))) == 1


def test_a_library_that_computes_wrongly_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = (STUB % ("1", "")).replace("kvferry_check() { return 1; }", "kvferry_check() { return 0; }")
    monkeypatch.setattr(native, "SOURCES", stub(tmp_path / "sources", wrong))
    with pytest.raises(NativeMissing, match="computes wrongly"):
        open_native(tmp_path / "built")
