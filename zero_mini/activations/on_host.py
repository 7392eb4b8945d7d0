"""Activations in host memory: checkpointed inputs leave the GPU in forward and return before their block's backward.

Source: arXiv 1910.02054, section 6.1 (P_a+cpu) and 8, for N_m = 1: without model parallelism no two ranks hold the
same activations, so nothing can be partitioned, and only the copy to the host remains of P_a+cpu.

    bytes on the device   one block's inputs, whatever L         without it: L blocks' inputs
    over PCIe             each input twice, 2 L B T d elements   (the last block's stay: backward begins there)

    time -->    forward                        backward
    compute     b0    b1    b2    b3           b3    b2    b1    b0
    out            x0    x1    x2
    in                                            x2    x1    x0
    device      x0 ## x1 ## x2 ## x3 ####################   one in transit, beside the one in use

One side stream does all copies. Memory on the device belongs to the compute stream: it is allocated there, and freed
there after that stream has queued a wait for the copy. `Tensor.record_stream` would be shorter, but it frees memory
only when the host notices that the copy is done: a host that runs ahead would keep every input. Pinned memory comes
from torch's caching host allocator, which reuses a buffer when its last copy is done and rounds sizes up to powers of
two. On the CPU the copies are ordinary ones, with the same bookkeeping.

Left out: several GPUs in one process; tensors that two blocks share (they are copied twice).
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class Parcel:
    """Tensors that travel together: the inputs of one block."""

    device: torch.device
    at_host: list[Tensor]
    on_device: list[Tensor] | None  # while in transit, either way
    before: "weakref.ref[Parcel] | None"  # of the block before: its backward comes next
    arrived: torch.cuda.Event | None = None  # of the last copy, either way


class HostMemory:
    """Host memory for the inputs of a model's blocks between forward and backward; make one for each model."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None  # none on the CPU
        self.in_transit: Parcel | None = None  # the only one with memory on the device
        self.last: weakref.ref[Parcel] | None = None
        self.peak_bytes = 0  # most bytes on the host at one time

    def waiting(self) -> Iterator[Parcel]:
        """Parcels whose backward is still to come, the last one first."""
        parcel = self.last and self.last()
        while parcel is not None:
            yield parcel
            parcel = parcel.before and parcel.before()

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that it keeps alive, on the host and in transit."""
        for parcel in self.waiting():
            yield from parcel.at_host
            yield from parcel.on_device or []

    def host_tensors(self) -> Iterator[Tensor]:
        """Those of them that are at the host."""
        for parcel in self.waiting():
            yield from parcel.at_host

    def put(self, tensors: list[Tensor]) -> Parcel:
        """Begin to copy tensors to the host; the parcel before leaves the device. ValueError for several devices."""
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise ValueError(
                f"inputs on {len(devices)} devices ({', '.join(sorted(map(str, devices)))}): checkpoint without host"
            )
        (device,) = devices
        self.let_go()
        pinned = device.type == "cuda"
        if pinned and self.stream is None:
            self.stream = torch.cuda.Stream(device)
        at_host = [torch.empty_like(tensor, device="cpu", pin_memory=pinned) for tensor in tensors]
        parcel = Parcel(device, at_host, [tensor.detach() for tensor in tensors], self.last)
        self.copy(parcel, parcel.on_device, at_host)
        self.last = weakref.ref(parcel)
        self.peak_bytes = max(self.peak_bytes, sum(t.nbytes for waiting in self.waiting() for t in waiting.at_host))
        return parcel

    def take(self, parcel: Parcel) -> list[Tensor]:
        """Its tensors on the device, for the current stream; begin to fetch the parcel that is needed next."""
        self.fetch(parcel)
        self.wait(parcel)
        tensors, parcel.on_device, self.in_transit = parcel.on_device, None, None
        following = parcel.before and parcel.before()
        if following is not None:
            self.fetch(following)
        return tensors

    def fetch(self, parcel: Parcel) -> None:
        """Begin to copy a parcel to the device, unless it is there or in transit."""
        if parcel.on_device is None:
            self.let_go()
            parcel.on_device = [torch.empty_like(tensor, device=parcel.device) for tensor in parcel.at_host]
            self.copy(parcel, parcel.at_host, parcel.on_device)

    def let_go(self) -> None:
        """Free the device memory of the parcel in transit, for what this stream computes after the copy."""
        parcel, self.in_transit = self.in_transit, None
        if parcel is not None:
            self.wait(parcel)
            parcel.on_device = None

    def copy(self, parcel: Parcel, sources: list[Tensor], targets: list[Tensor]) -> None:
        """sources -> targets on the side stream, after all that is queued on the current one."""
        stream = self.stream if parcel.device.type == "cuda" else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(parcel.device))
        with torch.no_grad(), torch.cuda.stream(stream):
            for source, target in zip(sources, targets):
                target.copy_(source, non_blocking=stream is not None)
        parcel.arrived = None if stream is None else stream.record_event()
        self.in_transit = parcel

    def wait(self, parcel: Parcel) -> None:
        """Make the current stream wait until the parcel's copy is done."""
        if parcel.arrived is not None:
            torch.cuda.current_stream(parcel.device).wait_event(parcel.arrived)
