"""Bad input: one clear error, on every rank, before anything is touched; two facts and what to do about them.

A wrong call of zeroify() leaves model and optimizer as they were. Where one rank alone is wrong, the
others hear of it; a rank that waited for one that has left would run into the time-out of the pool.
"""

import copy
import itertools
import pickle
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from says import tells
from torch import nn
from torch.nn import functional as F

from zero_mini.binding import checks
from zero_mini.course.ranks import Ranks
from zero_mini.simulate.absent import Absent
from zero_mini.update.loss_scale import LossScaler
from zero_mini.zeroify import zeroify

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def pair():
    """Two ranks that have little patience."""
    with Ranks(2, timeout_s=10, device="cpu") as ranks:
        yield ranks


class Tower(nn.Module):
    """Three blocks between two layers of the root."""

    def __init__(self, width: int = 4, depth: int = 3):
        super().__init__()
        self.enter, self.leave = nn.Linear(2, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = block(h)
        return self.leave(h)


def sgd(model: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def with_layer(layer: nn.Module) -> nn.Module:
    model = Tower()
    model.extra = layer
    return model


# --- what zeroify() refuses ---------------------------------------------------------------------------


def complaint(wrap: Callable[[int], object]) -> str:
    """What the error says, or "" if there is none."""
    try:
        wrap(dist.get_rank())
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_refused(pair: Ranks, wrap: Callable[[int], object], *expected: str) -> list[str]:
    """Every rank raises, and says all that is expected. Returns what each says."""
    everyone = pair.run(complaint, wrap)
    for said in everyone:
        assert said, "accepted"
        for part in expected:
            assert re.search(part, said), said
    return everyone


def wrap_tower(model: nn.Module | None = None, optimizer: Callable = sgd, **options):
    model = Tower() if model is None else model
    return zeroify(model, optimizer(model), **options)


def wrap_with_units(choose: Callable[[nn.Module], list[nn.Module]]):
    model = Tower()
    return zeroify(model, sgd(model), units=choose(model))


@pytest.mark.parametrize("stage", [4, -1, "2", None, 1.5])
def test_a_stage_that_does_not_exist_is_refused(pair, stage):
    check_refused(pair, lambda rank: wrap_tower(stage=stage), "ValueError", "0, 1, 2 or 3", re.escape(repr(stage)))


def test_without_a_process_group_the_error_says_how_to_get_one():
    with pytest.raises(RuntimeError, match="torchrun.*init_process_group"):
        wrap_tower()


class LayerRates(torch.optim.SGD):
    """An optimizer that this package does not know, although it is elementwise."""

    def step(self, closure=None):
        return super().step(closure)


class Renamed(torch.optim.SGD):
    """Overrides nothing that SGD does."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr, momentum=0.9)

    def rates(self) -> list[float]:
        return [group["lr"] for group in self.param_groups]


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, as several packages' do."""

    def __init__(self, base):
        self.base = base
        super().__init__(base.param_groups, {})

    def step(self, closure=None):
        return self.base.step(closure)


class AdamW(torch.optim.SGD):
    """Has a name that this package knows, and is another optimizer."""

    def step(self, closure=None):
        return super().step(closure)


WHOLE_TENSORS = {
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
    "SparseAdam": lambda model: torch.optim.SparseAdam(list(model.parameters())),
    "LayerRates": lambda model: LayerRates(model.parameters(), lr=0.1),
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.1),
}
if hasattr(torch.optim, "Muon"):
    WHOLE_TENSORS["Muon"] = lambda model: torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])


@pytest.mark.parametrize("name", WHOLE_TENSORS)
def test_an_optimizer_that_may_look_at_whole_tensors_is_refused(pair, name):
    def wrap(rank):
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        zeroify(model, WHOLE_TENSORS[name](model))

    check_refused(pair, wrap, "ValueError", name, "elementwise=True", "AdamW")


def trained(wrap: Callable | None, build_optimizer: Callable, **options) -> list[torch.Tensor]:
    """The model after three steps, without zeroify or with it; every rank has the same rows."""
    torch.manual_seed(0)
    model = Tower()
    optimizer = build_optimizer(model.parameters())
    if wrap is not None:
        wrap(model, optimizer, **options)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 2, generator=torch.Generator().manual_seed(step))).sin().mean().backward()
        optimizer.step()
    return [value.detach().clone() for value in model.state_dict().values()]


def test_a_subclass_that_overrides_nothing_is_the_optimizer_it_comes_from(pair):
    for values in pair.run(trained, zeroify, Renamed, stage=2):
        for own, alone in zip(values, trained(None, Renamed)):
            torch.testing.assert_close(own, alone)


def test_a_wrapper_of_an_optimizer_is_refused_whatever_is_vouched_for(pair):
    def wrap(rank):
        model = Tower()
        zeroify(model, Lookahead(sgd(model)), elementwise=True)

    check_refused(pair, wrap, "ValueError", "Lookahead", "SGD", r"optimizer\.base")


def test_elementwise_vouches_for_an_unknown_optimizer(pair):
    def build(params):
        return LayerRates(params, lr=0.1, momentum=0.9)

    for stage in STAGES:
        for values in pair.run(trained, zeroify, build, stage=stage, elementwise=True):
            for own, alone in zip(values, trained(None, build)):
                torch.testing.assert_close(own, alone)


ELEMENTWISE = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True}, {"fused": True}],
    "Adam": [{"amsgrad": True}, {"fused": True}, {"maximize": True}],
    "AdamW": [{"fused": True}, {"foreach": True}],
    "Adagrad": [{}],
    "RMSprop": [{"centered": True, "momentum": 0.5}],
    "Adadelta": [{}],
    "NAdam": [{}],
    "RAdam": [{}],
    "Adamax": [{}],
    "Rprop": [{}],
    "ASGD": [{"t0": 0}],
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_optimizer_that_is_said_to_be_safe_trains_as_alone(pair, name):
    for options in ELEMENTWISE[name]:

        def build(params, options=options):
            return getattr(torch.optim, name)(params, lr=0.02, **options)

        expected = trained(None, build)
        for values in pair.run(trained, zeroify, build, stage=2):
            for own, alone in zip(values, expected):
                torch.testing.assert_close(own, alone, atol=1e-6, rtol=1e-5)


def test_a_parameter_of_the_optimizer_that_is_not_the_models_is_refused(pair):
    def wrap(rank):
        model = Tower()
        groups = [{"params": list(model.parameters())}, {"params": [nn.Parameter(torch.ones(10, 5))]}]
        zeroify(model, torch.optim.SGD(groups, lr=0.1))

    check_refused(pair, wrap, "ValueError", "group 1, parameter 0", r"\(10, 5\)", "nn.ModuleList")


def test_a_trainable_parameter_that_no_group_has_is_refused(pair):
    def wrap(rank):
        model = Tower()
        given = [param for name, param in model.named_parameters() if name != "blocks.1.0.bias"]
        zeroify(model, torch.optim.SGD(given, lr=0.1))

    check_refused(pair, wrap, "ValueError", "blocks.1.0.bias", "param group")


def test_an_optimizer_that_has_stepped_is_refused(pair):
    def wrap(rank):
        model = Tower()
        optimizer = sgd(model)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        zeroify(model, optimizer)

    check_refused(pair, wrap, "ValueError", r"SGD\b.*\b10\b")


@pytest.mark.parametrize("new_optimizer", [False, True])
@pytest.mark.parametrize("part", [False, True])
def test_a_model_that_is_wrapped_already_is_refused(pair, new_optimizer, part):
    def wrap(rank):
        model = Tower()
        optimizer = sgd(model)
        zeroify(model.blocks[0] if part else model, sgd(model.blocks[0]) if part else optimizer)
        zeroify(model, torch.optim.SGD(model.parameters(), lr=0.1) if new_optimizer else optimizer)

    check_refused(pair, wrap, "ValueError|RuntimeError", "once|wrap")


def test_units_that_are_nested_foreign_or_named_twice_are_refused(pair):
    def check(choose, *expected):
        check_refused(pair, lambda rank: wrap_with_units(choose), "ValueError", *expected)

    check(lambda model: [model.blocks[1][0], model.blocks[1]], r"blocks\.1\.0", r"blocks\.1\b")
    check(lambda model: [nn.Linear(2, 2)], r"Linear\b.*Tower\b")
    check(lambda model: [model.blocks[1][:1]], r"Sequential\b.*Tower\b.*list\(slice\)")
    check(lambda model: [None], r"NoneType\b.*Tower\b")
    check(lambda model: [[model.blocks[0]], []], "empty")
    check(lambda model: [[model.blocks[0], model.blocks[1]], [model.blocks[1][0]]], r"blocks\.1\.0")
    check(lambda model: [model.blocks[0], model.blocks[0]], r"blocks\.0", "twice")


def test_units_may_be_slices_of_a_list_or_come_from_a_generator():
    def names(choose) -> list[str]:
        model = Tower()
        return [unit.name for unit in zeroify(model, sgd(model), units=choose(model), comm=Absent(0, 2)).units]

    assert names(lambda model: [model.blocks[:2], model.blocks[2:]]) == ["root", "blocks.0 to blocks.1", "blocks.2"]
    assert names(lambda model: ([block] for block in model.blocks[:2])) == ["root", "blocks.0", "blocks.1"]


WRONG_ARGUMENTS = {
    "offload by nothing": ({"offload": ""}, ["offload", "'host'", "None", "''"]),
    "offload by yes": ({"offload": True}, ["offload", "'host'", "None", "True"]),
    "dtype by name": ({"dtype": "bf16"}, ["dtype", "torch.bfloat16", "'bf16'"]),
    "whole numbers": ({"dtype": torch.int32}, ["dtype", "torch.int32"]),
    "a scale without its rules": ({"scaler": 4.0}, [r"LossScaler\(scale=4.0\)", r"\b4\.0\b"]),
    "a unit that is no list": ({"units": nn.Linear(2, 2)}, ["units", "list", "Linear"]),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_an_argument_of_another_kind_is_refused(pair, name):
    arguments, expected = WRONG_ARGUMENTS[name]

    def wrap(rank):
        model = Tower()
        zeroify(model, sgd(model), stage=2, **arguments)

    check_refused(pair, wrap, "ValueError", *expected)


def test_a_rank_outside_the_group_is_refused(pair):
    def wrap(rank):
        group = dist.new_group([0])
        if rank == 1:
            zeroify(Tower(), sgd(Tower()), group=group)

    nothing, said = pair.run(complaint, wrap)
    assert nothing == "" and tells(said, "RuntimeError", "rank 1", "group", "zeroify()")


def tied_by_data() -> nn.Module:
    model = with_layer(nn.ModuleDict({"head": nn.Linear(2, 3), "embedding": nn.Embedding(3, 2)}))
    model.extra["head"].weight.data = model.extra["embedding"].weight.data
    return model


WRONG_MODELS = {
    "one memory": (tied_by_data, ["extra.head.weight", "extra.embedding.weight", "one parameter"]),
    "meta": (lambda: with_layer(nn.Linear(2, 2, device="meta")), ["extra.weight", "meta"]),
    "meta buffer": (lambda: with_layer(nn.BatchNorm1d(2, affine=False, device="meta")), ["extra.running_mean", "meta"]),
    "sparse": (lambda: with_layer(nn.Embedding(4, 2, sparse=True)), ["extra.weight", "sparse=True", "sparse=False"]),
    "max_norm": (
        lambda: with_layer(nn.Embedding(4, 2, max_norm=1.0)),
        ["extra.weight", "max_norm=1.0", "max_norm=None"],
    ),
    "max_norm bag": (lambda: with_layer(nn.EmbeddingBag(4, 2, max_norm=1.0)), ["extra.weight", "Bag", "max_norm=None"]),
    "sparse bag": (lambda: with_layer(nn.EmbeddingBag(4, 2, sparse=True)), ["extra.weight", "Bag", "sparse=False"]),
    "complex": (lambda: with_layer(nn.Linear(2, 2, dtype=torch.complex64)), ["extra.weight", "complex64"]),
    "integers": (
        lambda: with_layer(nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)])),
        ["extra.0", "int64"],
    ),
    "two dtypes": (
        lambda: with_layer(nn.Linear(2, 2, dtype=torch.float64)),
        ["float32", "extra", "float64"],
    ),
    "lazy": (lambda: with_layer(nn.LazyLinear(3)), ["extra.weight", "lazy"]),
    "nothing to train": (lambda: Tower().requires_grad_(False), ["Tower"]),
    "no parameters": (lambda: nn.Sequential(nn.ReLU()), ["Sequential"]),
}


@pytest.mark.parametrize("name", WRONG_MODELS)
def test_a_model_that_cannot_be_flattened_is_refused(pair, row, name):
    build, expected = WRONG_MODELS[name]

    def wrap(rank):
        model = build()
        zeroify(model, torch.optim.SGD([{"params": list(model.parameters())}], lr=0.1))

    for said in check_refused(pair, wrap, "ValueError", *expected):
        error, _, says = said.partition(": ")
        row("models", f"refused: {name}", result=error, says=says)


def test_batch_norm_is_refused_in_16_bits_if_torch_cannot_compute_it_and_trains_if_it_can(pair):
    def train(affine: bool, precision: torch.dtype | None, whole: bool) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, affine=affine), nn.Linear(2, 2))
        model = model.bfloat16() if whole else model  # its statistics too
        zero = zeroify(model, sgd(model), dtype=precision)
        model(torch.randn(4, 3, dtype=zero.master_dtype)).sum().backward()

    for precision in (torch.bfloat16, torch.float16):
        expected = ["BatchNorm1d '1'", str(precision), "float32", "leave dtype out", "affine=False"]
        check_refused(pair, lambda rank, precision=precision: train(True, precision, False), "ValueError", *expected)
    assert pair.run(complaint, lambda rank: train(False, torch.bfloat16, False)) == ["", ""]
    assert pair.run(complaint, lambda rank: train(True, None, False)) == ["", ""]
    assert pair.run(complaint, lambda rank: train(True, None, True)) == ["", ""]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_a_model_on_two_devices_is_refused(pair):
    check_refused(
        pair, lambda rank: wrap_tower(with_layer(nn.Linear(2, 2, device="cuda"))), "cpu", "cuda", "one device"
    )


def test_a_refused_model_and_its_optimizer_are_as_they_were(pair):
    def attempt() -> bool:
        model = with_layer(nn.Embedding(4, 2, sparse=True))
        optimizer = sgd(model)
        before = copy.deepcopy(model.state_dict())
        for options in ({"stage": 4}, {}, {"units": [nn.Linear(2, 2)]}):
            with pytest.raises(ValueError):
                zeroify(model, optimizer, **options)
        assert all(type(param) is nn.Parameter for param in model.parameters())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert optimizer.param_groups[0]["params"] == list(model.parameters())
        model.extra = None
        optimizer = sgd(model)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return not torch.equal(model.enter.weight, before["enter.weight"])

    assert all(pair.run(attempt))


# --- ranks that differ --------------------------------------------------------------------------------


def renamed() -> nn.Module:
    model = Tower()
    model.middle = model.blocks
    del model.blocks
    return model


def frozen() -> nn.Module:
    model = Tower()
    model.blocks[1][0].bias.requires_grad_(False)
    return model


def with_a_buffer() -> nn.Module:
    model = Tower()
    model.register_buffer("mask", torch.ones(3))
    return model


RANK_1_DIFFERS = {
    "shape": (lambda: Tower(width=5), ["enter.weight", r"\(4, 2\)", r"\(5, 2\)", "rank 0", "rank 1"]),
    "name": (renamed, ["blocks.0.0.weight", "middle.0.0.weight", "rank 0", "rank 1"]),
    "count": (lambda: Tower(depth=4), ["blocks.3.0.weight", "rank 0", "rank 1"]),
    "frozen": (frozen, ["blocks.1.0.bias", "frozen", "rank 0", "rank 1"]),
    "dtype": (lambda: Tower().double(), ["enter.weight", "float32", "float64", "rank 0", "rank 1"]),
    "buffer": (with_a_buffer, ["'mask'", "rank 0", "rank 1"]),
}


@pytest.mark.check
@pytest.mark.parametrize("name", RANK_1_DIFFERS)
def test_ranks_that_built_different_models_are_refused(pair, name):
    build, expected = RANK_1_DIFFERS[name]

    def wrap(rank):
        model = build() if rank == 1 else Tower()
        zeroify(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))

    check_refused(pair, wrap, "ValueError", "ranks", *expected)


def test_ranks_that_split_parameters_into_different_groups_are_refused(pair):
    def by(split):
        def wrap(rank):
            model = Tower()
            first, second = split(list(model.parameters()), rank)
            zeroify(model, torch.optim.SGD([{"params": first}, {"params": second, "weight_decay": 0.1}], lr=0.1))

        return wrap

    other_sizes = by(lambda params, rank: (params[: 4 + rank], params[4 + rank :]))
    other_members = by(lambda params, rank: (params[rank::2], params[1 - rank :: 2]))
    check_refused(pair, other_sizes, "ValueError", "blocks.0.0.weight", "group 1", "group 0", "rank 0", "rank 1")
    check_refused(pair, other_members, "ValueError", "group", "rank 0", "rank 1")


ONE_RANK_IS_WRONG = {
    "sparse": lambda rank: wrap_tower(with_layer(nn.Embedding(4, 2, sparse=rank == 1))),
    "lazy": lambda rank: wrap_tower(with_layer(nn.LazyLinear(3) if rank == 1 else nn.Linear(3, 3))),
    "optimizer": lambda rank: wrap_tower(optimizer=WHOLE_TENSORS["Adafactor"] if rank == 1 else sgd),
    "group": lambda rank: wrap_tower(optimizer=lambda model: torch.optim.SGD(list(model.parameters())[rank:], lr=0.1)),
    "stage": lambda rank: wrap_tower(stage=2 + 2 * rank),
    "units": lambda rank: wrap_with_units(lambda model: [nn.Linear(2, 2) if rank == 1 else model.blocks[0]]),
}


@pytest.mark.check
@pytest.mark.parametrize("name", ONE_RANK_IS_WRONG)
def test_one_wrong_rank_is_named_by_all_ranks(pair, name):
    said = pair.run(complaint, ONE_RANK_IS_WRONG[name])
    assert all(said), said
    reason = said[1].removeprefix("ValueError: ").removeprefix("rank 1: ")
    assert said[0] == f"ValueError: rank 1: {reason}"


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


RANKS_DISAGREE = {
    "stage": (lambda rank: wrap_tower(stage=1 + rank), ["1", "2"]),
    "dtype": (lambda rank: wrap_tower(dtype=[torch.float32, torch.bfloat16][rank]), ["float32", "bfloat16"]),
    "scaler": (lambda rank: wrap_tower(scaler=LossScaler(scale=2.0**rank)), ["scale=1.0", "scale=2.0"]),
    "units": (lambda rank: wrap_with_units(lambda model: list(model.blocks)[rank:]), [r"blocks\.0"]),
    "optimizer": (lambda rank: wrap_tower(optimizer=[sgd, adamw][rank]), ["SGD", "AdamW"]),
}


@pytest.mark.parametrize("what", RANKS_DISAGREE)
def test_ranks_that_call_zeroify_with_different_arguments_are_refused(pair, what):
    wrap, expected = RANKS_DISAGREE[what]
    check_refused(pair, wrap, "ValueError", what, "rank 0", "rank 1", *expected)


# --- what the training loop refuses -------------------------------------------------------------------


class Loop:
    """A wrapped tower in training."""

    def __init__(self, **options):
        torch.manual_seed(0)
        self.model = Tower()
        self.optimizer = sgd(self.model, weight_decay=0.1)
        self.zero = zeroify(self.model, self.optimizer, **options)

    def loss(self, step: int = 0) -> torch.Tensor:
        return self.model(torch.randn(4, 2, generator=torch.Generator().manual_seed(step))).sin().mean()

    def train(self, *steps: int) -> list[torch.Tensor]:
        for step in steps:
            self.optimizer.zero_grad()
            self.loss(step).backward()
            self.optimizer.step()
        return [value.detach().clone() for value in self.model.state_dict().values()]


def step_with_gradients_under_full_params(loop):
    with loop.zero.full_params():
        loop.optimizer.step()


# operation -> what the error says. The gradients of a backward are there when it is tried.
REFUSED = {
    "read .grad": (lambda loop: loop.model.enter.weight.grad, r"full_params\(grads=True\)"),
    "torch's clip_grad_norm_": (
        lambda loop: nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0),
        r"zero\.clip_grad_norm_\(\)",
    ),
    "torch's clip_grad_value_": (
        lambda loop: nn.utils.clip_grad_value_(loop.model.parameters(), 1.0),
        r"full_params\(grads=True\)",
    ),
    "half": (lambda loop: loop.model.half(), r"before zeroify\(\)|full_params"),
    "to dtype": (lambda loop: loop.model.to(torch.float64), r"before zeroify\(\)|full_params"),
    "double of a submodule": (lambda loop: loop.model.blocks[1].double(), r"before zeroify\(\)|full_params"),
    "deepcopy": (lambda loop: copy.deepcopy(loop.model), r"model\.state_dict\(\)"),
    "deepcopy of a block": (lambda loop: copy.deepcopy(loop.model.blocks[1]), r"model\.state_dict\(\)"),
    "pickle": (lambda loop: pickle.dumps(loop.model.blocks), r"model\.state_dict\(\)"),
    "load_state_dict(assign=True)": (
        lambda loop: loop.model.load_state_dict(loop.model.state_dict(), assign=True),
        "assign=False",
    ),
    "add_param_group": (
        lambda loop: loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        r"before zeroify\(\)",
    ),
    "optimizer.state_dict": (lambda loop: loop.optimizer.state_dict(), r"zero\.state_dict\(\)"),
    "optimizer.load_state_dict": (
        lambda loop: loop.optimizer.load_state_dict(sgd(Tower()).state_dict()),
        r"zero\.load_state_dict\(\)",
    ),
    "a step with gradients under full_params": (step_with_gradients_under_full_params, r"full_params\(\)"),
    "a state of another model": (
        lambda loop: loop.zero.load_state_dict({"model": loop.model.state_dict(), "optimizer": {"other": {}}}),
        "enter.weight.*other",
    ),
}


def try_operation(stage: int, operation: Callable, with_grads: bool) -> tuple[str, list, list]:
    """(what the error says, the model after it and one more step, the model after two steps without it)."""
    undisturbed = Loop(stage=stage).train(0, 1)
    loop = Loop(stage=stage)
    loop.train(0)
    if not with_grads:
        loop.optimizer.zero_grad()
    try:
        operation(loop)
        return "", [], []
    except Exception as error:
        return f"{type(error).__name__}: {error}", loop.train(1), undisturbed


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_mislead_is_refused_with_the_remedy_and_harms_nothing(pair, row, name, stage):
    operation, remedy = REFUSED[name]
    with_grads = ("grad" in name) or ("dict" in name)
    for said, after, undisturbed in pair.run(try_operation, stage, operation, with_grads):
        assert re.search(remedy, said), said or "accepted"
        error, _, says = said.splitlines()[0].partition(": ")
        row("models", f"refused: {name}", stage, result=error, says=says)
        assert all(torch.equal(own, expected) for own, expected in zip(after, undisturbed, strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_create_graph_is_refused_as_not_supported(pair, stage):
    def attempt(rank):
        Loop(stage=stage).loss().backward(create_graph=True)

    check_refused(pair, attempt, "RuntimeError", "create_graph=True")


@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_after_no_sync_alone_is_refused_and_can_be_made_good(pair, stage):
    def attempt() -> tuple[str, list, list]:
        expected, loop = Loop(stage=stage), Loop(stage=stage)
        for each in (expected, loop):
            with each.zero.no_sync():
                each.loss(0).backward()
        said = complaint(lambda rank: loop.optimizer.step())
        for each in (expected, loop):
            each.loss(1).backward()
            each.optimizer.step()
        return said, loop.train(), expected.train()

    for said, own, expected in pair.run(attempt):
        assert tells(said, "no_sync()")
        assert all(torch.equal(one, other) for one, other in zip(own, expected, strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_a_sparse_gradient_that_no_module_announced_is_refused(pair, stage):
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(5, 2))

        def forward(self, ids):
            return F.embedding(ids, self.table, sparse=True)

    def attempt(rank):
        model = Lookup()
        optimizer = sgd(model)
        zeroify(model, optimizer, stage=stage)
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    check_refused(pair, attempt, "sparse")


def test_the_optimizers_that_are_said_to_be_safe_are_the_ones_tested_here():
    assert sorted(checks.ELEMENTWISE) == sorted(ELEMENTWISE)


def test_every_refusal_is_the_same_at_every_stage(pair):
    def wrap(stage):
        return lambda rank: wrap_tower(with_layer(nn.Embedding(4, 2, sparse=True)), stage=stage)

    said = [pair.run(complaint, wrap(stage)) for stage in STAGES]
    assert len(set(itertools.chain(*said))) == 1
