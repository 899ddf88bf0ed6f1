"""What a rank received of gradients in FP8: digests, because DDP's ranks receive the same bytes, or one of them has not
got what the others have; and from which ranks messages came damaged.

With a manager, the header of each sync carries the digests of all steps before it, added to the digest of the scales:
the message keeps its size. They change at boundaries only, because results of several launches between two boundaries
merge.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.common.text import first_few
from fp8dist_kernels.header import HEADER, WORD_SCALE_LOW, WORDS
from fp8dist_kernels.reference.content import ContentDigest, block_count
from fp8dist_kernels.reference.digest import mix


class Received:
    """For each set of parameters whose gradients travelled in one message: a digest of all its messages so far, and the
    ranks that this rank has received damaged messages from. FSDP2's ranks keep other shards: no digest.

    By names and not by a bucket's number, because DDP makes other buckets after its first backward.

    Attributes:
        generation: how often they were forgotten.
        stream: that of hooks on a GPU, on which messages are added, one after another.
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[str, ...], Tensor] = {}
        self._damaged: dict[tuple[str, ...], tuple[Tensor, tuple[int, ...]]] = {}
        self._digester: ContentDigest | None = None
        self.generation = 0
        self.stream: torch.cuda.Stream | None = None
        self._sent: Tensor | None = None
        self._sent_generation = 0

    def add(self, names: tuple[str, ...], messages: Tensor, damaged: Tensor, senders: tuple[int, ...]) -> None:
        """Add messages, uint8 of any shape, with the gradients of these parameters. Local.

        Args:
            damaged, senders: of the messages before the sum, see ``add_damaged``.
        """
        self.add_damaged(names, damaged, senders)
        if self._digester is None or self._digester.device != messages.device:
            self._digester = ContentDigest(messages.device, "torch")  # Triton's copies a table from pinned memory.
        before = self._digests.get(names)
        if before is None:
            seed = int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=8).digest(), "little", signed=True)
            before = torch.full((1, 2), seed, device=messages.device)
        leaves = self._digester.leaves(messages)
        self._digests[names] = self._digester.digests(leaves, [block_count(messages.nbytes)], before)

    def add_damaged(self, names: tuple[str, ...], damaged: Tensor, senders: tuple[int, ...]) -> None:
        """Note which messages were damaged. Local.

        Args:
            names: of the parameters, or of FSDP2's module.
            damaged: bool[senders]: from whom this rank has received other bytes than were sent.
            senders: their ranks.
        """
        before = self._damaged.get(names)
        self._damaged[names] = damaged if before is None else damaged | before[0], senders

    def texts(self) -> dict[str, str]:
        """Return the digests as text, by a text with names of the parameters. Local; waits for the device."""
        found: dict[str, str] = {}
        for names, (damaged, senders) in self._damaged.items():
            shown = f"{first_few(names)}, as received in FP8"
            ranks = ", ".join(str(rank) for rank, wrong in zip(senders, damaged.tolist()) if wrong)
            found[shown] = found.get(shown, "") + (f"damaged from rank {ranks}" if ranks else "intact")
            if names in self._digests:  # Last: long texts are cut.
                first, second = (word & (1 << 64) - 1 for word in self._digests[names][0].tolist())
                found[shown] += f", {first:016x}{second:016x}"
        return found

    def forget(self) -> None:
        """Forget all messages, after a difference between ranks was reported. On all ranks at the same place."""
        self._digests.clear()
        self._damaged.clear()
        self.generation += 1

    def pass_boundary(self) -> None:
        """Let the next header carry the messages so far. Local."""
        self._sent, digests = None, [*self._digests.values()]
        if self._damaged:
            damaged = torch.cat([damaged for damaged, _ in self._damaged.values()]).sum() * (1 + dist.get_rank())
            self._sent = (damaged + mix(torch.cat(digests)[:, 0]).sum() if digests else damaged).reshape(1)
        self._sent_generation = self.generation

    def write_to(self, message: Tensor) -> int:
        """Add the digests as of the last boundary to the header of a sync's message, int32[8 + n]. Local. Returns their
        generation: if these were forgotten since, a difference was reported before."""
        if self._sent is not None:
            scales = message[WORD_SCALE_LOW:WORDS].view(torch.int64)
            scales.add_(self._sent.to(message.device, non_blocking=True))
            torch.bitwise_not(message[:WORDS], out=message[WORDS:HEADER])
        return self._sent_generation
