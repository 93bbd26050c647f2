"""Quantised matrices in the two forms that all backends compute with.

Owns MLX's affine form (`weight = scale * code + bias`, a scale and a bias for each group of a
row), the rule that makes it from numbers, and its reading from GGUF blocks; and NF4
(`weight = scale * NF4_VALUES[code]`) as bitsandbytes stores it. NumPy only; must not read files or
know a framework.

Shapes: R rows (outputs), C columns (inputs), W 32-bit words of a row, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exo_train.errors import ModelError

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
GGUF_GROUP_SIZE = 32
AFFINE, NF4 = "affine", "nf4"
# Quantiles of a normal distribution, scaled to [-1, 1] (Dettmers et al. 2023, arXiv:2305.14314,
# appendix E).
NF4_VALUES = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
# The smallest scale, so that a group of equal values does not divide by nothing.
MIN_SCALE = np.float32(1e-7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How codes lie in words: `bits` each, with a scale every `group_size` columns.

    With a bias, too, where `form` is affine; without where it is nf4.
    """

    bits: int
    group_size: int
    form: str = AFFINE

    @property
    def numbers_per_group(self) -> int:
        return 2 if self.form == AFFINE else 1

    def check(self, *, place: str) -> None:
        """Refuse what no backend computes with."""
        if self.bits not in BITS or self.group_size not in GROUP_SIZES:
            raise ModelError(
                f"{place}: {self.bits} bits in groups of {self.group_size} are not supported; use "
                f"a base of 4 or 8 bits in groups of 32, 64 or 128, or the unquantised model with "
                f"--quantize 4"
            )

    def shapes(self, shape: tuple[int, ...], *, place: str) -> tuple[tuple[int, int], ...]:
        """Give the shapes of words (R, W) and of scales and biases (R, G) of a matrix (R, C)."""
        self.check(place=place)
        if len(shape) != 2 or shape[1] % self.group_size:
            raise ModelError(
                f"{place}: shape {list(shape)} does not divide into groups of {self.group_size}"
            )
        rows, columns = shape
        return (rows, columns * self.bits // 32), (rows, columns // self.group_size)

    def __str__(self) -> str:
        bits = f"{self.bits} bits" if self.form == AFFINE else "NF4"
        return f"{bits} in groups of {self.group_size}"


NF4_PACKING = Packing(bits=4, group_size=64, form=NF4)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedMatrix:
    """`words_RW` uint32, code k of a word at bit k * bits; `scales_RG` and `biases_RG` float32.

    NF4 has no biases: None.
    """

    packing: Packing
    words_RW: np.ndarray
    scales_RG: np.ndarray
    biases_RG: np.ndarray | None

    @property
    def shape(self) -> tuple[int, int]:
        rows, num_words = self.words_RW.shape
        return rows, num_words * 32 // self.packing.bits

    def codes(self) -> np.ndarray:
        """Give the codes (R, C) as uint8."""
        bytes_R = np.ascontiguousarray(self.words_RW).astype("<u4", copy=False).view(np.uint8)
        if self.packing.bits == 8:
            return bytes_R
        return np.stack([bytes_R & 15, bytes_R >> 4], axis=-1).reshape(self.shape)

    def dense(self) -> np.ndarray:
        """Give the numbers (R, C) as float32."""
        rows, columns = self.shape
        codes = self.codes()
        affine = self.biases_RG is not None
        numbers: np.ndarray = codes.astype(np.float32) if affine else NF4_VALUES[codes]
        grouped = numbers.reshape(rows, -1, self.packing.group_size)
        grouped *= self.scales_RG[..., None]
        if self.biases_RG is not None:
            grouped += self.biases_RG[..., None]
        return grouped.reshape(rows, columns)


def nf4_pairs() -> np.ndarray:
    """Give the two numbers of each byte of NF4 codes, (256, 2), the even column's first."""
    codes = np.arange(256)
    return np.asarray(NF4_VALUES[np.stack([codes & 15, codes >> 4], axis=-1)])


def from_codes(
    codes_RC: np.ndarray, scales_RG: np.ndarray, biases_RG: np.ndarray, packing: Packing
) -> PackedMatrix:
    """Pack uint8 codes."""
    codes_RC = np.ascontiguousarray(codes_RC, np.uint8)
    if packing.bits == 4:
        codes_RC = codes_RC[:, 0::2] | codes_RC[:, 1::2] << 4
    return PackedMatrix(
        packing=packing,
        words_RW=np.ascontiguousarray(codes_RC).view("<u4"),
        scales_RG=np.ascontiguousarray(scales_RG, np.float32),
        biases_RG=np.ascontiguousarray(biases_RG, np.float32),
    )


def packing_for(columns: int, bits: int, *, place: str) -> Packing:
    """Give the packing of a matrix quantised by us: groups of 64, or 32 where 64 do not divide."""
    for group_size in (64, 32):
        if columns % group_size == 0:
            return Packing(bits=bits, group_size=group_size)
    raise ModelError(
        f"{place}: rows of {columns} values do not divide into groups of 32, so they cannot be "
        f"quantised; leave --quantize out"
    )


def quantised(values_RC: np.ndarray, packing: Packing) -> PackedMatrix:
    """Quantise float32 numbers as `mx.quantize` does, bit for bit.

    A group's value of largest magnitude (the larger one on a tie) is met exactly, and zero is a
    code. Source: MLX 0.32, affine quantisation.
    """
    rows, columns = values_RC.shape
    size, most = packing.group_size, np.float32((1 << packing.bits) - 1)
    grouped = np.ascontiguousarray(values_RC, np.float32).reshape(rows, columns // size, size)
    low, high = grouped.min(axis=-1), grouped.max(axis=-1)
    from_low = np.abs(low) > np.abs(high)
    scales = np.maximum((high - low) / most, MIN_SCALE)
    scales = np.where(from_low, scales, -scales)
    edge = np.where(from_low, low, high)
    first = np.rint(edge / scales)
    has_zero = first != 0
    scales = np.where(has_zero, edge / np.where(has_zero, first, np.float32(1)), scales)
    biases = np.where(has_zero, edge, np.float32(0))
    with np.errstate(invalid="ignore"):  # of values that are not finite the scale tells
        codes = np.rint((grouped - biases[..., None]) / scales[..., None])
        codes = np.clip(codes, np.float32(0), most).astype(np.uint8)
    return from_codes(codes.reshape(rows, columns), scales, biases, packing)


def from_nf4(codes: np.ndarray, scales_RG: np.ndarray) -> PackedMatrix:
    """Take bitsandbytes' bytes of two codes each, of which the even column's is the upper one."""
    rows = scales_RG.shape[0]
    swapped = codes << 4 | codes >> 4
    return PackedMatrix(
        packing=NF4_PACKING,
        words_RW=swapped.reshape(rows, -1).view("<u4"),
        scales_RG=np.ascontiguousarray(scales_RG, np.float32),
        biases_RG=None,
    )


GGUF_PACKINGS = {
    "Q4_0": Packing(bits=4, group_size=GGUF_GROUP_SIZE),
    "Q4_1": Packing(bits=4, group_size=GGUF_GROUP_SIZE),
    "Q8_0": Packing(bits=8, group_size=GGUF_GROUP_SIZE),
}


def from_gguf_blocks(stored: str, blocks_RB: np.ndarray) -> PackedMatrix:
    """Repack blocks (R, bytes of a row) of one of `GGUF_PACKINGS`; the numbers stay exactly equal.

    Layouts (ggml's block_q4_0, block_q4_1, block_q8_0): a half-precision scale d, for Q4_1 a
    half-precision minimum, then 32 values; of a 4-bit block, byte j has value j below value j+16.
    """
    rows = blocks_RB.shape[0]
    packing = GGUF_PACKINGS[stored]
    header_bytes = 4 if stored == "Q4_1" else 2
    block_bytes = header_bytes + GGUF_GROUP_SIZE * packing.bits // 8
    blocks = blocks_RB.reshape(rows, -1, block_bytes)
    halves = np.ascontiguousarray(blocks[..., :header_bytes]).view("<f2").astype(np.float32)
    scales, values = halves[..., 0], blocks[..., header_bytes:]
    if stored == "Q8_0":
        codes, biases = values ^ 0x80, -128 * scales  # a signed byte plus 128
    else:
        codes = np.concatenate([values & 15, values >> 4], axis=-1)
        biases = halves[..., 1] if stored == "Q4_1" else -8 * scales
    return from_codes(codes.reshape(rows, -1), scales, biases, packing)
