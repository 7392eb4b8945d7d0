"""Latency and bandwidth of each collective, fitted where it runs.

    python -m zero_mini.wire.fit                                 2 ranks on this machine
    torchrun --nproc-per-node 8 -m zero_mini.wire.fit            ranks that are there already, also of several machines
    python -m zero_mini.wire.fit --latency-us 200 --MB-per-s 50  over a link that is as slow as that (throttled.py)

The model has two numbers:   seconds = alpha + bytes / beta

    time   |            /    the slope is 1/beta, seconds for each byte that a rank sends
           |         /
           |______/          the floor is alpha, the price of a call however small it is
           |____________ bytes

Times of small and of large buffers differ a thousand times, so the fit makes *relative* errors small: an error of 10 %
counts as much at 1 kB as at 1 GB.

Left out: a third number. Where the host launches the next call while the wire is busy with this one, the time is
nearer to the larger of the two terms than to their sum; `Fit.misses` shows where a line does not describe the points.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from zero_mini.comm import Comm
from zero_mini.course.ranks import own_device, run
from zero_mini.wire.throttled import SlowLink, ThrottledComm, sent_bytes

SIZES = tuple(4**k for k in range(5, 13))  # bytes of a buffer: 1 kB to 17 MB
REPEATS = 5


@dataclass(frozen=True)
class Fit:
    """seconds = alpha_s + bytes / bytes_per_s"""

    alpha_s: float
    bytes_per_s: float  # beta

    def seconds(self, nbytes: float) -> float:
        return self.alpha_s + nbytes / self.bytes_per_s

    def misses(self, points: Mapping[float, float]) -> dict[float, float]:
        """For each size the fit's seconds over those measured: 1 is exact.

        >>> Fit(1.0, 2.0).misses({4: 3.0, 8: 2.5})
        {4: 1.0, 8: 2.0}
        """
        return {nbytes: self.seconds(nbytes) / seconds for nbytes, seconds in points.items()}


def fit(points: Mapping[float, float]) -> Fit:
    """points: bytes -> seconds, of two sizes or more. Least squares of relative errors, with alpha and 1/beta >= 0.

    On a busy machine more bytes may take no longer: then beta is inf, since no slope can be seen.

    >>> fit({1000: 1.5, 2000: 2.0, 8000: 5.0}) == Fit(alpha_s=1.0, bytes_per_s=2000.0)
    True
    """
    if len(points) < 2 or not all(0 < seconds < math.inf for seconds in points.values()):
        raise ValueError(f"{dict(points)}: a line needs times > 0 at two sizes or more")
    sizes, seconds = torch.tensor(list(points.items()), dtype=torch.float64).unbind(1)
    largest = sizes.max()  # columns of about the same size keep the sums exact
    ones, grows = 1 / seconds, sizes / largest / seconds
    columns = torch.stack([ones, grows], dim=1)
    alpha, slope = torch.linalg.lstsq(columns, torch.ones_like(seconds)[:, None]).solution[:, 0].tolist()
    if slope <= 0:
        return Fit((ones.sum() / ones.square().sum()).item(), math.inf)
    if alpha < 0:
        alpha, slope = 0.0, (grows.sum() / grows.square().sum()).item()
    return Fit(round(alpha, 12), float(f"{largest.item() / slope:.12g}"))


def measure(
    comm: Comm,
    sizes: Sequence[int] = SIZES,
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[float, float]]:
    """Collective -> bytes that this rank sends -> seconds, the shortest of `repeats`. Collective: on every rank.

    sizes: bytes of the whole buffer, in fp32. Each call is waited for before the next one.
    """
    device, N = own_device(), comm.world_size
    points: dict[str, dict[float, float]] = {"all_reduce": {}, "reduce_scatter": {}, "all_gather": {}}
    for nbytes in sizes:
        shard = torch.zeros(max(1, nbytes // 4 // N), device=device)
        buffer = torch.zeros(N * len(shard), device=device)
        calls = {
            "all_reduce": partial(comm.all_reduce, buffer, "fit"),
            "reduce_scatter": partial(comm.reduce_scatter, shard, buffer, "fit"),
            "all_gather": partial(comm.all_gather, buffer, shard, "fit"),
        }
        for kind, launch in calls.items():
            seconds = min(elapsed(comm, launch, clock, device) for _ in range(1 + repeats))  # the first one warms up
            points[kind][sent_bytes(comm.ledger.calls[-1], N)] = seconds
    comm.ledger.end_step()
    return points


def elapsed(comm: Comm, launch: Callable, clock: Callable[[], float], device: torch.device) -> float:
    """Seconds from the launch to the end; ranks begin together."""
    dist.barrier(comm.group)
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = clock()
    launch().wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - begun


def table(latency_s: float = 0.0, bytes_per_s: float = math.inf) -> str:
    """alpha and beta of each collective on these ranks, a line each. Collective."""
    throttled = latency_s > 0 or bytes_per_s < math.inf
    comm = ThrottledComm(latency_s=latency_s, bytes_per_s=bytes_per_s) if throttled else Comm()
    lines = [f"{comm.world_size} ranks, {dist.get_backend()}: seconds = alpha + bytes that a rank sends / beta"]
    for kind, points in measure(comm).items():
        found = fit(points)
        worst = max(found.misses(points).values(), key=lambda times: max(times, 1 / times))
        lines.append(
            f"{kind:15} alpha {1e6 * found.alpha_s:8.1f} us   beta {found.bytes_per_s / 1e6:10.1f} MB/s   "
            f"worst point: {worst:.2f} times what was measured"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="if torchrun has not started any")
    parser.add_argument("--latency-us", type=float, default=0.0, help="of a step of a ring, over a throttled link")
    parser.add_argument("--MB-per-s", type=float, default=math.inf, help="of the throttled link")
    options = parser.parse_args()
    link = 1e-6 * options.latency_us, 1e6 * options.MB_per_s
    N = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else options.ranks
    if N < 2:
        parser.error(f"a wire has 2 ranks or more (got {N}); take --ranks 2")
    try:
        SlowLink(*link)
    except ValueError as error:
        parser.error(f"{error} (--latency-us, --MB-per-s)")
    if not dist.is_torchelastic_launched():
        print(run(table, options.ranks, *link)[0])
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    text = table(*link)
    if dist.get_rank() == 0:
        print(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
