"""Checkpointing changes memory and nothing else: values, gradients, random numbers, the wire and errors stay.

pytest -m gpu tests/activations/test_activations.py      # one CUDA device: what only it can show
"""

import contextlib
import copy
import gc
import itertools
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from models import ZOO, Case, Checkpointed, CheckpointInCheckpoint
from parity import Loop, exactly, parity
from says import naming
from test_memory_recorder import Tower
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from zero_mini.activations.checkpointing import checkpoint, checkpoint_blocks
from zero_mini.activations.kept_outputs import ATTENTION
from zero_mini.activations.on_host import HostMemory
from zero_mini.binding.units import merge_blocks
from zero_mini.memory.formulas import PlainTraining
from zero_mini.memory.fragmentation import Arena
from zero_mini.memory.recorder import Recorder
from zero_mini.trainer.gpt import GPT, Block, GPTConfig
from zero_mini.zeroify import zeroify

pytestmark = pytest.mark.filterwarnings("ignore:checkpoint. outputs_of keeps nothing")

CONFIG = GPTConfig(L=5, d=16, heads=2, vocab=19, T=8, dropout=0.3)


def plain(function, *args, **kwargs):
    return function(*args, **kwargs)


class LateCopies(HostMemory):
    """Copies run when they are waited for, and no sooner: what does not wait reads NaN."""

    def copy(self, parcel, sources, targets):
        for target in targets:
            target.fill_(torch.nan)
        parcel.arrived = sources, targets
        self.in_transit = parcel

    def wait(self, parcel):
        sources, targets = parcel.arrived
        for source, target in zip(sources, targets):
            target.copy_(source)
        parcel.arrived = (), ()


PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
THEIRS = {
    "torch": partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "torch, re-entrant": partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
}
OURS = {
    "ours": checkpoint,
    "ours, on the host": partial(checkpoint, host=HostMemory()),
    "ours, on a late host": partial(checkpoint, host=LateCopies()),
    "ours, products kept": partial(checkpoint, outputs_of=PRODUCTS),
}
ON_GPU = {name: OURS[name] for name in ("ours", "ours, on the host", "ours, products kept")}


def same(ones, others) -> bool:
    return len(ones) == len(others) and all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(ones, others)
    )


def small(width: int = 6, hidden: int = 9) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.3), nn.Linear(hidden, width)
    )


# --- equal to a plain call, and to torch's checkpoint --------------------------------------------------------


def three_blocks(way, model, x):
    for block in model[:3]:
        x = x + way(block, x)
    return model[3](x)


def one_in_another(way, model, x):
    """The second block is checkpointed three times over."""

    def inner(x):
        return x + way(model[1], torch.tanh(x))

    def middle(x):
        return way(inner, model[0](x)) * torch.rand(6, device=x.device)

    return way(lambda x: model[2](way(middle, x)), x) + model[3](x)


def shared_block(way, model, x):
    return way(model[0], way(model[1], way(model[0], x)))


def outcome(program, way, autocast=False, training=True, device="cpu") -> list[torch.Tensor]:
    """The loss, all gradients, and random numbers from between forward and backward and from after."""
    torch.manual_seed(0)
    model = nn.ModuleList(small() for _ in range(4)).to(device).train(training)
    x = torch.randn(5, 6, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        loss = program(way, model, x).float().square().sum()
    between = torch.rand(3), torch.rand(3, device=device)
    loss.backward()
    after = torch.rand(3), torch.rand(3, device=device)
    return [loss.detach(), x.grad, *(param.grad for param in model.parameters()), *between, *after]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of torch's re-entrant
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("program", [three_blocks, one_in_another, shared_block])
def test_losses_gradients_and_random_numbers_are_those_of_a_plain_call_and_of_torchs(program, autocast, training):
    ways = OURS | THEIRS | {"plain": plain}
    if autocast and program is shared_block:  # it adds the two parts of a gradient in fp32, and not as bf16
        del ways["torch, re-entrant"]
    runs = {name: outcome(program, way, autocast, training) for name, way in ways.items()}
    for name, run in runs.items():
        assert same(runs["ours"], run), name


def test_autocast_in_backward_does_not_reach_the_second_run():
    def gradients(way, autocast_forward, autocast_backward):
        torch.manual_seed(0)
        block, x = small(), torch.randn(5, 6, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast_forward):
            loss = way(block, x).float().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast_backward):
            loss.backward()
            assert torch.is_autocast_enabled("cpu") is autocast_backward
        return [x.grad, *(param.grad for param in block.parameters())]

    for forward in (True, False):
        assert same(gradients(checkpoint, forward, not forward), gradients(THEIRS["torch"], forward, not forward))


def test_a_cast_weight_is_not_taken_from_before_an_update():
    block = nn.Linear(6, 6)
    x = torch.randn(5, 6)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = checkpoint(block, x).float().square().sum()
        expected = (x.bfloat16() @ block.weight.detach().bfloat16().T + block.bias.detach().bfloat16()).float()
        assert torch.allclose(loss, expected.square().sum(), rtol=1e-2)
        loss.backward()
        with torch.no_grad():
            block.weight.mul_(3)


@pytest.mark.parametrize("cache", [True, False])
def test_whether_autocast_keeps_cast_weights_is_restored(cache):
    seen = []

    def function(x):
        seen.append(torch.is_autocast_cache_enabled())
        return x.sin().cos()

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        y = checkpoint(function, torch.ones(2, requires_grad=True))
    y.sum().backward()
    assert seen == [cache, cache]


def structured(pair, more, flag, *, mask, factor=1.0, nothing=None):
    """Nested arguments of many kinds in; a dict with a tuple, integers and None out."""
    first, (second, third) = pair
    y = (first * second).sin() * factor if flag else first
    y = torch.where(mask, y, more["scale"] * third) * torch.rand(4)
    return {"y": y, "pair": (y.exp(), [first.detach()]), "integers": mask.long(), "nothing": nothing, "flag": flag}


@pytest.mark.parametrize("way", OURS.values())
def test_arguments_and_results_may_be_nested_and_of_any_kind(way):
    def run(way):
        torch.manual_seed(0)
        first, second, scale = (torch.randn(4, requires_grad=True) for _ in range(3))
        pair, more = (first * 1, [second * 2, torch.randn(4)]), {"scale": scale, "name": "a string"}
        result = way(structured, pair, more, True, mask=torch.tensor([True, False, True, False]), factor=0.5)
        assert list(result) == ["y", "pair", "integers", "nothing", "flag"] and result["flag"] is True
        assert result["integers"].dtype == torch.int64 and result["nothing"] is None
        assert not result["integers"].requires_grad and not result["pair"][1][0].requires_grad
        # Their gradients arrive in another order than the results were made.
        (result["pair"][0].sum() + 3 * result["y"].sum()).backward()
        return [result["y"].detach(), result["integers"], first.grad, second.grad, scale.grad, torch.rand(2)]

    assert same(run(way), run(plain))


@pytest.mark.parametrize("way", OURS.values())
def test_parameters_get_gradients_also_if_no_input_requires_one(way):
    def run(way):
        torch.manual_seed(0)
        embedding, block, ids = nn.Embedding(7, 6), small(), torch.tensor([3, 1, 6])
        way(lambda ids: block(embedding(ids)), ids).sum().backward()
        return [param.grad for param in (*embedding.parameters(), *block.parameters())]

    assert same(run(way), run(plain)) and all(grad is not None for grad in run(way))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_calls_through(context):
    x, more, seen = torch.ones(2), {"a": torch.ones(2)}, []

    def function(*args, **kwargs):
        seen.append((args, kwargs))
        args[0].add_(1)  # nothing runs again, so it may
        return args

    with context(), saved_tensors_hooks(pytest.fail, pytest.fail):
        assert checkpoint(function, x, more=more)[0] is x
    ((args, kwargs),) = seen
    assert args[0] is x and kwargs["more"] is more


def test_tensors_of_inference_mode_and_of_functions_that_need_no_gradient_are_welcome():
    with torch.inference_mode():
        mask = torch.ones(4)
    x = torch.ones(4, requires_grad=True)
    checkpoint(lambda x, mask: x.sin() + mask, x, mask).sum().backward()
    assert torch.equal(x.grad, torch.ones(4).cos())
    assert not checkpoint(torch.sin, torch.ones(4)).requires_grad


# --- more than one backward ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", OURS.values())
def test_a_second_backward_needs_retain_graph_as_everywhere(way):
    torch.manual_seed(0)
    block, x = small(), torch.randn(5, 6)
    loss = way(block, x * torch.ones(1, requires_grad=True)).square().sum()
    loss.backward(retain_graph=True)
    once = [param.grad.clone() for param in block.parameters()]
    loss.backward()
    assert same([param.grad for param in block.parameters()], [2 * grad for grad in once])
    with pytest.raises(RuntimeError, match="retain_graph"):
        loss.backward()


@pytest.mark.parametrize("way", OURS.values())
def test_gradients_can_be_asked_for_without_a_backward_in_part_and_of_gradients(way):
    def run(way):
        torch.manual_seed(0)
        block, x = small(), torch.randn(5, 6, requires_grad=True)
        y = way(lambda x: way(block, x * 2) + x, x * 1)
        (part,) = torch.autograd.grad(y.sum(), block[4].weight, retain_graph=True)  # leaves most of it untouched
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        assert all(param.grad is None for param in block.parameters())
        grad.square().sum().backward()
        return [part, grad.detach(), x.grad, *(param.grad for param in block.parameters())]

    assert same(run(way), run(plain))


def test_a_function_may_take_gradients_inside():
    def force(x):
        (grad,) = torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)
        return grad.tanh()

    def run(way):
        x = torch.arange(4.0, requires_grad=True)
        way(force, x * 2).sum().backward()
        return [x.grad]

    assert same(run(checkpoint), run(plain))


# --- what cannot be right raises -----------------------------------------------------------------------------


def activation(*shape: int) -> torch.Tensor:
    """Something that the graph computed."""
    return torch.ones(shape, requires_grad=True) * 2


@pytest.mark.parametrize("way", OURS.values())
@pytest.mark.parametrize("deep", [False, True])
def test_an_input_that_is_changed_before_backward_raises(way, deep):
    x = activation(3, 4)
    argument = {"a": [x]} if deep else x
    loss = way(lambda a: (a["a"][0] if deep else a).sin().cos(), argument).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match=naming("(3, 4)", 0, 1, "clone()")):
        loss.backward()


def test_an_integer_input_that_is_changed_before_backward_raises():
    ids, table = torch.tensor([0, 1]), torch.ones(3, 2, requires_grad=True)
    loss = checkpoint(lambda ids: table[ids].sin(), ids).sum()
    ids[0] = 2
    with pytest.raises(RuntimeError, match=naming("(2,)", "torch.int64", "cpu")):
        loss.backward()


@pytest.mark.parametrize("way", OURS.values())
def test_a_function_that_changes_its_input_raises_at_once(way):
    with pytest.raises(RuntimeError, match=naming("(2,)", "clone()")):
        way(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2)), activation(2))


def test_a_parameter_that_is_changed_before_backward_raises():
    block, x = small(), activation(5, 6)
    loss = checkpoint(block, x).sum()
    with torch.no_grad():
        block[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match=naming("(6, 9)", 1, 2)):
        loss.backward()


def test_a_saved_result_that_the_function_changes_raises_as_without_checkpointing():
    def function(x):
        y = x.exp()
        return y.mul_(2).sin()

    for way in (plain, checkpoint):
        loss = way(function, activation(2)).sum()
        with pytest.raises(RuntimeError, match="in.?place"):
            loss.backward()


def test_a_second_run_that_saves_other_tensors_is_told_both():
    def function(x):
        return x[: sizes.pop()].sin()

    sizes = [2, 3]
    loss = checkpoint(function, activation(4)).sum()
    with pytest.raises(RuntimeError, match=naming("(3,)", "(2,)", "torch.float32")):
        loss.backward()

    def other_dtype(x):
        return x.to(dtypes.pop()).sin()

    dtypes = [torch.float64, torch.float32]
    loss = checkpoint(other_dtype, activation(4)).sum()
    with pytest.raises(RuntimeError, match=naming("(4,)", "torch.float32", "torch.float64")):
        loss.backward()

    class Cache(list):
        """Of keys, as transformers' models have one unless they are called with use_cache=False."""

    def attend(x, past_key_values):
        past_key_values.append(x)
        return torch.outer(x, torch.cat([*past_key_values]))

    for wrong in (attend, lambda x, past_key_values: x if past_key_values else attend(x, past_key_values)):
        loss = checkpoint(wrong, activation(4), past_key_values=Cache()).sum()
        with pytest.raises(RuntimeError, match=naming("second run", "Cache", "use_cache=False")):
            loss.backward()


def test_a_second_run_that_saves_fewer_tensors_is_told_both_numbers():
    def function(x):
        for _ in range(times.pop()):
            x = x.sin()
        return x

    times = [2, 5]
    loss = checkpoint(function, activation(4)).sum()
    with pytest.raises(RuntimeError, match=naming(5, 2)):
        loss.backward()


def test_an_error_of_the_function_is_its_own_both_times():
    def function(x):
        if fails.pop():
            raise KeyError("mine")
        return x.sin().cos()

    fails = [True]
    with pytest.raises(KeyError, match="mine"):
        checkpoint(function, activation(2))
    fails = [True, False]
    loss = checkpoint(function, activation(2)).sum()
    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="mine"):
        loss.backward()
    assert not fails and torch.equal(before, torch.get_rng_state())


# --- memory and time -----------------------------------------------------------------------------------------


def kept_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """What forward leaves in the graph, in distinct storages, parameters not counted."""
    kept = {}
    own = {param.untyped_storage()._cdata for param in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(x)
    assert output.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def test_only_the_inputs_of_checkpointed_blocks_are_kept():
    x, one = torch.ones(64, 32), 4 * 64 * 32
    block = one + 2 * 4 * 64 + 4 * one + 4 * one  # the norm's output and statistics, up's output and gelu's
    for every, checkpointed in ((1, 6), (2, 3), (4, 2), (9, 1)):
        tower = Tower(width=32, depth=6)
        assert len(checkpoint_blocks(tower, every)) == checkpointed
        # Beside them a norm keeps its input, so all six inputs are kept in any case.
        assert kept_bytes(tower, x) == 6 * one + (6 - checkpointed) * block
    tower = Tower(width=32, depth=6)
    checkpoint_blocks(tower, keep="host")
    assert kept_bytes(tower, x) == one  # the model's input, which no graph computed


def test_attention_runs_once_if_its_outputs_are_kept_and_gradients_are_torchs():
    class Calls(TorchDispatchMode):
        attention = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.attention += operator in ATTENTION
            return operator(*args, **(kwargs or {}))

    def run(way):
        torch.manual_seed(0)
        block, x = Block(replace(CONFIG, dropout=0.0)), torch.randn(3, 8, 16, requires_grad=True)
        with Calls() as calls:
            way(block, x).square().sum().backward()
        return calls.attention, [x.grad, *(param.grad for param in block.parameters())], partial(way, block)

    contexts = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, list(ATTENTION))
    ours, theirs = partial(checkpoint, outputs_of=ATTENTION), partial(THEIRS["torch"], context_fn=contexts)
    (once, grads, call), (twice, _, recomputing), (torchs, expected, _) = map(run, (ours, checkpoint, theirs))
    assert (once, twice, torchs) == (1, 2, 1) and same(grads, expected)
    x = torch.randn(3, 8, 16, requires_grad=True)
    kept = [live_bytes_of(partial(function, x)) for function in (call, recomputing)]
    assert kept[0] - kept[1] == 4 * (3 * 8 * 16 + 3 * 2 * 8)  # attention's output, and a sum a head and position


def live_bytes_of(call) -> int:
    """Bytes of the tensors that are alive because of a call's result, beside those that were there before."""

    def storages():
        gc.collect()
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}

    before = storages()
    output = call()
    after = storages()
    assert output.requires_grad
    return sum(nbytes for storage, nbytes in after.items() if storage not in before)


def test_outputs_that_cannot_be_kept_are_refused_or_named():
    x = torch.ones(4, 4, requires_grad=True)
    wrong = [[torch.ops.aten.native_dropout.default], [torch.ops.aten.mm], ["attention"], ATTENTION[0], None]
    for operators in wrong:
        with pytest.raises(ValueError, match=naming("outputs_of")):
            checkpoint(torch.sin, x, outputs_of=operators)
        with pytest.raises(ValueError, match=naming("outputs_of")):
            checkpoint_blocks(GPT(CONFIG), outputs_of=operators)
    with pytest.warns(UserWarning, match="outputs_of"):
        checkpoint(torch.sin, x, outputs_of=PRODUCTS)
    loss = checkpoint(lambda x: (x @ x).mul_(2).sin().sum(), x, outputs_of=PRODUCTS)
    with pytest.raises(RuntimeError, match=naming("aten.mm.default", "clone()")):
        loss.backward()
    other = [torch.mm, torch.addmm]
    loss = checkpoint(lambda x: other.pop(0)(*[x] * (2 + (len(other) == 0))).sin().sum(), x, outputs_of=PRODUCTS)
    with pytest.raises(RuntimeError, match=naming("aten.mm.default", "aten.addmm.default")):
        loss.backward()


def test_one_block_at_a_time_is_computed_again_and_freed_as_backward_goes():
    width, depth, batch = 32, 6, 64
    one = 4 * batch * width
    block = one + 2 * 4 * batch + 4 * one + 4 * one
    with Recorder() as recorder:
        model = Tower(width, depth)
        recorder.follow(PlainTraining(model, torch.optim.SGD(model.parameters())))
        checkpoint_blocks(model)
        x = torch.ones(batch, width, requires_grad=True)
        recorder.mark("forward")
        loss = model(x).sum()
        recorder.mark("backward")
        loss.backward()
        recorder.mark("end")
        left = recorder.live_bytes()
    inputs = (depth - 1) * one + 4  # the first is not born in forward; the loss
    series = recorder.timeline()["activations"]
    _, backward = recorder.moments[-2]
    assert series[backward - 1] == inputs
    assert series[-1] == 4
    assert inputs + block <= max(series[backward:]) <= inputs + block + 2 * one + (depth + 1) * 5056  # random states
    assert left == 2 * recorder.peak()["parameters"] + 2 * one + 4


@pytest.mark.parametrize("keep, outputs_of", [("device", ()), ("host", ()), ("device", PRODUCTS)])
def test_nothing_outlives_its_backward_and_no_garbage_collection_is_needed(keep, outputs_of):
    model, x = nn.Sequential(*(small() for _ in range(3))), torch.randn(5, 6, requires_grad=True)
    checkpoint_blocks(model, keep=keep, outputs_of=outputs_of)
    born = []
    for block in model:
        block[1].register_forward_hook(lambda module, args, output: born.append(weakref.ref(output)))
        block.register_forward_pre_hook(lambda module, args: born.append(weakref.ref(args[0])))
    gc.collect()
    gc.disable()
    try:
        model(x).sum().backward()
        assert len(born) == 3 * 3 and [tensor() for tensor in born if tensor() is not None] == [x]
        model(x)  # and no backward
        assert [tensor() for tensor in born if tensor() is not None] == [x, x]
    finally:
        gc.enable()


def test_an_inner_checkpoints_inputs_are_not_kept_by_the_outer_one():
    alive = []

    def inner(x):
        return x.sin().cos()

    def outer(x):
        h = x.exp().tanh()
        alive.append(weakref.ref(h))
        return checkpoint(inner, h)

    loss = checkpoint(outer, activation(4)).sum()
    assert alive[0]() is None
    loss.backward()
    assert len(alive) == 2 and alive[1]() is None


def test_the_second_run_comes_once_for_each_backward_and_ends_at_the_last_saved_tensor():
    begun, ended = [], []

    def function(x):
        begun.append(x)
        y = x.sin().cos() + 1
        ended.append(y)
        return y

    x = activation(4)
    loss = checkpoint(function, x).sum()
    assert (len(begun), len(ended)) == (1, 1)
    loss.backward(retain_graph=True)
    assert (len(begun), len(ended)) == (2, 1)
    loss.backward()
    assert (len(begun), len(ended)) == (3, 1)


def test_the_second_run_of_a_block_without_dropout_leaves_out_its_last_matrix_product():
    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten.addmm.default  # of a layer with a bias; backward's are mm
            return func(*args, **(kwargs or {}))

    for dropout, counted in ((0.0, 4 + 3), (0.3, 4 + 4)):
        block, x = Block(replace(CONFIG, dropout=dropout)), activation(2, 8, 16)
        with Products() as products:
            checkpoint(block, x).sum().backward()
        assert products.count == counted


@pytest.mark.parametrize("outputs_of", [(), ATTENTION], ids=["nothing kept", "attention kept"])
def test_what_is_checkpointed_may_be_compiled(outputs_of):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    results = []
    for compiling in (False, True):
        torch.manual_seed(0)
        model = GPT(replace(CONFIG, dropout=0.0))
        for block in model.blocks:
            if compiling:
                block.forward = torch.compile(block.forward, backend=counter)
        checkpoint_blocks(model, outputs_of=outputs_of)
        model(torch.zeros(2, 8, dtype=torch.long)).square().sum().backward()
        results.append([param.grad for param in model.parameters()])
    assert counter.frame_count == 1
    for grad, compiled in zip(*results):
        torch.testing.assert_close(grad, compiled)


@pytest.mark.parametrize("outputs_of", [(), ATTENTION], ids=["nothing kept", "attention kept"])
def test_what_is_compiled_may_have_checkpoints_inside(outputs_of):
    torch._dynamo.reset()
    results = []
    for compiling in ("nothing", "each block", "the model"):
        torch.manual_seed(0)
        model = GPT(replace(CONFIG, dropout=0.0))
        checkpoint_blocks(model, outputs_of=outputs_of)
        for block in model.blocks if compiling == "each block" else ():
            block.compile(backend="aot_eager")
        called = torch.compile(model, backend="aot_eager") if compiling == "the model" else model
        called(torch.zeros(2, 8, dtype=torch.long)).square().sum().backward()
        results.append([param.grad for param in model.parameters()])
    for grad, *compiled in zip(*results):
        for other in compiled:
            torch.testing.assert_close(grad, other)


def test_a_function_that_catches_every_exception_does_not_go_on_for_it():
    ended = []

    def function(x):
        try:
            x = x.sin()
        except Exception:
            ended.append("caught")
        ended.append("after")
        return x

    checkpoint(function, activation(4)).sum().backward()
    assert ended == ["after"]


def test_what_forward_threw_away_is_not_kept_when_it_is_computed_again():
    unused, alive = [], []

    def function(x):
        thrown_away = x.exp().sin()
        unused.append(weakref.ref(thrown_away.grad_fn._saved_self.untyped_storage()))
        h = x.cos()
        h.register_hook(lambda grad: alive.append(unused[-1]() is not None))
        return h.tanh()

    checkpoint(function, activation(4)).sum().backward()
    assert len(unused) == 2 and alive == [False]


@pytest.mark.parametrize("way", OURS.values())
def test_the_inputs_of_the_second_run_do_not_outlive_it(way):
    seen = []

    def inner(x):
        seen.append(weakref.ref(x))
        return x.sin().cos()

    loss = checkpoint(lambda x: way(inner, x.exp()), activation(4)).sum()
    loss.backward(retain_graph=True)
    assert len(seen) == 2 and all(tensor() is None for tensor in seen)


# --- host memory ---------------------------------------------------------------------------------------------


def test_one_input_at_a_time_is_on_the_device_between_its_copies(monkeypatch):
    host, copied, copy_of = HostMemory(), [], HostMemory.copy
    monkeypatch.setattr(HostMemory, "copy", lambda self, *args: copied.append(args[0]) or copy_of(self, *args))
    parcels = []
    for number in range(4):
        tensor = torch.full((2, 3), float(number)).t()
        parcels.append(host.put([tensor, tensor[0]]))
        assert [parcel.on_device is not None for parcel in parcels] == [False] * number + [True]
    assert host.in_transit is parcels[3]
    assert all(parcel.at_host[0].data_ptr() != tensor.data_ptr() for parcel in parcels)
    for number in (3, 2, 1, 0):
        if number < 3:  # on its way since the last one was taken
            assert host.in_transit is parcels[number]
        first, second = host.take(parcels[number])
        assert first.stride() == (1, 3) and torch.equal(first, torch.full((3, 2), float(number)))
        assert torch.equal(second, torch.full((2,), float(number)))
        assert parcels[number].on_device is None
    assert host.in_transit is None
    assert copied == [*parcels, *parcels[2::-1]]  # the last one was there still
    assert torch.equal(host.take(parcels[2])[0], torch.full((3, 2), 2.0))  # again, out of order
    assert host.in_transit is parcels[1]
    host.take(parcels[3])
    assert parcels[1].on_device is None


def test_inputs_on_several_devices_are_refused():
    with pytest.raises(ValueError, match=naming("cpu", "meta")):
        HostMemory().put([torch.ones(2), torch.ones(2, device="meta")])


def test_what_has_gone_is_not_fetched_ahead():
    host = HostMemory()
    first, second = host.put([torch.ones(2)]), host.put([torch.ones(2)])
    del first
    host.take(second)
    assert host.in_transit is None


def test_only_what_the_graph_computed_goes_to_the_host(monkeypatch):
    went = []
    put = HostMemory.put
    monkeypatch.setattr(HostMemory, "put", lambda self, tensors: went.append(tensors) or put(self, tensors))
    weight, x, ids = torch.ones(2, requires_grad=True), activation(2), torch.tensor([0, 1])
    checkpoint(lambda w, x, ids: (w * x)[ids].sin(), weight, x, ids, host=HostMemory()).sum().backward()
    assert len(went) == 1 and len(went[0]) == 1 and went[0][0] is x


# --- blocks of a model ---------------------------------------------------------------------------------------


def test_blocks_are_chosen_by_their_place():
    model = GPT(CONFIG)
    blocks = list(model.blocks)
    assert checkpoint_blocks(copy.deepcopy(model).blocks[1:3]) != []
    assert checkpoint_blocks(model, every=2) == blocks[::2]
    assert ["forward" in vars(block) for block in blocks] == [True, False, True, False, True]
    assert checkpoint_blocks([blocks[1], blocks[3]]) == [blocks[1], blocks[3]]
    with pytest.raises(ValueError, match=naming("Block", "del block.forward")):
        checkpoint_blocks(model, every=3)
    for block in blocks:
        del block.forward
    assert checkpoint_blocks(model) == blocks


def test_blocks_of_one_model_share_their_host_memory():
    hosts = {block.forward.keywords["host"] for block in checkpoint_blocks(GPT(CONFIG), keep="host")}
    assert len(hosts) == 1 and isinstance(hosts.pop(), HostMemory)


def test_wrong_choices_are_refused():
    with pytest.raises(ValueError, match="ModuleList"):
        checkpoint_blocks(nn.Linear(2, 2))
    for choice in ({"every": 0}, {"keep": "disk"}):
        with pytest.raises(ValueError, match=naming("every", "keep", "'device'", "'host'", "Arena")):
            checkpoint_blocks(GPT(CONFIG), **choice)


def test_a_copy_of_a_checkpointed_model_is_its_own():
    torch.manual_seed(0)
    model = GPT(CONFIG)
    names = list(model.state_dict())
    checkpoint_blocks(model)
    twin = copy.deepcopy(model)
    assert list(model.state_dict()) == names
    twin(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    assert all(param.grad is not None for param in twin.blocks.parameters())


def with_torchs(model: nn.Module, use_reentrant: bool) -> None:
    for block in model.blocks:
        block.forward = partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=use_reentrant)


PREPARATIONS = {
    "every block": checkpoint_blocks,
    "every second block": partial(checkpoint_blocks, every=2),
    "on the host": partial(checkpoint_blocks, keep="host"),
    "torch's": partial(with_torchs, use_reentrant=False),
    "torch's, re-entrant": partial(with_torchs, use_reentrant=True),
}


def trained(stage: int | None, prepare=None, afterwards=False, merge=0, dtype=None, micro_batches=1, device="cpu"):
    """Three steps of AdamW: losses, parameters, and the ledger of each step; stage None is without zero_mini."""
    torch.manual_seed(0)
    model = GPT(CONFIG).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if prepare is not None and not afterwards:
        prepare(model)
    units = merge_blocks(model, merge) if merge else None
    zero = None if stage is None else zeroify(model, optimizer, stage=stage, units=units, dtype=dtype)
    if prepare is not None and afterwards:
        prepare(model)
    torch.manual_seed(1 if zero is None else 1 + zero.rank)
    losses, ledgers = [], []
    for _ in range(3):
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            with contextlib.nullcontext() if zero is None or last else zero.no_sync():
                tokens = torch.randint(CONFIG.vocab, (2, 9), device=device)
                loss = model(tokens[:, :-1], tokens[:, 1:])
                loss.backward()
                losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        ledgers.append([] if zero is None else zero.comm.ledger.last_step)
    model.eval()
    with torch.no_grad():
        losses.append(model(tokens[:, :-1], tokens[:, 1:]))
    params = model.state_dict() if zero is None else zero.state_dict()["model"]
    return losses, list(params.values()), ledgers


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_gpt_trains_as_without_it():
    with exactly():
        losses, params, _ = trained(None)
        for name, prepare in PREPARATIONS.items():
            their_losses, their_params, _ = trained(None, prepare)
            assert same(losses, their_losses) and same(params, their_params), name


def compared(stage: int) -> list[str]:
    """What differs from training without checkpointing, in words.

    On two ranks at stages 2 and 3 every preparation in a plain loop; two of them, others at each stage, at stages 0 and
    1, in loops of other kinds and on other numbers of ranks. At stage 3, whose ledger changes with the units, all of
    them with larger ones.
    """
    found = []
    runs = [(name, prepare, False) for name, prepare in PREPARATIONS.items()]
    runs += [("after zeroify()", checkpoint_blocks, True)]
    two = [runs[(2 * stage + index) % len(runs)] for index in range(2)]
    loops = [({}, runs if stage >= 2 and dist.get_world_size() == 2 else two)]
    if dist.get_world_size() == 2:
        loops += [({"merge": 5000}, runs if stage == 3 else two)]
        loops += [({"micro_batches": 2}, two), ({"dtype": torch.bfloat16}, two)]
    for options, some in loops:
        losses, params, ledgers = trained(stage, **options)
        for name, prepare, afterwards in some:
            label = f"stage {stage}, {options}, {name}"
            their_losses, their_params, their_ledgers = trained(stage, prepare, afterwards, **options)
            if not same(losses, their_losses):
                found.append(f"{label}: losses {losses} and {their_losses}")
            if not same(params, their_params):
                found.append(f"{label}: parameters")
            if ledgers != their_ledgers:
                gathers = [[call.unit for call in page if call.kind == "all_gather"] for page in ledgers]
                theirs = [[call.unit for call in page if call.kind == "all_gather"] for page in their_ledgers]
                found.append(f"{label}: gathers {gathers} and {theirs}")
    return found


@pytest.mark.parametrize("stage, world_size", [*itertools.product(range(4), (1, 2)), (3, 4)])
def test_every_stage_trains_and_sends_as_without_it(ranks, stage, world_size):
    """The ledgers are equal call by call: at stage 3 no unit is gathered a second time for its second run."""

    def exactly_compared() -> list[str]:
        with exactly():
            return compared(stage)

    assert [found for result in ranks(world_size).run(exactly_compared) for found in result] == []


# --- a checkpoint around modules that are units, so that their hooks run again ------------------------------------


class OursAround(Checkpointed):
    def __init__(self, *args, **kwargs):
        super().__init__(False, *args, **kwargs)

    def again(self, function, *args):
        return checkpoint(function, *args)


class OursInOurs(OursAround, CheckpointInCheckpoint):
    """One around two blocks, and one around each of them."""


TWO, THREE = ((0, 1), (2, 3)), ((0, 1, 2), (3,))
AROUND = {
    "one": Case(OursAround),
    "two": Case(lambda: OursAround(TWO)),
    "three": Case(lambda: OursAround(THREE)),
    "frozen": Case(lambda: OursAround(frozen=True)),
    "called twice": Case(lambda: OursAround(((0,), (1,), (1,), (0,), (2,), (3,)))),
    "one in another": Case(lambda: OursInOurs(TWO)),
}


@pytest.mark.parametrize("name", AROUND)
def test_checkpoints_around_units_train_as_torch_ddp_does(ranks, name):
    found = ranks(2).run(parity, AROUND[name], Loop("SGD"))
    assert [difference for result in found for difference in result] == []


def gathers_in_a_step(build) -> list[str]:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = zeroify(model, optimizer, stage=3)
    for _ in range(2):
        model(torch.randn(3, 5), None).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [call.unit for call in zero.comm.ledger.last_step if call.kind == "all_gather"]


@pytest.mark.parametrize("name, more", [("one", 0), ("two", 0), ("one in another", 0), ("three", 2)])
def test_stage_3_gathers_more_only_for_a_checkpoint_around_more_units_than_it_has_slots(ranks, name, more):
    without = ranks(2).run(gathers_in_a_step, ZOO["plain blocks"].build)[0]
    gathers = ranks(2).run(gathers_in_a_step, AROUND[name].build)[0]
    assert len(gathers) == len(without) + more
    if not more:
        assert gathers == without


@pytest.mark.parametrize("keep", ["device", "host", "arena"])
def test_the_handle_counts_what_waits_outside_of_autograd(ranks, keep):
    def bytes_of_activations() -> list[int]:
        model = GPT(replace(CONFIG, dropout=0.0))
        one = 3 * CONFIG.T * CONFIG.d * 4  # a block's input
        checkpoint_blocks(model, every=2, keep=Arena(6 * one, "cpu") if keep == "arena" else keep)
        zero = zeroify(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
        tokens = torch.zeros(3, CONFIG.T, dtype=torch.long)
        loss = model(tokens, tokens)
        found = [zero.memory()["activations"] / one]
        loss.backward()
        return [*found, zero.memory()["activations"] / one]

    between, after = ranks(1).run(bytes_of_activations)[0]
    # Three blocks of five: at the host, and the last one's on the device still.
    assert (between, after) == {"device": (0, 0), "host": (4, 0), "arena": (6, 6)}[keep]


# --- on a GPU ------------------------------------------------------------------------------------------------

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def on_gpu(test):
    for mark in gpu:
        test = mark(test)
    return test


@on_gpu
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("program", [three_blocks, one_in_another])
def test_on_a_gpu_losses_gradients_and_random_numbers_are_those_of_a_plain_call_and_of_torchs(program, autocast):
    runs = {name: outcome(program, way, autocast, device="cuda") for name, way in (ON_GPU | THEIRS).items()}
    runs["plain"] = outcome(program, plain, autocast, device="cuda")
    for name, run in runs.items():
        assert same(runs["ours"], run), name


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_a_model_trains_from_host_memory_to_the_same_bits(dtype):
    """Layers without atomic additions, large enough for the host to run ahead: what is not waited for would show."""
    results = {}
    for keep in (None, "device", "host"):
        torch.manual_seed(0)
        model = nn.Sequential(*(small(1024, 4096) for _ in range(8))).to("cuda", dtype)
        if keep is not None:
            checkpoint_blocks(model, keep=keep)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            loss = model(torch.randn(4096, 1024, device="cuda", dtype=dtype)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results[keep] = [loss.detach(), *model.state_dict().values()]
    assert same(results[None], results["device"]) and same(results[None], results["host"])


@on_gpu
def test_on_a_gpu_one_blocks_input_is_left_between_forward_and_backward():
    """The peak in backward is a block's activations and a few inputs, whatever the number of blocks."""
    B, T, d = 16, 512, 512
    one = 2 * B * T * d

    def bytes_of(L: int, keep: str | None) -> tuple[int, int]:
        gc.collect()  # a model with a `forward` of its own is a cycle: the one before might go in mid-measurement
        torch.manual_seed(0)
        config = GPTConfig(L=L, d=d, heads=8, T=T)
        blocks = GPT(config).blocks.to("cuda", torch.bfloat16)
        if keep:
            checkpoint_blocks(blocks, keep=keep)
        x = torch.randn(B, T, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        found = []
        for _ in range(2):  # libraries allocate their workspaces in the first
            for param in (x, *blocks.parameters()):
                param.grad = torch.zeros_like(param)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            h = x * 1
            for block in blocks:
                h = block(h)
            loss = h.sum()
            del h
            kept = torch.cuda.memory_allocated() - before
            torch.cuda.reset_peak_memory_stats()
            loss.backward()
            del loss
            torch.cuda.synchronize()
            found = kept, torch.cuda.max_memory_allocated() - before
            assert torch.cuda.memory_allocated() - before < one
        return found

    plain_kept, _ = bytes_of(8, None)
    device_kept, _ = bytes_of(8, "device")
    host_kept, host_peak = bytes_of(8, "host")
    assert plain_kept > 8 * 8 * one
    assert 8 * one <= device_kept < 9 * one
    assert host_kept < 1.5 * one  # the last block's input, where backward begins
    _, more_peak = bytes_of(16, "host")
    assert abs(more_peak - host_peak) < 1.5 * one
