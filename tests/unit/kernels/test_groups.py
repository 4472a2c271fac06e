"""Weights that are codes: a GGUF's found again to the last bit, others rounded, and products with them in C++."""

from __future__ import annotations

import platform
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from kernels import native
from kernels.decoder import NativeKernels, gate_up_rows, pack, pack_gate_up, pack_groups, pack_head
from kernels.groups import BYTE_OFFSET, NIBBLES, Groups, exact_groups, round_to_bytes, round_to_nibbles
from kernels.native import open_native
from kernels.reference import linear_of_codes
from kvferry.config import Config

QUANTISED = (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0)
PORTABLE = (("-march=x86-64-v3",), ("-march=x86-64-v4",))
"""AVX2, and AVX-512 without products of bytes. Compilers need minutes for processors with less."""


def kernels(num_threads: int = 1) -> NativeKernels:
    return NativeKernels(open_native(Config().model.kernels_path), num_threads)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def as_gguf(weight: Tensor, kind: Kind) -> Tensor:
    """The values that a GGUF file with `weight` in this kind holds."""
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind).copy())


def drawn_codes(num_outputs: int, num_inputs: int, *, least: int, most: int) -> Groups:
    """Codes of 4 bits that need not reach 0 or 15, with scales of both signs."""
    generator = np.random.default_rng(1)
    codes = generator.integers(least, most + 1, (num_outputs, num_inputs // 32, 32), dtype=np.uint8)
    scales = draw(num_outputs, num_inputs // 32, seed=2).half() * 0.01
    return Groups(torch.from_numpy(codes), scales, draw(*scales.shape, seed=3).half(), bits=4, is_exact=True)


@pytest.mark.parametrize(("kind", "bits"), [(Kind.Q4_0, 4), (Kind.Q4_1, 4), (Kind.Q8_0, 8)])
def test_a_ggufs_values_are_found_again_to_the_last_bit(kind: Kind, bits: int) -> None:
    weight = as_gguf(draw(45, 96) * 0.05, kind)
    weight[3, :32], weight[44, 32:64] = 0.0, 0.25
    found = exact_groups(weight)
    assert found is not None
    assert (found.bits, found.is_exact) == (bits, True)
    assert torch.equal(found.values(), weight)
    assert (found.minimums is None) == (kind == Kind.Q8_0)


@pytest.mark.parametrize(("least", "most"), [(0, 15), (2, 9), (5, 5)])
def test_codes_that_leave_out_their_ends_are_found(least: int, most: int) -> None:
    weight = drawn_codes(20, 64, least=least, most=most).values()
    found = exact_groups(weight)
    if least == most and found is None:
        return  # one value a group, which may be none of half precision
    assert found is not None
    assert torch.equal(found.values(), weight)


def test_kinds_that_share_a_matrix_keep_their_values_in_bytes() -> None:
    weight = torch.cat([as_gguf(draw(9, 64, seed=number), kind) for number, kind in enumerate(QUANTISED)])
    found = exact_groups(weight)
    assert found is not None
    assert found.bits == 8
    assert found.minimums is not None
    assert torch.equal(found.values(), weight)


def test_other_weights_are_no_codes_and_are_rounded() -> None:
    weight = draw(20, 64)
    assert exact_groups(weight) is None
    assert exact_groups(weight.bfloat16()) is None
    nearly = as_gguf(weight, Kind.Q4_1)
    nearly[19, 63] = torch.nextafter(nearly[19, 63], torch.tensor(torch.inf))
    assert exact_groups(nearly) is None
    for rounded, steps in ((round_to_nibbles(weight), 15), (round_to_bytes(weight), 254)):
        groups = weight.view(20, 2, 32)
        widths = groups.amax(dim=2) - groups.amin(dim=2) if steps == 15 else 2 * groups.abs().amax(dim=2)
        errors = (rounded.values().view_as(groups) - groups).abs().amax(dim=2)
        assert (errors <= widths / steps * 0.51).all()
        assert not rounded.is_exact
    for broken in (exact_groups, round_to_nibbles, round_to_bytes):
        with pytest.raises(ValueError, match="groups of 32"):
            broken(torch.zeros(4, 40))


def some_groups() -> dict[str, Groups]:
    """One of each form that the kernels take: nibbles, bytes around 0, bytes with minimums."""
    mixed = torch.cat([as_gguf(draw(30, 576, seed=5), Kind.Q8_0), as_gguf(draw(35, 576, seed=6), Kind.Q4_1)])
    found = exact_groups(mixed)
    assert found is not None
    return {
        "nibbles": drawn_codes(65, 576, least=0, most=15),
        "bytes": round_to_bytes(draw(65, 576)),
        "mixed": found,
    }


def in_whole_steps(num_rows: int, num_inputs: int) -> Tensor:
    """Rows that are rounded to themselves: whole numbers, 127 the largest of each group."""
    rows = np.random.default_rng(7).integers(-127, 128, (num_rows, num_inputs)).astype(np.float32)
    rows[:, ::32] = 127.0
    return torch.from_numpy(rows)


def assert_is_the_product(team: NativeKernels, groups: Groups) -> None:
    num_outputs, num_inputs = groups.values().shape
    packed = pack_groups(groups)
    linear = packed.linear(num_inputs, num_outputs)
    exact_rows, rows = in_whole_steps(13, num_inputs), draw(50, num_inputs, seed=1)
    minimums = -BYTE_OFFSET * groups.scales.float() if groups.minimums is None else groups.minimums.float()
    right = exact_rows.double() @ groups.values().double().T
    scale = (exact_rows.abs().double() @ groups.values().abs().double().T).amax().item()
    torch.testing.assert_close(team.linear(exact_rows, linear).double(), right, rtol=0, atol=2e-6 * scale)
    twin = linear_of_codes(rows, groups.codes, groups.scales.float(), minimums)
    torch.testing.assert_close(team.linear(rows, linear), twin, rtol=2e-3, atol=2e-3 * twin.abs().mean().item())


@pytest.mark.parametrize("form", ["nibbles", "bytes", "mixed"])
def test_products_are_those_of_the_very_weights_and_rows_do_not_meet(form: str) -> None:
    groups = some_groups()[form]
    assert_is_the_product(kernels(2), groups)
    packed = pack_groups(groups)
    assert torch.equal(packed.rows(torch.tensor([64, 0, 33])), groups.values()[[64, 0, 33]])
    linear, rows = packed.linear(576, 65), draw(50, 576, seed=1)
    rows[3] *= 1e4
    rows[4] = 0.0
    whole = kernels().linear(rows, linear)
    for team in (kernels(1), kernels(3)):
        for count in (1, 2, 5, 6, 7, 13, 48, 49):
            assert torch.equal(team.linear(rows[:count], linear), whole[:count])
            assert torch.equal(team.linear(rows[-count:], linear), whole[-count:])
    for bad in (float("nan"), float("inf")):
        rows[1, 575] = bad
        spoiled = kernels().linear(rows, linear)
        assert not torch.isfinite(spoiled[1]).any()
        assert torch.equal(spoiled[2:], whole[2:])


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="its flags")
@pytest.mark.parametrize("flags", PORTABLE)
def test_processors_with_less_compute_the_same_sums(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "NATIVE_FLAGS", {"x86_64": flags})
    team = NativeKernels(open_native(tmp_path), 2)
    for groups in some_groups().values():
        assert_is_the_product(team, groups)


def test_half_the_bytes_of_int8_and_sizes_that_are_checked() -> None:
    weight = as_gguf(draw(64, 96), Kind.Q4_1)
    nibbles, in_bytes = pack(weight, NIBBLES), pack(weight, torch.int8)
    assert 2 * nibbles.values.nbytes == in_bytes.values.nbytes
    assert pack_head(draw(64, 96), NIBBLES).values.nbytes == in_bytes.values.nbytes
    assert (nibbles.linear(96, 64).bits, in_bytes.linear(96, 64).bits) == (4, 8)
    for num_inputs, num_outputs in ((64, 64), (96, 65)):
        with pytest.raises(ValueError, match="packed elements are not"):
            nibbles.linear(num_inputs, num_outputs)


def test_gates_and_their_partners_are_found_in_their_tiles() -> None:
    gate, up = as_gguf(draw(20, 32), Kind.Q4_1), as_gguf(draw(20, 32, seed=1), Kind.Q8_0)
    packed = pack_gate_up(gate, up, NIBBLES)
    gates, partners = gate_up_rows(20)
    assert torch.equal(packed.rows(gates), gate)
    assert torch.equal(packed.rows(partners), up)
