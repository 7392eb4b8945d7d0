"""The memory contract (section 5 of the paper): bytes of model states, walked and recorded."""

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch

from zero_mini.memory.formulas import PlainTraining, model_state_bytes, walk
from zero_mini.memory.recorder import Recorder
from zero_mini.zeroify import zeroify

BLOCKS, WIDTH = 12, 64


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = torch.nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def train(stage, dtype, micro_batches=1, record=False):
    """Two steps; returns the walk after the second's backward, the units' P, and what was recorded."""
    recorder = Recorder() if record else contextlib.nullcontext()
    with recorder:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        zero = zeroify(model, optimizer, stage=stage, dtype=dtype)
        if record:
            recorder.follow(zero)
        for step in range(2):
            for k in range(micro_batches):
                with zero.no_sync() if k < micro_batches - 1 else contextlib.nullcontext():
                    if record:
                        recorder.mark("forward")
                    loss = model(torch.ones(2, 8)).square().mean()
                    if record:
                        recorder.mark("backward")
                    loss.backward()
            del loss
            for unit in zero.trainable:
                zero.finish_reduction(unit)  # as the step does first
            held = walk(zero)
            live_bytes = recorder.live_bytes() if record else None
            deadline = time.monotonic() + 2  # gloo's threads let go of a buffer a moment after its work is done
            while record and live_bytes > 1.01 * sum(held.values()) and time.monotonic() < deadline:
                time.sleep(0.01)
                live_bytes = recorder.live_bytes()
            if record:
                recorder.mark("step")
            optimizer.step()
            optimizer.zero_grad()
            if record and step == 0:
                peak_from = len(recorder.events)
        if record:
            recorder.mark("end")
            timeline = [sum(now) for now in zip(*recorder.timeline().values())]
            return held, live_bytes, max(timeline[peak_from:])
    pieces = sum(len(unit.pieces) for unit in zero.units)
    return held, {unit.name: unit.P for unit in zero.units}, pieces


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.check), 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_model_states_are_the_papers_bytes_and_every_other_byte_has_a_name(ranks, stage, world_size, dtype):
    size = dtype.itemsize
    k = (1, 3)[(world_size + size // 4) % 2]  # each with every N, every stage and every dtype
    for held, P, pieces in ranks(world_size).run(train, stage, dtype, micro_batches=k):
        psi = sum(P.values())
        paper = model_state_bytes(psi, world_size, stage, size, accumulate=k > 1)
        if stage == 3 and size == 2:
            paper["parameters"] = 0  # no 16-bit shard: a gather casts the fp32 master on its way into the slot
        slots = size * (P["root"] + 2 * P["blocks.0"]) if stage == 3 else 0
        step_counters = 4 * pieces  # Adam counts its steps in a 0-dim fp32 tensor for each piece
        placeholders = size * len(P)  # one number a unit, which gives its hidden parameters their shapes
        assert held == {
            "parameters": paper["parameters"],
            "gradients": paper["gradients"],
            "optimizer": paper["optimizer"] + step_counters,
            "activations": 0,
            "communication": slots,
            "other": placeholders,
        }


def test_padding_is_under_one_percent_here(ranks):
    _, P, _ = ranks(4).run(train, 0, torch.float32)[0]
    assert sum(p.numel() for p in Model().parameters()) * 1.01 > sum(P.values())


class Nesting(torch.optim.SGD):
    """Keeps three tensors a parameter, and one for all."""

    def step(self, closure=None):
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            a, b, c = (torch.zeros_like(param) for _ in range(3))
            self.state[param] = {"list": [a, (b, None)], "dict": {"c": c, "count": 3}, "again": a}
        self.state["shared"] = {"scale": torch.zeros(5)}


def test_states_in_lists_tuples_and_dicts_are_counted_once(ranks):
    model = Model()
    optimizer = Nesting(model.parameters())
    optimizer.step()
    numel = sum(param.numel() for param in model.parameters())
    assert walk(PlainTraining(model, optimizer))["optimizer"] == 3 * 4 * numel + 5 * 4

    def held(stage):
        model = Model()
        optimizer = Nesting(model.parameters(), 0.1)
        zero = zeroify(model, optimizer, stage=stage, elementwise=True)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        return walk(zero)["optimizer"], sum(piece.numel() for unit in zero.units for _, piece in unit.pieces)

    for stage in range(4):
        for nbytes, numel in ranks(2).run(held, stage):
            assert nbytes == 3 * 4 * numel + 5 * 4


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc])
def test_a_sparse_tensor_is_its_indices_and_its_values(layout):
    block = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else ()
    values = torch.ones(2, *block)  # on the diagonal
    sparse = torch.sparse_compressed_tensor(torch.arange(3), torch.arange(2), values, layout=layout)
    twice = SimpleNamespace(tensors=lambda: [("other", "sparse", sparse), ("other", "again", sparse)])
    assert walk(twice)["other"] == 8 * 3 + 8 * 2 + 4 * values.numel()


def test_a_sparse_gradient_is_walked_and_recorded():
    with Recorder() as recorder:
        model = torch.nn.Embedding(1000, 8, sparse=True)
        plain = PlainTraining(model, torch.optim.SparseAdam(model.parameters()))
        recorder.follow(plain)
        model(torch.tensor([1, 2, 2])).sum().backward()  # three rows, not coalesced
        plain.optimizer.step()
        held, live_bytes = walk(plain), recorder.live_bytes()
    assert held["gradients"] == 3 * 8 + 3 * 8 * 4
    assert held["optimizer"] == 2 * held["parameters"] == 2 * 1000 * 8 * 4
    assert live_bytes == sum(held.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_walk_and_a_recorder_of_every_allocation_agree_within_one_percent(ranks, dtype):
    for stage in range(4):
        for held, live_bytes, _ in ranks(2).run(train, stage, dtype, record=True):
            assert sum(held.values()) == pytest.approx(live_bytes, rel=0.01)


@pytest.mark.check
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_each_stage_peaks_lower_than_the_one_before(ranks, dtype):
    peaks = [max(peak for *_, peak in ranks(2).run(train, stage, dtype, record=True)) for stage in range(4)]
    assert peaks[3] < peaks[2] < peaks[1] < peaks[0]
