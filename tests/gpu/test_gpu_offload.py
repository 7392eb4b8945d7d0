"""Offload on real GPUs: how near its numbers are to those without, what it costs, and the largest model it trains.

pytest -m gpu tests/gpu/test_gpu_offload.py --record zero_mini/measured      # one CUDA device
"""

import gc
import os
import time
from contextlib import contextmanager
from statistics import median

import pytest
import torch

from zero_mini.activations.checkpointing import checkpoint_blocks
from zero_mini.course.ranks import Ranks
from zero_mini.trainer.gpt import GPT, PRESETS, GPTConfig, init_weight, parameter_count
from zero_mini.trainer.report import host_peak_bytes
from zero_mini.update.offload import Link
from zero_mini.zeroify import zeroify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
N = min(2, torch.cuda.device_count())
SMALL = GPTConfig(L=8, d=1024, heads=16, vocab=8192, T=256)


def make(config: GPTConfig, stage: int, offload: str | None, sgd: bool = False, checkpoint: bool = False):
    """Model, optimizer, handle; in bf16, and no more of the model at a time than a unit."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(config)
    if checkpoint:
        checkpoint_blocks(model)
    params = model.parameters()
    optimizer = torch.optim.SGD(params, lr=0.1) if sgd else torch.optim.AdamW(params, lr=1e-4, fused=True)

    def initialise(name: str, tensor: torch.Tensor) -> None:
        init_weight(name, tensor, config.L)

    zero = zeroify(model, optimizer, stage, dtype=torch.bfloat16, initialise=initialise, device="cuda", offload=offload)
    return model, optimizer, zero


def step(model, optimizer, tokens, micro_batches: int = 1) -> torch.Tensor:
    for _ in range(micro_batches):
        loss = model(tokens[:, :-1], tokens[:, 1:]) / micro_batches
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach() * micro_batches


def master_after(
    steps: int, stage: int, offload: str | None, sgd: bool = False, micro_batches: int = 1
) -> list[torch.Tensor]:
    """The fp32 values after so many steps on this rank's tokens, on the CPU."""
    model, optimizer, zero = make(SMALL, stage, offload, sgd)
    generator = torch.Generator().manual_seed(zero.rank)
    for _ in range(steps):
        tokens = torch.randint(SMALL.vocab, (4, SMALL.T + 1), generator=generator).cuda()
        step(model, optimizer, tokens, micro_batches)
    return [value.cpu() for value in zero.state_dict()["model"].values()]


@contextmanager
def late_copies():
    """Each copy between GPU and host begins some milliseconds late: who does not wait for it takes old numbers."""
    copy = Link.copy

    def late(self, source, target):
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(10_000_000)
        return copy(self, source, target)

    Link.copy = late
    try:
        yield
    finally:
        Link.copy = copy


def compare_with_none(stage: int, folder: str) -> dict[str, float]:
    """The largest difference of an fp32 value after 5 steps, beside what the steps have moved at most."""
    found = {}
    sums = master_after(3, stage, None, True, 3)
    with late_copies():
        assert all(map(torch.equal, sums, master_after(3, stage, "host", True, 3)))
    for sgd in (True, False):
        start, plain = master_after(0, stage, None, sgd), master_after(5, stage, None, sgd)
        host, disk = master_after(5, stage, "host", sgd), master_after(5, stage, folder, sgd)
        assert all(map(torch.equal, host, disk))
        with late_copies():
            assert all(map(torch.equal, host, master_after(5, stage, "host", sgd)))
        name = "SGD" if sgd else "AdamW"
        found[f"{name} differs by"] = max((a - b).abs().max().item() for a, b in zip(plain, host))
        found[f"{name} moved by"] = max((a - b).abs().max().item() for a, b in zip(plain, start))
        one = master_after(1, stage, None, sgd), master_after(1, stage, "host", sgd)
        found[f"{name} differs after one step by"] = max((a - b).abs().max().item() for a, b in zip(*one))
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_numbers_are_those_without_offload_but_for_the_last_bits_of_the_cpus_adam(stage, record, tmp_path):
    with Ranks(N, backend="nccl", timeout_s=240) as ranks:
        found = ranks.run(compare_with_none, stage, str(tmp_path))[0]
    print(found)
    assert found["SGD differs by"] == 0
    # Later, where a gradient is next to nothing, its last bit decides the sign, and so all of Adam's step.
    assert found["AdamW differs after one step by"] <= 2**-26


def link_rates(nbytes: int = 2**30) -> dict[str, float]:
    """Bytes a second of one large pinned copy, each way."""
    host, device = (
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
        torch.empty(nbytes, dtype=torch.uint8).cuda(),
    )
    found = {}
    for name, source, target in (("down", device, host), ("up", host, device)):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        target.copy_(source, non_blocking=True)
        start.record()
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        found[name] = 4 * nbytes / (start.elapsed_time(end) / 1e3)
    return found


def rate(moved: int, work, times: int = 5) -> float:
    """Bytes a second of the fastest of some runs; the first is not counted."""
    seconds = []
    for _ in range(times + 1):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return moved / min(seconds[1:])


def host_rates(threads: int, numel: int = 100_000_000) -> dict[str, float]:
    """Bytes a second of this process on the CPU: a plain copy (8 bytes a number), and fused AdamW in fp32 (28)."""
    torch.set_num_threads(threads)
    master = torch.nn.Parameter(torch.zeros(numel))
    master.grad, target = torch.ones(numel), torch.zeros(numel)
    optimizer = torch.optim.AdamW([master], fused=True)
    copied = rate(8 * numel, lambda: target.copy_(master.detach()))
    return {"copy": copied, "AdamW": rate(28 * numel, optimizer.step)}


def copy_rates(pinned: bool, nbytes: int = 2**28) -> dict[str, float]:
    """Bytes a second of one copy to and from pinned or ordinary memory."""
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
    device = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")

    def copy(target, source):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return {"down": rate(nbytes, lambda: copy(host, device)), "up": rate(nbytes, lambda: copy(device, host))}


def test_what_the_host_moves_by_threads_and_by_ranks(record):
    """A plain copy has no arithmetic: where AdamW moves its bytes no more slowly, memory is what limits it."""
    cores = len(os.sched_getaffinity(0))
    found = {"cores": cores, "threads": {}, "ranks": {}}
    for threads in sorted({2**k for k in range(cores.bit_length()) if 2**k <= cores} | {cores}):
        with Ranks(1, backend="nccl", timeout_s=200) as alone:
            found["threads"][threads] = alone.run(host_rates, threads)[0]
    for count in (1, 2, 4):
        with Ranks(count, device="cpu", timeout_s=200) as ranks:
            found["ranks"][count] = ranks.run(host_rates, max(1, cores // count))
    with Ranks(1, backend="nccl", timeout_s=200) as alone:
        found["link"] = {name: alone.run(copy_rates, name == "pinned")[0] for name in ("pinned", "ordinary")}
    print(found)
    record("host_wall", found, cards=1)
    assert min(found["link"]["pinned"].values()) > max(found["link"]["ordinary"].values())


def costs(config: GPTConfig, batch: int, offload: str | None, micro_batches: list[int], steps: int = 3) -> list[dict]:
    """Time and memory of a step at stage 3 with checkpointed blocks, for each number of micro-batches."""
    model, optimizer, zero = make(config, 3, offload, checkpoint=True)
    tokens = torch.randint(config.vocab, (batch, config.T + 1), device="cuda")
    rows = []
    for k in micro_batches:
        times_ms, update_ms, losses = [], [], []
        torch.cuda.reset_peak_memory_stats()
        for number in range(steps + 2):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(k):
                loss = model(tokens[:, :-1], tokens[:, 1:]) / k
                loss.backward()
            torch.cuda.synchronize()
            computed = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            if number >= 2:
                times_ms.append(1e3 * (time.perf_counter() - begun))
                update_ms.append(1e3 * (time.perf_counter() - computed))
            losses.append(loss.item() * k)
        rows.append(
            {
                "psi": parameter_count(config),
                "L": config.L,
                "d": config.d,
                "batch": batch,
                "micro_batches": k,
                "step_ms": median(times_ms),
                "update_ms": median(update_ms),
                "tokens_per_s": 1e3 * k * batch * config.T / median(times_ms),
                "peak_bytes": torch.cuda.max_memory_allocated(),
                "host_peak_bytes": host_peak_bytes(),
                "device_bytes": sum(zero.memory("device").values()),
                "host_bytes": sum(zero.memory("host").values()),
                "disk_bytes": sum(zero.memory("disk").values()) if "disk" in zero.places else 0,
                "losses": losses[:3],
            }
        )
    return rows


def fits(config: GPTConfig, batch: int, offload: str | None) -> dict | None:
    try:
        return costs(config, batch, offload, [1], steps=2)[0]
    except torch.OutOfMemoryError:
        return None


def available_bytes() -> int:
    lines = open("/proc/meminfo").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def test_time_against_memory_of_1_5B(record, tmp_path):
    config = PRESETS["1.5B"]
    rows = {}
    for place in (None, "host", str(tmp_path)):
        with Ranks(1, backend="nccl", timeout_s=400) as alone:
            name = "disk" if place == str(tmp_path) else place or "none"
            rows[name] = alone.run(
                costs, config, 8, place, [1] if name == "disk" else [1, 8], 1 if name == "disk" else 3
            )[0]
            rates = alone.run(link_rates)[0]
        record("offload", {"rates": rates, "rows": rows}, cards=1)
    print(rows, rates)
    # 12 bytes a parameter leave the GPU, and a copy in bf16 comes, from which blocks are gathered.
    saved = rows["none"][0]["peak_bytes"] - rows["host"][0]["peak_bytes"]
    assert saved > 9.9 * parameter_count(config)


def test_the_largest_gpt_on_one_gpu(record):
    """Blocks of 201M parameters are added until memory ends: the GPU's without offload, the host's with it.

    With it no further than 13B parameters, which is what the paper of ZeRO-Offload trains on one GPU.
    """
    width = GPTConfig(L=1, d=4096, heads=32, T=1024)
    block = 12 * width.d**2
    found = {}
    room = torch.cuda.get_device_properties(0).total_memory
    for L in range(int(room / (14 * block)), 0, -1):  # 14 bytes of states; two slots, the root, activations do not fit
        with Ranks(1, backend="nccl", timeout_s=200) as alone:
            row = alone.run(fits, GPTConfig(L=L, d=4096, heads=32, T=1024), 8, None)[0]
        print(L, row, flush=True)
        if row:
            found["none"] = row
            break
    # 12 bytes of states, and 2 of gradients that pinned memory rounds up to 2**29 for a block
    available = available_bytes()
    L = min(int((available - 8e9) / (12 * block + 2**29)) - 1, round(13e9 / block))
    with Ranks(1, backend="nccl", timeout_s=400) as alone:
        found["host"] = alone.run(fits, GPTConfig(L=L, d=4096, heads=32, T=1024), 8, "host")[0]
    print(L, found["host"])
    found["host"]["host_available_bytes"] = available
    card = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0].lower()  # and with it the host
    record(f"offload_largest_{card}", found, cards=1)
    assert 14 * found["host"]["psi"] > room > 14 * found["none"]["psi"]  # bytes: its states alone would not fit
