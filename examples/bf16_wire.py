"""Gradients cross the wire in bf16 and are summed in fp32: half the bytes of a reduce-scatter in fp32.

    before           cast to bf16, all-to-all    mean in fp32
    rank 0  a0 b0    rank 0  a0 a1               rank 0  A       A = mean(a0, a1)
    rank 1  a1 b1    rank 1  b0 b1               rank 1  B       B = mean(b0, b1)

    wire, elements   P (N-1)/N of 2 bytes; a reduce-scatter in fp32 sends as many of 4 bytes
    memory           4 P bytes more for each reduction in flight: what is sent and what arrives, in bf16
    rounding         each rank's gradient once, by at most 1/2^8 of its value; a reduce-scatter in bf16 rounds sums too

Source: ZeRO++, arXiv 2306.10209 (qgZ), which sends 4 bits a gradient, with a scale for each group of them.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/bf16_wire.py --stage 2

All that is particular to it is `Bf16Comm`, a Comm with another reduce-scatter, which `zeroify(comm=...)` takes. Stage 0
has no reduce-scatter: there Bf16Comm changes nothing.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

from zero_mini import zeroify
from zero_mini.comm import Comm, Launched


class Mean:
    """The ranks' slices in flight, and where their mean goes when they have arrived."""

    def __init__(self, launched: Launched, slices: torch.Tensor, shard: torch.Tensor):
        self.launched, self.slices, self.shard = launched, slices, shard

    def wait(self) -> None:
        self.launched.wait()
        self.shard.copy_(self.slices.mean(dim=0, dtype=torch.float32))


class Bf16Comm(Comm):
    """A reduce-scatter is an all-to-all in bf16, followed by a mean on each rank."""

    def reduce_scatter(self, shard: torch.Tensor, buffer: torch.Tensor, unit: str) -> Mean:
        sent = buffer.to(torch.bfloat16)
        slices = torch.empty_like(sent).view(self.world_size, -1)  # (N, S), one row from each rank

        def start() -> dist.Work:
            return dist.all_to_all_single(slices, sent.view_as(slices), group=self.group, async_op=True)

        return Mean(self.launch("reduce_scatter", unit, sent, start), slices, shard)


def gradient_bytes(zero) -> float:
    """Bytes of gradients that one rank sent in the last step."""
    calls = [call for call in zero.ledger if call.kind == "reduce_scatter"]
    return sum(call.wire_numel(zero.world_size) * call.itemsize for call in calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    for name, comm in (("fp32", Comm()), ("bf16", Bf16Comm())):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        zero = zeroify(model, optimizer, options.stage, comm=comm)
        torch.manual_seed(1 + dist.get_rank())  # each rank has data of its own
        for _ in range(20):
            x = torch.randn(32, 64)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            zero.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"{name}: loss {loss.item():.4f}, {gradient_bytes(zero):,.0f} bytes of gradients a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
