"""Initial values as a function of (seed, parameter's name, number of the element), in exact integer arithmetic.

    x = mix(key of seed and name + element)          64 bits that look random (splitmix64)
    s = sum of the four 16-bit parts of x            nearly normal: 0 to 262,140, mean 131,070
    value = mean + std (s - 131,070) / sigma         sigma^2 = 4 (65,536^2 - 1) / 12; exact up to one fp32 product

So any part of any parameter can be computed by itself: whatever the units, the number of ranks and the device are, it
has the same bits. A rank can say what another rank holds at the start.

The largest value is 3.46 standard deviations from the mean. On CUDA one Triton kernel does the work of about 20
operations of torch, with the same bits.

Left out: tensors that are not dense; more than 2^63 elements.
"""

import functools
import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs does not include it
    triton = None

GOLDEN, MIX_1, MIX_2 = (
    constant - (1 << 64) for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
PARTS = 0x0000FFFF0000FFFF  # every other 16 bits
LOW, LAST = (1 << 32) - 1, (1 << 33) - 1
CENTRE, SIGMA = 4 * 65535 // 2, math.sqrt(4 * (65536**2 - 1) / 12)
AT_ONCE = {"cpu": 1 << 15, "cuda": 1 << 23}  # elements; with 20 bytes of temporary memory each
BLOCK = 1024  # elements per Triton program

Rule = Callable[[str, torch.Size], tuple[float, float]]


class Values:
    """`rule(name, shape)` says the mean and the standard deviation of a parameter.

    >>> values, weight = Values(lambda name, shape: (0.0, 0.02)), torch.empty(3, 4)
    >>> values.initialise("weight", weight)
    >>> torch.equal(weight.flatten()[5:], values.part("weight", weight.shape, 5, torch.empty(7)))
    True
    """

    def __init__(self, rule: Rule, seed: int = 0) -> None:
        self.rule, self.seed = rule, seed

    def initialise(self, name: str, tensor: Tensor) -> None:
        """Give the parameter its values, in place; for zeroify(initialise=...). Elements count in order of memory."""
        with torch.no_grad():
            flat = tensor.as_strided((tensor.numel(),), (1,))
            self.part(name, tensor.shape, 0, flat)

    def part(self, name: str, shape: torch.Size, start: int, out: Tensor) -> Tensor:
        """out (n) <- elements start to start + n of the parameter, cast to the dtype of `out`; returns it."""
        mean, std = self.rule(name, shape)
        if std == 0:
            return out.fill_(mean)
        fill = fill_by_triton if triton is not None and out.is_cuda else fill_by_torch
        fill(out, self.key(name), start, mean, single(std / SIGMA))
        return out

    def key(self, name: str) -> int:
        """64 bits of the name."""
        return key_of(self.seed, name)


@functools.cache
def key_of(seed: int, name: str) -> int:
    """
    >>> key_of(0, "wte.weight") == key_of(1, "wte.weight")
    False
    """
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little", signed=True)


def single(value: float) -> float:
    """The nearest fp32 number: a product with it is the same on every device."""
    return torch.tensor(value, dtype=torch.float32).item()


@_disable_current_modes()  # a Recorder need not see these short-lived tensors, which are many
def fill_by_torch(out: Tensor, key: int, start: int, mean: float, scale: float) -> None:
    at_once = AT_ONCE["cpu" if out.is_cpu else "cuda"]
    for at in range(0, out.numel(), at_once):
        part = out[at : at + at_once]
        x = torch.arange(start + at, start + at + part.numel(), dtype=torch.int64, device=out.device)
        x.mul_(GOLDEN).add_(key)  # int64 wraps around on CPU and GPU alike
        shifted = x >> 30
        x.bitwise_xor_(shifted).mul_(MIX_1)
        torch.bitwise_right_shift(x, 27, out=shifted)
        x.bitwise_xor_(shifted).mul_(MIX_2)
        torch.bitwise_right_shift(x, 31, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_(LAST))
        torch.bitwise_right_shift(x, 16, out=shifted)
        x.bitwise_and_(PARTS).add_(shifted.bitwise_and_(PARTS))  # two sums of two parts, 32 bits apart
        torch.bitwise_right_shift(x, 32, out=shifted)
        x.bitwise_and_(LOW).add_(shifted).sub_(CENTRE)
        values = x.float().mul_(scale)
        part.copy_(values.add_(mean) if mean else values)


def fill_by_triton(out: Tensor, key: int, start: int, mean: float, scale: float) -> None:
    with torch.cuda.device(out.device):
        grid = (triton.cdiv(out.numel(), BLOCK),)
        constants = (mean, scale, GOLDEN, MIX_1, MIX_2)
        # Product and sum are rounded apart, as torch does.
        values_kernel[grid](out, out.numel(), start, key, *constants, BLOCK=BLOCK, enable_fp_fusion=False)


if triton is not None:

    @triton.jit(do_not_specialize=["numel", "start", "key", "mean", "scale", "golden", "mix_1", "mix_2"])
    def values_kernel(out_ptr, numel, start, key, mean, scale, golden, mix_1, mix_2, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = (at + start) * golden + key
        x = (x ^ (x >> 30)) * mix_1
        x = (x ^ (x >> 27)) * mix_2
        x = x ^ ((x >> 31) & 0x1FFFFFFFF)  # without the copies of the sign
        s = (x & 0xFFFF) + ((x >> 16) & 0xFFFF) + ((x >> 32) & 0xFFFF) + ((x >> 48) & 0xFFFF) - 131070
        value = s.to(tl.int32).to(tl.float32) * scale
        value = tl.where(mean == 0.0, value, value + mean)
        tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=at < numel)
