"""Free memory that cannot be used, and the paper's remedy: long-lived tensors in one piece that is allocated once.

    reserved   [xxxxxx......][xxxxxx......][xxxxxx......]     x: in use   .: free, 18 in all
    asked for  [........]                                     8 in one piece: no hole is that large

Source: arXiv 1910.02054, section 3.2 (over 30 % of memory free at an out-of-memory) and 6.3 (M_D). Slots and flat
buffers are such pieces for parameters and gradients; `Arena` is one for checkpointed activations.

Left out: compaction of tensors; the driver's paging (expandable_segments), which reuses holes of whole pages.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_mini.flat import round_up

ALIGN = 512  # bytes, as torch's allocator rounds


@dataclass(frozen=True)
class Fragmentation:
    """The state of an allocator, in bytes."""

    reserved_bytes: int  # taken from the GPU
    allocated_bytes: int  # in use
    largest_free_bytes: int  # the largest hole

    @property
    def free_bytes(self) -> int:
        """Bytes in all holes together."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def scattered(self) -> float:
        """The share of free bytes that lies outside the largest hole; 0 if all is in one piece.

        >>> Fragmentation(36, 20, 4).scattered
        0.75
        """
        return 1 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0


def fragmentation() -> Fragmentation:
    """The state of torch's allocator on the current CUDA device, now."""
    here = torch.cuda.current_device()
    return of_segments([segment for segment in torch.cuda.memory_snapshot() if segment["device"] == here])


def of_segments(segments: list[dict]) -> Fragmentation:
    """The state of an allocator with these segments, as `torch.cuda.memory_snapshot` lists them.

    >>> block = {"active_allocated": 6, "inactive": 4}
    >>> segment = {"total_size": 10, "blocks": [{"size": n, "state": state} for state, n in block.items()]}
    >>> of_segments([segment, segment])
    Fragmentation(reserved_bytes=20, allocated_bytes=12, largest_free_bytes=4)
    """
    blocks = [block for segment in segments for block in segment["blocks"]]
    free = [block["size"] for block in blocks if block["state"] == "inactive"]
    reserved = sum(segment["total_size"] for segment in segments)
    return Fragmentation(reserved, reserved - sum(free), max(free, default=0))


@dataclass(eq=False)
class Parcel:
    """Copies in an arena, and the byte at which the last one ends."""

    end: int
    copies: list[Tensor]


class Arena:
    """One piece of memory for the checkpointed inputs of a forward, allocated once (M_D).

    Used in place of a HostMemory: `checkpoint(block, x, host=Arena(...))`. Forward copies inputs in one after the
    other, and backward takes them out from the last to the first, so there is never a hole.
    """

    def __init__(self, nbytes: int, device: torch.device | str) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.inside: list[weakref.ref[Parcel]] = []  # in the order of put()

    @property
    def used_bytes(self) -> int:
        """Bytes up to the end of the last parcel. Parcels whose graph was freed are dropped first."""
        while self.inside and self.inside[-1]() is None:
            self.inside.pop()
        return self.inside[-1]().end if self.inside else 0

    def tensors(self) -> list[Tensor]:
        """The tensors that it keeps alive: the one piece, used or not."""
        return [self.memory]

    def host_tensors(self) -> list[Tensor]:
        """None waits in host memory."""
        return []

    def put(self, tensors: list[Tensor]) -> Parcel:
        """Copy the tensors into the arena. RuntimeError if there is no room for them."""
        end, copies = self.used_bytes, []
        for tensor in tensors:
            start, end = end, end + round_up(tensor.nbytes, ALIGN)
            if end > len(self.memory):
                raise RuntimeError(
                    f"an arena of {len(self.memory):,} bytes holds {start:,} and cannot take {tensor.nbytes:,} "
                    "more: make it as large as the inputs of all checkpointed blocks together"
                )
            place = self.memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            with torch.no_grad():
                copies.append(place.copy_(tensor))
        parcel = Parcel(end, copies)
        self.inside.append(weakref.ref(parcel))
        return parcel

    def take(self, parcel: Parcel) -> list[Tensor]:
        """The copies of a parcel, whose room is free from now on. RuntimeError if it is not the last one put in."""
        if self.used_bytes != parcel.end or self.inside[-1]() is not parcel:
            raise RuntimeError(
                f"an arena gives back what was put in last ({self.used_bytes:,} bytes in), and is asked for what ends "
                f"at {parcel.end:,}: run backwards in the reverse order of forwards, and each once"
            )
        self.inside.pop()
        return [copy.detach() for copy in parcel.copies]
