"""Whatever the shapes, dtypes, groups, ties, frozen parameters and numbers of ranks are: what always holds."""

import contextlib
import copy
from dataclasses import dataclass
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from both_ways import STAGES, double_tower, fail, failing_backward, momentum, run_alone, run_sharded
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from torch import nn

from zero_mini.binding.units import make_units, units_by_size
from zero_mini.course.ranks import Ranks
from zero_mini.flat import ALIGN, Unit, round_up
from zero_mini.trainer.gpt import GPT, PRESETS

FEW = settings(derandomize=True, database=None, deadline=None, max_examples=100)


@dataclass(frozen=True)
class Spec:
    """A parameter to be."""

    shape: tuple[int, ...]
    group: int
    layout: str  # of a matrix or a stack of images; others are contiguous
    trainable: bool = True

    def build(self, dtype: torch.dtype) -> nn.Parameter:
        values = torch.randn(self.shape).to(dtype)
        if self.layout == "transposed" and values.ndim == 2:
            values = values.t().contiguous().t()
        if self.layout == "channels_last" and values.ndim == 4:
            values = values.contiguous(memory_format=torch.channels_last)
        return nn.Parameter(values, self.trainable)


def test_on_a_gpu_small_blocks_that_run_one_after_the_other_are_joined():
    def sizes(model) -> list[int]:
        return [len(modules) for modules in units_by_size(model)]

    def blocks(count: int, width: int = 1024) -> list[nn.Linear]:
        return [nn.Linear(width, width, device="meta") for _ in range(count)]

    with torch.device("meta"):
        by_preset = {name: sizes(GPT(config)) for name, config in PRESETS.items()}
    # 350M: three blocks of 12.6 million parameters; 124M: at most an eighth of 12 blocks; 1.5B: a block is enough
    assert by_preset["350M"] == [3] * 8 and by_preset["124M"] == [1] * 12 and by_preset["1.5B"] == [1] * 48
    pair = nn.ModuleDict({"one": nn.ModuleList(blocks(16)), "other": nn.ModuleList(blocks(16))})
    assert sizes(pair) == [1] * 32  # they may be run in turns
    pair["other"].append(*blocks(1))
    assert sizes(pair) == [4] * 4 + [4] * 4 + [1]
    assert sizes(nn.ModuleList(nn.ModuleList(blocks(2)) for _ in range(8))) == [2] * 8  # pairs run in turns: in order
    assert sizes(nn.Sequential(*blocks(15))) == [1] * 15 and sizes(nn.Sequential(*blocks(15, 1), *blocks(1))) == [2] * 8


SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)
SPECS = st.builds(
    Spec, SHAPES, st.integers(0, 2), st.sampled_from(["contiguous", "transposed", "channels_last"]), st.booleans()
)
SEVERAL = st.lists(SPECS, min_size=1, max_size=6)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
WORLD_SIZES = st.integers(1, 9)


def unit_on_each_rank(params: list[nn.Parameter], groups: list[int], world_size: int) -> list[Unit]:
    names = [f"param {index}" for index in range(len(params))]
    return [Unit("unit", (), names, params, groups, rank, world_size) for rank in range(world_size)]


def parameters(specs: list[Spec], dtype: torch.dtype) -> tuple[list[nn.Parameter], list[int]]:
    specs = sorted(specs, key=lambda spec: spec.group)
    return [spec.build(dtype) for spec in specs], [spec.group for spec in specs]


def numbered(unit: Unit) -> torch.Tensor:
    """A buffer (P) in which each element is its own index."""
    return torch.arange(unit.P)


# --- one unit -------------------------------------------------------------------------------------


@FEW
@given(SEVERAL, DTYPES, WORLD_SIZES)
def test_slices_and_pieces_cover_the_buffer_once_and_each_element_is_in_its_group(specs, dtype, world_size):
    params, groups = parameters(specs, dtype)
    units = unit_on_each_rank(params, groups, world_size)
    buffer = numbered(units[0])
    assert torch.equal(torch.cat([unit.slice_of(buffer) for unit in units]), buffer)
    pieces = [piece for unit in units for piece in unit.by_group(unit.slice_of(buffer))]
    assert torch.equal(torch.cat([view for _, view in pieces]), buffer)
    group_of = torch.cat([torch.full_like(view, group) for group, view in pieces])
    for view, group in zip(units[0].views(buffer), groups):
        assert torch.all(group_of[view.flatten()] == group)
    whole = [group for group, _ in units[0].by_group(buffer)]  # as stage 0 has it: one range a group
    assert whole == sorted(set(whole)) and set(whole) >= {g for g, param in zip(groups, params) if param.numel()}


@FEW
@given(SEVERAL, DTYPES, WORLD_SIZES)
def test_every_rank_has_as_much_and_padding_is_bounded(specs, dtype, world_size):
    params, groups = parameters(specs, dtype)
    units = unit_on_each_rank(params, groups, world_size)
    assert {unit.P for unit in units} == {units[0].S * world_size} and units[0].S % ALIGN == 0
    aligned = sum(round_up(param.numel(), ALIGN) for param in params)
    assert aligned <= units[0].P < aligned + ALIGN * world_size or units[0].P == ALIGN * world_size
    assert all(offset % ALIGN == 0 for offset in units[0].offsets)


@FEW
@given(SEVERAL, DTYPES, WORLD_SIZES, st.data())
def test_what_is_laid_out_comes_back_in_its_shape_and_strides_and_all_else_is_zero(specs, dtype, world_size, data):
    params, groups = parameters(specs, dtype)
    unit = unit_on_each_rank(params, groups, world_size)[0]
    missing = data.draw(st.lists(st.booleans(), min_size=len(params), max_size=len(params)))
    tensors = [None if absent else param.detach() for param, absent in zip(params, missing)]
    buffer = unit.fill(torch.full((unit.P,), 7777.0, dtype=dtype), tensors)
    outside = torch.ones(unit.P, dtype=torch.bool)
    for view, index, param, tensor in zip(unit.views(buffer), unit.views(numbered(unit)), params, tensors):
        assert torch.equal(view, torch.zeros_like(param) if tensor is None else tensor)
        assert view.stride() == param.stride() or param.numel() == 0
        outside[index.flatten()] = False
    assert outside.sum() == unit.P - sum(param.numel() for param in params)  # no two share an element
    assert not buffer[outside].count_nonzero()


@FEW
@given(SEVERAL, DTYPES, WORLD_SIZES, WORLD_SIZES)
def test_slices_of_n_ranks_become_those_of_m_and_again_of_n_to_the_bit(specs, dtype, n, m):
    params, groups = parameters(specs, dtype)

    def reshard(slices: list[torch.Tensor], world_size: int) -> list[torch.Tensor]:
        old, new = (unit_on_each_rank(params, groups, size) for size in (len(slices), world_size))
        values = old[0].views(torch.cat(slices))
        whole = new[0].fill(torch.full((new[0].P,), 7777.0, dtype=dtype), values)
        return [unit.slice_of(whole) for unit in new]

    units = unit_on_each_rank(params, groups, n)
    begin = [unit.slice_of(unit.fill(torch.empty(unit.P, dtype=dtype), params)) for unit in units]
    again = reshard(reshard(begin, m), n)
    assert all(torch.equal(one, other) for one, other in zip(begin, again, strict=True))


@FEW
@given(SEVERAL, st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4), WORLD_SIZES)
def test_gradients_of_micro_batches_add_up_and_are_zero_where_there_was_none(specs, batches, world_size):
    params, groups = parameters([Spec(s.shape, s.group, s.layout) for s in specs], torch.float64)
    unit = unit_on_each_rank(params, groups, world_size)[0]
    sums = [torch.zeros_like(param) for param in params]
    for present in batches:
        for param, total, there in zip(params, sums, present):
            if there:
                param.grad = torch.randn_like(param)
                total += param.grad
        unit.take_grads(torch.float64)
        assert unit.grads_arrived() == 0
    for view, total in zip(unit.views(unit.local_grad), sums):
        torch.testing.assert_close(view, total, rtol=1e-12, atol=1e-12)
    assert unit.local_grad.count_nonzero() <= sum(param.numel() for param in params)


# --- a model --------------------------------------------------------------------------------------


class AnyModel(nn.Module):
    """`places`: for each parameter, the block that has it (-1: the root) and maybe another that has it too."""

    def __init__(self, specs: list[Spec], places: list[tuple[int, int | None]]):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ParameterList() for _ in range(3))
        self.rest = nn.ParameterDict()
        for index, (spec, where) in enumerate(zip(specs, places)):
            param = spec.build(torch.float32)
            for place in {place for place in where if place is not None}:
                if place >= 0:
                    self.blocks[place].append(param)
                else:
                    self.rest[f"p{index}"] = param


PLACES = st.tuples(st.integers(-1, 2), st.none() | st.integers(-1, 2))


@FEW
@given(st.lists(st.tuples(SPECS, PLACES), min_size=1, max_size=8), WORLD_SIZES)
def test_every_parameter_has_one_place_in_one_unit_whatever_is_tied_or_frozen(entries, world_size):
    specs, places = map(list, zip(*entries))
    model = AnyModel(specs, places)
    params = list(model.parameters())
    group_of = {id(param): index % 3 for index, param in enumerate(params)}
    blocks = [(f"blocks.{index}", [block]) for index, block in enumerate(model.blocks)]
    units = make_units(model, blocks, group_of, 0, world_size)
    placed = [id(param) for unit in units for param in unit.params]
    assert sorted(placed) == sorted(map(id, params))  # parameters() names a tied one once
    at_home = {}
    for unit in units:
        assert {param.requires_grad for param in unit.params} == {unit.trainable}
        assert unit.groups == sorted(unit.groups) == [group_of[id(param)] for param in unit.params]
        at_home |= {id(param): "root" if unit.is_root else unit.name.split()[0] for param in unit.params}
    for param in params:
        homes = {f"blocks.{i}" for i, block in enumerate(model.blocks) if any(p is param for p in block)}
        homes |= {"root"} if any(p is param for p in model.rest.values()) else set()
        assert at_home[id(param)] == (homes.pop() if len(homes) == 1 else "root")


# --- a training -----------------------------------------------------------------------------------


class Training(RuleBasedStateMachine):
    """Writes a script of what a loop may do, then runs it: alone, and on two ranks at every stage."""

    def __init__(self, pool: Ranks):
        super().__init__()
        self.pool, self.script = pool, []
        self.waiting = 0  # losses whose backward has not come
        self.unsent = self.saved = False

    def add(self, act, *args) -> None:
        self.script.append((act, args))

    @rule(batch=st.integers(0, 5))
    def forward(self, batch):
        self.add(forward, batch)
        self.waiting += 1

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), sync=st.booleans())
    def backward(self, data, sync):
        self.add(backward, data.draw(st.integers(0, self.waiting - 1)), sync)
        self.waiting -= 1
        self.unsent = not sync

    # A step changes what a waiting graph has kept, and what no_sync() holds back would be lost: both are errors.
    @precondition(lambda self: not self.waiting and not self.unsent)
    @rule()
    def step(self):
        self.add(step)

    @precondition(lambda self: not self.waiting and not self.unsent)
    @rule(batch=st.integers(0, 5))
    def train(self, batch):
        self.add(train, batch)

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none):
        self.add(zero_grad, set_to_none)
        self.unsent = False

    @rule(batch=st.integers(50, 52), mode=st.sampled_from([torch.no_grad, torch.inference_mode]))
    def evaluate(self, batch, mode):
        self.add(evaluate, batch, mode)

    @rule(module=st.sampled_from(["enter", "blocks.0", "blocks.1.fc", "leave"]))
    def fail_in_forward(self, module):
        self.add(fail_in_forward, module)

    @precondition(lambda self: not self.waiting)
    @rule(block=st.integers(0, 2))
    def fail_in_backward(self, block):
        self.add(fail_in_backward, block)
        self.unsent = False

    @precondition(lambda self: not self.unsent)
    @rule()
    def look_at_gradients(self):
        self.add(look_at_gradients)

    @rule()
    def look(self):
        self.add(look)

    @rule()
    def save(self):
        self.add(save)
        self.saved = True

    @precondition(lambda self: self.saved and not self.waiting)
    @rule()
    def load(self):
        self.add(load)

    @precondition(lambda self: not self.waiting and not self.unsent)
    @rule(batch=st.integers(0, 5))
    def train_and_go_back(self, batch):
        for act, *args in ([save], [train, batch], [load]):
            self.add(act, *args)
        self.saved = True

    def teardown(self):
        for act, *args in ([backward, 0, True],) * self.waiting + ([forward, 0], [backward, 0, True]):
            self.add(act, *args)
        for act in (look_at_gradients, step, look):
            self.add(act)
        results = self.pool.run(alone_and_at_each_stage, partial(perform, self.script))
        for stage in STAGES:
            for (notes, state, _), at_stage in results:
                own_notes, own_state, error = at_stage[stage]
                assert error is None, f"stage {stage}: {error}"
                for own, expected in zip(own_notes, notes, strict=True):
                    is_tensor = isinstance(own, torch.Tensor)
                    same = torch.allclose(own, expected, 1e-9, 1e-9) if is_tensor else own == expected
                    assert same, f"stage {stage}: {own}, alone {expected}"
                for name in state:
                    torch.testing.assert_close(own_state[name], state[name], rtol=1e-9, atol=1e-9)
            (_, first), (_, second) = results
            for name, value in first[stage][1].items():
                assert torch.equal(value, second[stage][1][name]), f"stage {stage}: ranks differ in {name}"


def alone_and_at_each_stage(script) -> tuple:
    _, alone = run_alone(script, double_tower, momentum, None)
    return alone, [run_sharded(script, double_tower, momentum, None, stage=stage) for stage in STAGES]


def perform(script, job) -> None:
    job.losses, job.saved = [], None
    for act, args in script:
        act(job, *args)


def forward(job, batch):
    job.losses.append(job.loss(batch))


def backward(job, index, sync):
    with contextlib.nullcontext() if sync else job.no_sync():
        job.losses.pop(index).backward()


def step(job):
    job.optimizer.step()


def train(job, batch):
    job.train(batch)


def look_at_gradients(job):
    with job.full_params(grads=True):
        for param in job.model.parameters():
            job.see(param.grad)


def zero_grad(job, set_to_none):
    job.optimizer.zero_grad(set_to_none)


def evaluate(job, batch, mode):
    with mode():
        job.see_rows(job.model(job.batch(batch)[0]))


def fail_in_forward(job, module):
    hook = job.model.get_submodule(module).register_forward_hook(fail)
    with pytest.raises(KeyError):
        job.loss(9)
    hook.remove()


def fail_in_backward(job, block):
    """What gradients there are then is undefined (torch has some of them), so they are forgotten."""
    failing_backward(job, 9, block)
    job.optimizer.zero_grad()


def look(job):
    job.see_state()


def save(job):
    job.saved = copy.deepcopy(job.model.state_dict()), copy.deepcopy((job.zero or job.optimizer).state_dict())


def load(job):
    """Between two forwards, since values that stand in a slot must not outlive it."""
    model, states = job.saved
    job.see_output()
    if job.zero is not None:
        job.zero.load_state_dict(states)
    else:
        job.model.load_state_dict(model)
        job.optimizer.load_state_dict(copy.deepcopy(states))
    job.see_output()


def test_any_training_is_what_it_is_alone(ranks):
    few = settings(FEW, max_examples=10, stateful_step_count=20)
    run_state_machine_as_test(lambda: Training(ranks(2)), settings=few)
