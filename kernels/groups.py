"""Weights as codes: every 32 inputs of an output share a scale and a minimum, weight = scale · code + minimum.

    weight ─► `exact_groups`, where its values are such already ─► Groups ─► packed (`decoder.py`)
           ─► `round_to_bytes`, `round_to_nibbles` ─────────────►

GGUF's Q4_0, Q4_1 and Q8_0 are of this form. A converted model has their values in float32; `exact_groups` finds codes
and scales again and takes them only where they give every value to the last bit, so nothing depends on where the
values came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Inputs that share a scale."""
BYTE_MAX = 127
BYTE_OFFSET = 128
"""Code of 0 in bytes, where a minimum is -128 · scale."""
NIBBLE_MAX = 15
SMALLEST_SCALE = 2.0**-24
"""Of half precision; weights that need a smaller one become 0."""
NIBBLES = torch.quint4x2
"""Names codes of 4 bits, two in a byte, where a type of weights is asked for."""
MOST_NIBBLE_VALUES = 16
"""Values that a group in 4 bits can have."""
SAMPLE_ROWS = 8
"""Outputs that are looked at first: weights that are no codes are known by them."""


@dataclass(frozen=True, slots=True)
class Groups:
    """A weight matrix.

    Attributes:
        codes: `[num_outputs, groups, 32]` uint8, below 2 to the power of `bits`.
        scales, minimums: `[num_outputs, groups]` float16; minimums None: -128 · scale.
        bits: 4 or 8.
        is_exact: whether these are the very weights, not rounded ones.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None
    bits: int
    is_exact: bool

    def values(self) -> Tensor:
        """`[num_outputs, num_inputs]` float32."""
        scales = self.scales.float()
        minimums = -BYTE_OFFSET * scales if self.minimums is None else self.minimums.float()
        return (self.codes * scales[..., None] + minimums[..., None]).flatten(1)


def exact_groups(weight: Tensor) -> Groups | None:
    """`[num_outputs, num_inputs]` in codes that give the same values, in 4 bits where they can, else in 8; or None.

    Raises ValueError where the inputs are no whole number of groups.
    """
    groups = _in_groups(weight)
    sample = _exact(groups[:SAMPLE_ROWS], fewest_bits=4)
    if sample is None or len(groups) <= SAMPLE_ROWS:
        return sample
    return _exact(groups, fewest_bits=sample.bits)


def _exact(groups: Tensor, *, fewest_bits: int) -> Groups | None:
    flat = groups.flatten(0, 1)  # [n, 32]
    if fewest_bits == 4:
        found = _find(_nothing(len(flat)), flat, _NIBBLE_GUESSES, NIBBLE_MAX)
        if found.is_found.all():
            return found.shaped(groups, bits=4)
    found = _find(_nothing(len(flat)), flat, _BYTE_GUESSES, 2 * BYTE_OFFSET - 1)
    found = _find(found, flat, _NIBBLE_GUESSES, NIBBLE_MAX)
    return found.shaped(groups, bits=8) if found.is_found.all() else None


def round_to_bytes(weight: Tensor) -> Groups:
    """`[num_outputs, num_inputs]` in codes of 8 bits, the scale by the largest of a group.

    Raises ValueError where the inputs are no whole number of groups.
    """
    groups = _in_groups(weight)
    scales = (groups.abs().amax(dim=2) / BYTE_MAX).half()  # what is rounded is rounded by these
    whole = (groups / scales.float().clamp_min(SMALLEST_SCALE)[..., None]).round().clamp(-BYTE_MAX, BYTE_MAX)
    return Groups((whole + BYTE_OFFSET).to(torch.uint8), scales, None, bits=8, is_exact=False)


def round_to_nibbles(weight: Tensor) -> Groups:
    """`[num_outputs, num_inputs]` in codes of 4 bits, from the smallest of a group to the largest.

    Raises ValueError where the inputs are no whole number of groups.
    """
    groups = _in_groups(weight)
    minimums = groups.amin(dim=2).half()
    scales = ((groups.amax(dim=2) - minimums.float()) / NIBBLE_MAX).half()
    return Groups(_codes(groups, scales, minimums, NIBBLE_MAX), scales, minimums, bits=4, is_exact=False)


def _in_groups(weight: Tensor) -> Tensor:
    if weight.shape[1] % GROUP:
        raise ValueError(f"{weight.shape[1]} input features are no whole number of groups of {GROUP}")
    return weight.float().view(len(weight), -1, GROUP)


def _codes(values: Tensor, scales: Tensor, minimums: Tensor, most: int) -> Tensor:
    """`[…, 32]` values in steps of `[…]` scales from `[…]` minimums; 0 where the scale is."""
    scales = scales.float()
    factors = torch.where(scales == 0.0, 0.0, 1.0 / scales)
    steps = (values - minimums.float()[..., None]) * factors[..., None]
    return steps.round().clamp(0, most).nan_to_num(0.0).to(torch.uint8)


@dataclass(frozen=True, slots=True)
class _Found:
    """Of n groups: codes `[n, 32]`, scales and minimums `[n]` float16, and for which they give the values."""

    codes: Tensor
    scales: Tensor
    minimums: Tensor
    is_found: Tensor

    def shaped(self, groups: Tensor, *, bits: int) -> Groups:
        """As those of a matrix, `[num_outputs, groups, 32]`."""
        scales, minimums = self.scales.view(groups.shape[:2]), self.minimums.view(groups.shape[:2])
        is_plain = bits == 8 and torch.equal(minimums.float(), -BYTE_OFFSET * scales.float())
        return Groups(self.codes.view(groups.shape), scales, None if is_plain else minimums, bits, is_exact=True)


def _nothing(count: int) -> _Found:
    halves = torch.zeros(2, count, dtype=torch.float16)
    codes = torch.zeros(count, GROUP, dtype=torch.uint8)
    return _Found(codes, halves[0], halves[1], torch.zeros(count, dtype=torch.bool))


def _num_values(flat: Tensor) -> Tensor:
    """Of each group `[n, 32]`, `[n]`."""
    ordered = flat.sort(dim=1).values
    return 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(dim=1)


Guess = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Groups `[n, 32]` → scales and minimums that they may have, `[n]` float16 both."""


def _between(code_of_least: int, code_of_most: int) -> Guess:
    """The smallest and the largest value have these codes; the scale may be below 0."""

    def guess(values: Tensor) -> tuple[Tensor, Tensor]:
        least, most = values.amin(dim=1), values.amax(dim=1)
        scales = ((most - least) / (code_of_most - code_of_least)).half()
        return scales, (least - scales.float() * code_of_least).half()

    return guess


def _around_zero(code_of_largest: int) -> Guess:
    """What is farthest from 0 is this many steps away from it."""

    def guess(values: Tensor) -> tuple[Tensor, Tensor]:
        scales = (values.abs().amax(dim=1) / code_of_largest).half()
        return scales, (-BYTE_OFFSET * scales.float()).half()

    return guess


def _nibble_guesses() -> tuple[Guess, ...]:
    """First those of the usual writers: from 0 to 15 (Q4_1), and with 0 for the smallest or the largest (Q4_0)."""
    usual = [(0, most) for most in range(NIBBLE_MAX, 0, -1)] + [(most, 0) for most in range(NIBBLE_MAX, 0, -1)]
    others = [(least, most) for least in range(1, NIBBLE_MAX + 1) for most in range(1, NIBBLE_MAX + 1) if least != most]
    return tuple(_between(*pair) for pair in usual + others)


_NIBBLE_GUESSES = _nibble_guesses()
_BYTE_GUESSES = tuple(_around_zero(code) for code in (*range(BYTE_MAX, 0, -1), BYTE_OFFSET))


def _find(before: _Found, flat: Tensor, guesses: Iterable[Guess], most: int) -> _Found:
    """Tries the guesses in turn on the groups `flat` `[n, 32]` for which nothing has been found; codes up to `most`.

    A group of more values than 4 bits can tell apart is tried with the first guess alone.
    """
    codes, is_found = before.codes.clone(), before.is_found.clone()
    scales, minimums = before.scales.clone(), before.minimums.clone()
    left = (~is_found).nonzero()[:, 0]
    for number, guess in enumerate(guesses):
        if number == 1:
            left = left[_num_values(flat[left]) <= MOST_NIBBLE_VALUES]
        if not len(left):
            break
        values = flat[left]
        tried_scales, tried_minimums = guess(values)
        tried = _codes(values, tried_scales, tried_minimums, most)
        fits = (tried * tried_scales.float()[:, None] + tried_minimums.float()[:, None] == values).all(dim=1)
        where = left[fits]
        codes[where], scales[where], minimums[where] = tried[fits], tried_scales[fits], tried_minimums[fits]
        is_found[where] = True
        left = left[~fits]
    return _Found(codes, scales, minimums, is_found)
