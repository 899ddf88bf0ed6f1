"""The digest of a tensor's content: 128 bits that depend on every bit and its position.

The bytes of the tensor in logical order form little-endian 64-bit words ``w``, the last one padded with zeros, in
blocks of ``BLOCK_WORDS``. For each of two lanes, all in wrapping 64-bit arithmetic::

    fold(w)      = z ^ (z >>> 32)  with  z = w * FOLD
    leaf(block)  = sum over words j of  fold(w) * key[lane, j]                   key: odd, pseudo-random
    content      = sum over blocks b of mix((leaf(b) ^ key[lane, b mod BLOCK_WORDS]) + b)
    digest       = mix(content + seed)

``mix`` is the finaliser of SplitMix64. All sums commute, so blocks may be processed in any order, on any device.

A change of one word always changes the digest: ``fold`` and ``mix`` are bijections, and the key is odd. Changes of
several words in a block cancel only if their folded differences, times the keys, add up to 0 mod 2**64 in both lanes.
This is likely only for differences that are multiples of a high power of two (two of 2**63 always cancel). Bits of real
data that change together, such as the two sign bits of a word of float32, would give such differences under a plain ``w
^ (w >>> 32)``. So the multiplication first spreads them over the upper half, and the shift brings them down.

The keys are fixed and public: the digest finds damage, drift and mistakes, not forgery. The seed carries name, shape
and dtype, so the digest also finds tensors that trade places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8dist_kernels.backends import runs_fused
from fp8dist_kernels.reference.digest import mix, position_keys

BLOCK_WORDS = 1 << 15
BLOCK_BYTES = 8 * BLOCK_WORDS

FOLD = -0x2917014799A6026D
"""0xD6E8FEB86659FD93 as int64: odd, with bits everywhere."""

_LOW_HALF = 0xFFFFFFFF
_BLOCKS_AT_ONCE_ON_GPU = 128
"""On a CPU, one block at a time stays in cache. On a GPU, each launch needs more work."""


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the logical content as uint8[numel * itemsize]: a view if the tensor is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    # torch calls a one-element tensor contiguous whatever its strides; a view as bytes needs stride 1.
    return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8)


def block_count(nbytes: int) -> int:
    """Return the number of blocks of a tensor of ``nbytes`` bytes."""
    return -(-nbytes // BLOCK_BYTES)


class ContentDigest:
    """Computes digests of tensors on one device. Holds the keys and, without Triton, work buffers.

    Args:
        backend: as in ``fp8dist_kernels.backends.runs_fused``. Triton computes the leaves of all tensors in one launch.
    """

    def __init__(self, device: torch.device, backend: str = "auto") -> None:
        self.device = device
        self._fused = runs_fused(backend, device)
        at_once = 0 if self._fused else 1 if device.type == "cpu" else _BLOCKS_AT_ONCE_ON_GPU
        with torch.inference_mode(False):  # The buffers are written to later, outside of an evaluation.
            self._keys = position_keys(2 * BLOCK_WORDS, device).view(2, BLOCK_WORDS)
            self._folded = torch.empty(at_once, BLOCK_WORDS, dtype=torch.int64, device=device)
            self._product = torch.empty_like(self._folded)

    def many_leaves(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """Return the leaves of tensors of any dtype, shape and strides, int64[sum(counts), 2] in the order of the
        tensors, and ``counts``: the number of leaves of each tensor. An empty tensor has none.

        Raises:
            ValueError: a tensor is on another device.
        """
        if self._fused:
            from fp8dist_kernels.triton import content as fused

            return fused.many_leaves(tensors, self._keys)
        leaves = [self._leaves(tensor) for tensor in tensors]
        none = torch.empty(0, 2, dtype=torch.int64, device=self.device)
        return torch.cat([none, *leaves]), [len(part) for part in leaves]

    def leaves(self, tensor: Tensor) -> Tensor:
        """Return the leaves of one tensor, int64[blocks, 2]. See ``many_leaves``."""
        return self.many_leaves([tensor])[0]

    def row_leaves(self, words: Tensor) -> Tensor:
        """Return the leaves of each row of int64[r, w], as if each row were a tensor: int64[r * blocks, 2]."""
        if self._fused:
            from fp8dist_kernels.triton import content as fused

            return fused.row_leaves(words, self._keys)
        rows, width = words.shape
        leaves = torch.empty(rows, block_count(8 * width), 2, dtype=torch.int64, device=self.device)
        for block in range(leaves.shape[1]):
            self._sum_rows(words[:, block * BLOCK_WORDS : (block + 1) * BLOCK_WORDS], leaves[:, block])
        return leaves.flatten(0, 1)

    def _leaves(self, tensor: Tensor) -> Tensor:
        if tensor.device != self._keys.device:
            raise ValueError(f"it is on {tensor.device}, not on {self._keys.device}")
        content = as_bytes(tensor)
        whole, rest = divmod(content.numel(), BLOCK_BYTES)
        leaves = torch.empty(whole + (rest > 0), 2, dtype=torch.int64, device=self.device)
        if whole:
            words = _as_words(content[: whole * BLOCK_BYTES]).view(whole, BLOCK_WORDS)
            at_once = len(self._folded)
            for start in range(0, whole, at_once):
                end = min(start + at_once, whole)
                self._sum_rows(words[start:end], leaves[start:end])
        if rest:
            self._sum_rows(_as_words(content[whole * BLOCK_BYTES :]).view(1, -1), leaves[whole:])
        return leaves

    def _sum_rows(self, words: Tensor, out: Tensor) -> None:
        """Write the leaf of each row of int64[r, w], w <= BLOCK_WORDS, to int64[r, 2]."""
        rows, width = words.shape
        if rows <= len(self._folded) and width == BLOCK_WORDS:
            folded, product = self._folded[:rows], self._product[:rows]
        else:
            folded, product = torch.empty_like(words), torch.empty_like(words)
        torch.mul(words, FOLD, out=product)
        # Arithmetic shift, then mask: torch has no logical shift for int64.
        torch.bitwise_right_shift(product, 32, out=folded)
        folded.bitwise_and_(_LOW_HALF).bitwise_xor_(product)
        for lane in range(2):
            torch.mul(folded, self._keys[lane, :width], out=product)
            torch.sum(product, dim=1, out=out[:, lane])

    def digests(self, leaves: Tensor, counts: Sequence[int], seeds: Tensor) -> Tensor:
        """Return the digests of t tensors, int64[t, 2].

        Args:
            leaves: int64[sum(counts), 2], in the order of the tensors.
            counts: the number of leaves of each tensor.
            seeds: int64[t, 2].
        """
        if len(counts) == 1:  # On the device: a copy would make the host wait for the stream.
            place = torch.arange(counts[0], device=self.device)
            owner = torch.zeros_like(place)
        else:
            repeats = torch.tensor(counts, dtype=torch.int64, device="cpu")
            owner = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), repeats)
            place = torch.arange(len(owner), device="cpu") - (repeats.cumsum(0) - repeats)[owner]
            owner, place = owner.to(self.device), place.to(self.device)
        keyed = leaves ^ self._keys[:, place % BLOCK_WORDS].T
        content = torch.zeros(len(counts), 2, dtype=torch.int64, device=self.device)
        content.index_add_(0, owner, mix(keyed + place[:, None]))
        return mix(content + seeds.to(self.device))


def _as_words(content: Tensor) -> Tensor:
    """Return uint8[n] as int64[ceil(n / 8)], padded with zeros."""
    rest = -content.numel() % 8
    if rest:
        content = torch.nn.functional.pad(content, (0, rest))
    elif content.storage_offset() % 8:
        content = content.clone()
    return content.view(torch.int64)
