"""by_hand.py trains as torch DDP does, and holds and sends what its head says."""

import gc
import importlib
import io
import re
import time
import tokenize
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import job_of_two
from parity import exactly
from test_train_gpt import free_port
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from zero_mini import by_hand
from zero_mini.binding.parameter import plainly
from zero_mini.memory.formulas import model_state_bytes, wire_numel

STAGES = (0, 1, 2, 3)
STEPS = 3
WIDTH = 11  # odd, so that blocks need padding and slices cut through tensors
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.3),
}


class Residual(nn.Module):
    """It uses its input twice, and has several parameters."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def modules(seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Linear(5, WIDTH), Residual(), Residual(), nn.Linear(WIDTH, 3)]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Different on each rank."""
    torch.manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 5), torch.randn(4, 3)


def whole_values(block: by_hand.Block) -> list[torch.Tensor]:
    """The parameters that the next forward will compute with: the buffer, or the ranks' shards if it is freed."""
    full = block.full
    if not full.untyped_storage().nbytes():
        full = torch.empty(full.numel())
        dist.all_gather(list(full.chunk(dist.get_world_size())), block.shard)
    sizes = [param.numel() for param in block.params]
    return [view.view(p.shape).clone() for view, p in zip(full[: sum(sizes)].split(sizes), block.params)]


def train_by_hand(stage: int, optimizer: str) -> list[torch.Tensor]:
    """Loss and parameters, step by step."""
    blocks = [by_hand.Block(module, stage) for module in modules(seed=dist.get_rank())]
    optimizer = OPTIMIZERS[optimizer]([block.shard for block in blocks])
    seen = []
    for step in range(STEPS):
        seen.append(by_hand.train_step(blocks, optimizer, *batch(step), stage))
        seen += [values for block in blocks for values in whole_values(block)]
    return seen


def train_torch_ddp(optimizer: str) -> list[torch.Tensor]:
    model = DistributedDataParallel(nn.Sequential(*modules(seed=dist.get_rank())))
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    seen = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), *(param.detach().clone() for param in model.parameters())]
    return seen


def gaps(optimizer: str) -> list[list[float]]:
    """How far each loss and parameter of each stage is from torch DDP's, relative to its largest element."""
    with exactly():
        ddp = train_torch_ddp(optimizer)
        return [
            [0.0 if torch.equal(a, b) else ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(run, ddp)]
            for run in (train_by_hand(stage, optimizer) for stage in STAGES)
        ]


def differing_stages(optimizer: str) -> list[int]:
    """The stages that are not equal to stage 0 in every bit."""
    with exactly():
        first, *others = [train_by_hand(stage, optimizer) for stage in STAGES]
        return [stage for stage, run in enumerate(others, 1) if not all(map(torch.equal, first, run))]


@pytest.mark.check
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_stage_is_torch_ddp_to_the_bit_on_two_ranks(ranks, optimizer):
    for by_stage in ranks(2).run(gaps, optimizer):
        assert [max(gap) for gap in by_stage] == [0, 0, 0, 0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_three_ranks_differ_from_torch_ddp_by_rounding_and_stages_not_at_all(ranks, optimizer):
    for by_stage in ranks(3).run(gaps, optimizer):
        assert max(max(gap) for gap in by_stage) < 1e-6
    assert ranks(3).run(differing_stages, optimizer) == [[], [], []]


# --- what it sends ----------------------------------------------------------------------------


class Wire(TorchDispatchMode):
    """Notes each collective that torch runs, whoever calls it: (kind, elements of the full buffer, of the shard)."""

    KINDS = {
        "allreduce_": ("all_reduce", lambda tensors, *_: (tensors[0], tensors[0])),
        "_reduce_scatter_base_": ("reduce_scatter", lambda shard, full, *_: (full, shard)),
        "_allgather_base_": ("all_gather", lambda full, shard, *_: (full, shard)),
    }

    def __init__(self, expected: list[int]):
        super().__init__()
        self.calls, self.gradients, self.alive, self.expected = [], [], [], expected
        self.patience_s = 2.0  # of all looks together

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "c10d":
            kind, buffers = self.KINDS[op._schema.name.partition("::")[2]]
            full, shard = buffers(*args)
            self.calls.append((kind, full.numel(), shard.numel()))
            if "reduce" in kind:
                self.gradients.append(StorageWeakRef(full.untyped_storage()))
        return op(*args, **kwargs or {})

    def look(self, *_) -> None:
        """Note how many of the gradients seen so far are in memory."""
        expected = self.expected[len(self.alive)]
        while (count := self.count()) != expected and self.patience_s > 0:
            time.sleep(0.01)  # gloo's thread may hold a buffer for a moment after the collective returned
            self.patience_s -= 0.01
        self.alive.append(count)

    def count(self) -> int:
        return sum(not gradient.expired() for gradient in self.gradients)

    def look_in_backward(self, grad: torch.Tensor) -> None:
        """The same when a parameter's gradient exists, which is the next one seen."""
        self.look()
        self.gradients.append(StorageWeakRef(grad.untyped_storage()))


def gradients_alive(stage: int) -> list[int]:
    """How many full gradients there should be whenever one of four blocks computes, in two steps."""
    forward, backward = [0, 0, 0, 0], [0, 1, 2, 3] if stage < 2 else [0, 0, 0, 0]
    return 2 * (forward + backward)


def two_steps(stage: int):
    """Two steps: collectives, each block's P, gradients alive whenever a block computes, and what the file counted."""
    blocks = [by_hand.Block(module, stage) for module in modules(seed=0)]
    optimizer = OPTIMIZERS["AdamW"]([block.shard for block in blocks])
    by_hand.volumes.clear()
    with Wire(gradients_alive(stage)) as wire:
        for block in blocks:
            block.module.register_forward_hook(wire.look)
            block.params[0].register_hook(wire.look_in_backward)
        for step in range(2):
            by_hand.train_step(blocks, optimizer, *batch(step), stage)
    return wire.calls, [block.full.numel() for block in blocks], wire.alive, sum(by_hand.volumes)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_sends_the_formulas_elements_in_the_order_of_the_head(ranks, stage, world_size):
    for calls, sizes, _, counted in ranks(world_size).run(two_steps, stage):
        there, back = [(P, P // world_size) for P in sizes], [(P, P // world_size) for P in reversed(sizes)]
        gathers = [("all_gather", *size) for size in there]
        reductions = [("reduce_scatter", *size) for size in back]
        again = [call for size in back for call in [("all_gather", *size), ("reduce_scatter", *size)]]
        whole = [("all_reduce", P, P) for P in reversed(sizes)]
        assert calls == 2 * [whole, reductions + gathers, reductions + gathers, gathers + again][stage]
        share = (world_size - 1) / world_size
        numel = sum(P * share * (2 if kind == "all_reduce" else 1) for kind, P, _ in calls)
        assert counted == pytest.approx(numel) == pytest.approx(2 * wire_numel(sum(sizes), world_size, stage))


# --- what it holds ----------------------------------------------------------------------------


def storages() -> dict[int, int]:
    """The bytes of every storage that a tensor of this process has, but for those of one element."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    with plainly():
        found = [tensor.untyped_storage() for tensor in tensors]
    sizes = {storage._cdata: int(storage.nbytes()) for storage in found}  # a traced one is symbolic
    return {at: nbytes for at, nbytes in sizes.items() if nbytes > 4}


def bytes_left_by_a_step(stage: int) -> tuple[int, int]:
    """Bytes in memory after the second step that were not there before the blocks were, and Psi."""
    data = [batch(0), batch(1)]
    gc.collect()
    before = storages()
    blocks = [by_hand.Block(module, stage) for module in modules(seed=0)]
    optimizer = OPTIMIZERS["AdamW"]([block.shard for block in blocks])
    for x, y in data:
        by_hand.train_step(blocks, optimizer, x, y, stage)
    time.sleep(0.1)  # gloo's thread may hold a buffer for a moment after the collective returned
    after = storages()  # without gc.collect(): a step leaves no garbage either
    return sum(nbytes for at, nbytes in after.items() if at not in before), sum(b.full.numel() for b in blocks)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_leaves_the_formulas_bytes_and_nothing_else(ranks, world_size):
    for stage in STAGES:
        for held, psi in ranks(world_size).run(bytes_left_by_a_step, stage):
            assert held == sum(model_state_bytes(psi, world_size, stage, compute_dtype_bytes=4).values())


@pytest.mark.parametrize("stage", STAGES)
def test_a_full_gradient_lives_until_the_step_at_stages_0_and_1_and_until_it_is_reduced_at_2_and_3(ranks, stage):
    for _, _, alive, _ in ranks(2).run(two_steps, stage):
        assert alive == gradients_alive(stage)


def blocks_with_parameters() -> list[list[int]]:
    """Which blocks have their full parameters in memory whenever one computes at stage 3: forward, backward, after."""
    blocks = [by_hand.Block(module, stage=3) for module in modules(seed=0)]
    optimizer = OPTIMIZERS["AdamW"]([block.shard for block in blocks])
    seen = []

    def look(*_) -> None:
        seen.append([i for i, block in enumerate(blocks) if block.full.untyped_storage().nbytes()])

    for block in blocks:
        block.module.register_forward_hook(look)
        block.params[0].register_hook(look)
    by_hand.train_step(blocks, optimizer, *batch(0), 3)
    look()
    return seen


def test_stage_3_has_the_parameters_of_one_block_at_a_time(ranks):
    for seen in ranks(2).run(blocks_with_parameters):
        assert seen == [[0], [1], [2], [3], [3], [2], [1], [0], []]


def freed_values() -> list[bool]:
    """Does every parameter read as NaN after a step of stage 3?"""
    blocks = [by_hand.Block(module, stage=3) for module in modules(seed=0)]
    by_hand.train_step(blocks, OPTIMIZERS["SGD"]([block.shard for block in blocks]), *batch(0), 3)
    return [bool(param.isnan().all()) and param.shape == param.data.shape for block in blocks for param in block.params]


def test_a_parameter_that_was_freed_reads_as_nan_in_place_of_ending_the_process(ranks):
    for seen in ranks(2).run(freed_values):
        assert seen and all(seen)


# --- tests of these tests ---------------------------------------------------------------------


def under(old: str, new: str, function, *args):
    """function(*args) in a rank where by_hand.py says `new` in one place in place of `old`."""
    source = Path(by_hand.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in by_hand.py"
    namespace, original = {"__name__": "mutant"}, dict(vars(by_hand))
    exec(compile(source.replace(old, new), by_hand.__file__, "exec"), namespace)
    vars(by_hand).update({name: namespace[name] for name in ("Block", "train_step", "volumes")})
    try:
        return function(*args)
    finally:
        vars(by_hand).update(original)


MUTANTS = {  # what is wrong: (line, in place of it, stages that train otherwise then)
    "sums in place of means": ("flatten(grads) / dist.get_world_size()", "flatten(grads)", [0, 1, 2, 3]),
    "ranks start apart": ("dist.broadcast(self.full, src=0)", "pass", [0, 1, 2, 3]),
    "gradients of this rank alone, stage 0": ("all_reduce(grad)  #", "pass  #", [0]),
    "gradients of this rank alone": (
        "reduce_scatter(block.shard.grad, grad)",
        "block.shard.grad[:] = shard_of(grad)",
        [1, 2, 3],
    ),
    "every rank updates the first shard": ("[dist.get_rank()]", "[0]", [1, 2, 3]),
    "old parameters of other ranks, stage 2": ("if stage in (1, 2):  # (5)", "if stage == 1:  # (5)", [2]),
    "no gather": ("all_gather(self.full, self.shard)", "self.full.fill_(0.1)", [3]),
}


@pytest.mark.parametrize("wrong", MUTANTS)
def test_the_comparison_with_torch_ddp_sees(ranks, wrong):
    old, new, stages = MUTANTS[wrong]
    for by_stage in ranks(2).run(under, old, new, gaps, "SGD"):
        assert [stage for stage, gap in enumerate(by_stage) if max(gap) != 0] == stages


def test_the_counts_of_bytes_and_elements_see_what_numbers_do_not(ranks):
    def differs(old, new, function, *args):
        return ranks(2).run(under, old, new, function, *args) != ranks(2).run(function, *args)

    assert differs("block.free()  # [Zero3.after_forward]", "pass", blocks_with_parameters)
    assert differs("if stage == 1 else", "if stage in (1, 2) else", bytes_left_by_a_step, 2)
    assert differs("self.shard.clone()", "self.full.clone().chunk(2)[dist.get_rank()]", bytes_left_by_a_step, 3)
    assert differs("del grad, grads", "self = grad", two_steps, 2)
    gather = "all_gather(block.full, block.shard)"
    assert differs(gather, f"{gather}, {gather}", two_steps, 1)


# --- what it says -----------------------------------------------------------------------------


def named_methods() -> set[tuple[str, str]]:
    """Class.method, wherever a comment of by_hand.py names one."""
    source = io.StringIO(Path(by_hand.__file__).read_text())
    comments = [token.string for token in tokenize.generate_tokens(source.readline) if token.type == tokenize.COMMENT]
    return {found for comment in comments for found in re.findall(r"\[(\w+)\.(\w+)\]", comment)}


def test_every_method_that_a_comment_names_exists():
    modules = [
        importlib.import_module(f"zero_mini.{name}") for name in ("comm", "flat", "ddp", "zero1", "zero2", "zero3")
    ]
    methods = named_methods()
    assert {"Comm", "Unit", "DDP", "Zero1", "Zero2", "Zero3"} <= {name for name, _ in methods}
    for name, method in methods:
        (cls,) = {vars(module)[name] for module in modules if name in vars(module)}
        assert method in vars(cls), f"{name}.{method}"


def test_the_script_trains_alike_at_all_stages_and_measures_what_the_formulas_say(tmp_path):
    (status, out, err), (other, nothing, _) = [
        each.finish() for each in job_of_two(tmp_path, free_port(), by_hand.__file__, [], [])
    ]
    assert (status, other, nothing) == (0, 0, ""), err
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"stage {stage}" for stage in STAGES]
    assert len({re.search(r"losses \[.*?\]", line)[0] for line in lines}) == 1
    for line in lines:
        pairs = re.findall(r"(\d+) [a-z ]+ \(formula (\d+)\)", line)
        assert len(pairs) == 2 and all(measured == formula for measured, formula in pairs), line
