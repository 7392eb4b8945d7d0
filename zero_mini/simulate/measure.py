"""Run one or two steps of rank r of N, and say what they took.

    build      the peak while the model becomes this rank's part of it, unit by unit
    step 1     loss true; AdamW's moments are made at its end
    step 2     bytes of every later step; values not true, since absent ranks' updates are not known
    states     what `zero.memory` lists: parameters and gradients after a backward, optimizer after the update

On CUDA peaks are the allocator's, on a CPU the recorder's (memory/recorder.py). An out-of-memory is a result: it says
where it happened.
"""

import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_mini.memory.formulas import built_state_bytes, model_state_bytes, wire_numel
from zero_mini.memory.recorder import Recorder
from zero_mini.script import Script
from zero_mini.trainer.launch import first_line
from zero_mini.trainer.report import readable

STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Training:
    """What is measured: three functions, called in this order; the last two once a step."""

    build: Callable[[], Script]
    compute: Callable[[Script], Tensor]  # forward and backward; the loss (0-dim)
    update: Callable[[Script], None]


class Meter:
    """Bytes on the device since `with` began: the peak since the last `begin`."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda, self.recorder = device.type == "cuda", None if device.type == "cuda" else Recorder()

    def __enter__(self) -> "Meter":
        gc.collect()  # a handle that is gone leaves cycles, which hold its memory
        if self.is_cuda:
            torch.cuda.empty_cache()
            self.before = torch.cuda.memory_allocated()
        else:
            self.recorder.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.is_cuda:
            self.recorder.__exit__(*exception)

    def begin(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            self.recorder.peak_bytes = self.recorder.live_bytes()
        self.since = time.perf_counter()

    def end(self) -> dict[str, float]:
        """The peak in bytes and the time in seconds. The host waits for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - self.before
        else:
            peak = self.recorder.peak_bytes
        return {"peak_bytes": peak, "seconds": round(time.perf_counter() - self.since, 3)}


def measure(training: Training, device: torch.device, steps: int = 2) -> dict:
    """ "moments": each with its peak and its seconds; states, losses, sent elements; "outcome"."""
    result: dict = {"outcome": "ran", "moments": {}, "losses": []}
    where = "build"
    with Meter(device) as meter:
        try:
            meter.begin()
            zero = training.build()
            result["moments"]["build"] = meter.end()
            for number in range(1, steps + 1):
                where = f"step {number}"
                meter.begin()
                result["losses"].append(training.compute(zero).item())
                zero.wait()
                held = result["held_bytes"] = zero.memory("device")
                training.update(zero)
                held["optimizer"] = zero.memory("device")["optimizer"]  # the first update makes the moments
                result["states_bytes"] = sum(held[name] for name in STATES)
                result["moments"][where] = meter.end()
            result |= {
                "sent_numel": sum(call.wire_numel(zero.world_size) for call in zero.ledger),
                "numel": sum(param.numel() for param in zero.model.parameters()),
                "root_P": sum(unit.P for unit in zero.units if unit.is_root),
                "largest_P": max((unit.P for unit in zero.units if not unit.is_root), default=0),
                "units": len(zero.units),
            }
        except (torch.OutOfMemoryError, MemoryError) as error:
            result["outcome"] = f"out of memory in {where}: {first_line(error).partition(' GPU 0')[0]}"
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):  # torch on a CPU
                raise
            result["outcome"] = f"out of memory in {where}: the host has not enough"
    return result


def formulas(psi: int, stage: int, world_size: int, itemsize: int, result: dict) -> dict[str, float]:
    """What the paper says of such a rank, and what this package's own formula says (14 Psi / N at stage 3)."""
    paper = model_state_bytes(psi, world_size, stage, itemsize)
    built = built_state_bytes(psi, world_size, stage, itemsize, 0, result.get("largest_P", 0))
    return {
        "paper_bytes": sum(paper.values()),
        "built_bytes": sum(built[name] for name in STATES),  # without slots and root
        "paper_numel_sent": wire_numel(psi, world_size, stage),
    }


def report(about: dict, result: dict, briefly: bool = False) -> str:
    """What a run prints: numbers first, then what is real in them and what is not, unless `briefly`."""
    N, stage, rank = about["world_size"], about["stage"], about["rank"]
    lines = [
        f"rank {rank} of {N} at stage {stage}, {about['precision']} on {about['device']}: a GPT of "
        f"{readable(about['psi'], '')} parameters; the other {N - 1} ranks are absent"
    ]
    rows = []
    for number, loss in enumerate(result["losses"], 1):
        how = "true" if number == 1 or stage == 0 else "not true: absent ranks' first update is not known"
        if about.get("own_slice"):
            how = "not true: absent ranks sent this rank's slice"
        rows.append((f"loss of step {number}", f"{loss:.6f} ({how})"))
    if "states_bytes" in result:
        paper, built = result["paper_bytes"], result["built_bytes"]
        other = f"; this package's formula {readable(built)}" if built != paper else ""
        rows.append(("model states", f"{readable(result['states_bytes'])}; the paper {readable(paper)}{other}"))
        if slots := result["held_bytes"]["communication"]:
            rows.append(("slots and root", readable(slots)))
    for name, moment in result["moments"].items():
        rows.append((f"peak in {name}", f"{readable(moment['peak_bytes'])} ({moment['seconds']:.1f} s here)"))
    if "sent_numel" in result:
        sent, paper = readable(result["sent_numel"], ""), readable(result["paper_numel_sent"], "")
        rows.append(("elements sent in a step", f"{sent} by the ledger; the paper {paper}"))
    width = max((len(name) for name, _ in rows), default=0)
    lines += [f"    {name:{width}}  {value}" for name, value in rows]
    if result["outcome"] != "ran":
        lines.append(result["outcome"])
    if briefly:
        return "\n".join(lines)
    lines += [
        "Real: every allocation of this rank, every product, the order and sizes of collectives, the first loss.",
        "Not real: traffic (nothing is sent), time (no wire, and absent ranks' slices are computed here), values after "
        "the first step. All ranks are taken to have the same batch.",
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def at_most(nbytes: float | None, device: torch.device):
    """Within, torch's allocator gives a GPU's memory up to `nbytes`, as on a smaller card."""
    if nbytes is None or device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total))
    try:
        yield
    finally:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
