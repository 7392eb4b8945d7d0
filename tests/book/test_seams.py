"""What a user may put in: a Comm of their own, a stage class of their own. And which files may import which."""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_mini
from zero_mini import zeroify
from zero_mini.checkpoint.sharded import Checkpoints, load
from zero_mini.comm import Comm
from zero_mini.flat import Reduction
from zero_mini.simulate.absent import Absent
from zero_mini.update.on_device import OnDevice
from zero_mini.zero2 import Zero2
from zero_mini.zero3 import Zero3

ROOT = Path(zero_mini.__file__).parent
BOOK = ("by_hand", "comm", "flat", "script", "ddp", "zero1", "zero2", "zero3", "zeroify")
SERVE_THE_BOOK = ("wire", "binding", "update", "memory")
STAGES = (0, 1, 2, 3)


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT.parent / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(4)), nn.Linear(24, 1))


def train(zero, steps: int = 3, max_norm: float = 0.01) -> tuple[dict, list[float]]:
    """Parameters and norms, after steps on data that each rank has for itself."""
    norms = []
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        zero.model(torch.randn(8, 24)).square().mean().backward()
        norms.append(zero.clip_grad_norm_(max_norm).item())
        zero.optimizer.step()
        zero.optimizer.zero_grad()
    return {name: value.clone() for name, value in zero.model.state_dict().items()}, norms


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# --- a Comm of two groups --------------------------------------------------------------------


def plain_and_hybrid(folder: str) -> tuple[list[tuple], list[bool], int]:
    """At each stage, in one call: torch gives a group that replaces a destroyed one the same name."""
    hybrid, results = example("hybrid_shard"), []
    for stage in STAGES:
        model = blocks()
        plain = train(zeroify(model, momentum(model), stage))
        model = blocks(seed=dist.get_rank())  # the first rank's values count, on every node
        zero = zeroify(model, momentum(model), stage, comm=hybrid.HybridComm(2))
        results.append((plain, train(zero), hybrid.wire(zero), [unit.P for unit in zero.units]))
    checkpoints = Checkpoints(Path(folder), zero)
    checkpoints.save(3, {"rank": dist.get_rank()})
    checkpoints.close()
    new = blocks(seed=1)
    loaded = load(Path(folder), zeroify(new, momentum(new), 1))  # on four ranks, without nodes
    expected = results[-1][1][0]
    return results, [torch.equal(value, expected[name]) for name, value in new.state_dict().items()], loaded.step


def test_two_nodes_of_two_ranks_train_as_four_ranks_and_write_one_checkpoint(ranks, tmp_path):
    everyone = ranks(4).run(plain_and_hybrid, str(tmp_path))
    for results, is_equal, step in everyone:
        assert all(is_equal) and step == 3
        for stage, ((expected, norms), (params, hybrid_norms), wire, sizes) in enumerate(results):
            assert hybrid_norms == pytest.approx(norms, rel=1e-5) and min(norms) > 0.01  # clipped
            for name, value in expected.items():
                torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-6)
                assert torch.equal(params[name], everyone[0][0][stage][1][0][name]), name  # the same bits on all nodes
            # N = M = 2. Inside, stage 3 gathers all, then again the blocks that no slot has; each norm is one element.
            again = sum(sizes[:-2]) if stage == 3 else 0
            assert wire["inside a node"] == (2 * sum(sizes) + again) / 2 + (1 if stage else 0)
            assert wire["across nodes"] == sum(sizes) / (2 if stage else 1)  # 2 S (M-1)/M
    assert sorted(path.name for path in (tmp_path / "step-3").glob("rank-*")) == ["rank-0.pt", "rank-1.pt"]


# --- a Comm with another reduce-scatter ------------------------------------------------------


def plain_and_bf16(stage: int) -> tuple[float, float, list[float], int]:
    """Worst error of a gradient, in roundings of the ranks' own; distance after training, in updates; bytes; P."""
    bf16, model = example("bf16_wire"), blocks()
    torch.manual_seed(dist.get_rank())
    x = torch.randn(8, 24)
    own = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    means, rounding = [], []
    for grad in own:
        rows = torch.empty(dist.get_world_size(), *grad.shape)
        dist.all_gather(list(rows), grad)
        means.append(rows.mean(0))
        rounding.append(rows.abs().mean(0) / 2**8)  # half of the distance between two neighbours in bf16, at most
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    after, sent, errors = [], [], []
    for comm in (Comm(), bf16.Bf16Comm()):
        model = blocks()
        zero = zeroify(model, momentum(model), stage, comm=comm)
        zero.model(x).square().mean().backward()
        with zero.full_params(grads=True):
            grads = [param.grad for param in model.parameters()]
            errors = [((g - m).abs() / (r + 1e-9)).max().item() for g, m, r in zip(grads, means, rounding)]
        zero.optimizer.zero_grad()
        after.append(torch.cat([value.flatten() for value in train(zero)[0].values()]))
        sent.append(bf16.gradient_bytes(zero))
    distance = (after[1] - after[0]).norm() / (after[0] - before).norm()
    return max(errors), distance.item(), sent, sum(unit.P for unit in zero.units)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_bf16_wire_are_rounded_once_and_sent_in_half_the_bytes(ranks, stage):
    for error, distance, (plain, bf16), numel in ranks(2).run(plain_and_bf16, stage):
        assert 0.5 < error <= 1  # not 0: bf16 was on the wire. Sums in bf16 would round a second time
        assert 0 < distance < 2**-8
        assert (plain, bf16) == (4 * numel / 2, 2 * numel / 2)  # P (N-1)/N elements


# --- a Comm without a process group ----------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_one_process_is_rank_5_of_8(stage):
    model = blocks()
    loss = model(torch.ones(2, 24)).square().mean().item()
    zero = zeroify(model, torch.optim.AdamW(model.parameters()), stage, comm=Absent(5, 8))
    assert not dist.is_initialized()
    assert zero.comm.host.gather("word") == 8 * ["word"]  # absent ranks say what this one says
    first = model(torch.ones(2, 24)).square().mean()
    first.backward()
    zero.wait()
    assert first.item() == loss
    bytes_held = zero.memory()
    numel = sum(unit.P for unit in zero.units)
    assert bytes_held["gradients"] == 4 * numel // (8 if stage >= 2 else 1)
    kinds = {0: {"all_reduce"}, 1: {"reduce_scatter"}, 2: {"reduce_scatter"}, 3: {"reduce_scatter", "all_gather"}}
    assert {call.kind for call in zero.comm.ledger.calls} == kinds[stage]


# --- norms over groups -----------------------------------------------------------------------


class Halves(Comm):
    """Ranks 2i and 2i + 1 hold other parts of one model, as in tensor parallelism; i is a rank of data parallelism."""

    def __init__(self):
        other_parts, _ = dist.new_subgroups(2)
        same_part, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        super().__init__(same_part)
        self.parts = other_parts

    def total_norm(self, norms, norm_type):
        total = super().total_norm(norms, norm_type) ** norm_type
        dist.all_reduce(total, group=self.parts)
        return total ** (1 / norm_type)


class Half(nn.Module):
    """Adds the outputs of its blocks: of one half of four blocks, or of all of them."""

    def __init__(self, part: int | None):
        super().__init__()
        torch.manual_seed(0)
        parts = nn.ModuleList(nn.Linear(24, 8) for _ in range(4))
        self.blocks = parts if part is None else parts[2 * part : 2 * part + 2]

    def forward(self, x):
        return sum(block(x) for block in self.blocks)


def norms_of_halves() -> tuple[list[float], float]:
    part, column = dist.get_rank() % 2, dist.get_rank() // 2
    x = torch.arange(48.0).view(2, 24) / (48 + column)
    comm, whole, norms = Halves(), Half(None), []
    for other in (0, 1):
        (whole(torch.arange(48.0).view(2, 24) / (48 + other)).sum() / 2).backward()
    for stage in STAGES:
        model = Half(part)
        zero = zeroify(model, momentum(model), stage, comm=comm)
        model(x).sum().backward()  # a sum: the gradient of a part does not depend on the other one
        norms.append(zero.clip_grad_norm_(1.0).item())
    return norms, nn.utils.clip_grad_norm_(whole.parameters(), 1.0).item()


def test_a_norm_spans_the_parts_of_a_model(ranks):
    for norms, whole in ranks(4).run(norms_of_halves):
        assert norms == pytest.approx(4 * [whole], rel=1e-6)


# --- a stage of one's own --------------------------------------------------------------------


class KeepsWholeGradients(Zero2):
    """Stage 2 without its saving."""

    def reduce(self, unit):
        shard = unit.slice_of(unit.local_grad)
        work = self.comm.reduce_scatter(shard, unit.local_grad, unit.name)
        unit.reducing = Reduction(work, shard, unit.local_grad)


class GathersTwice(Zero3):
    """Stage 3 without prefetching."""

    def prefetch(self, unit, neighbour):
        pass


class ReducesInBf16(Zero2):
    """Stage 2 of a model in fp32, with gradients and means in bf16."""

    def reduce(self, unit):
        unit.local_grad = unit.local_grad.bfloat16()
        super().reduce(unit)


class Doubling(OnDevice):
    """Adds every mean twice."""

    def receive(self, unit, mean):
        super().receive(unit, 2 * mean)


class DoublesGradients(Zero3):
    """Stage 3 with an update of its own."""

    def __init__(self, *args, make_update, **options):
        super().__init__(*args, make_update=Doubling, **options)


def own_stage(stage: type, base: int) -> tuple[bool, int, int]:
    results, memory = [], []
    for choice in (stage, base):
        model = blocks()
        zero = zeroify(model, momentum(model), choice)
        results.append(train(zero)[0])
        model(torch.ones(2, 24)).sum().backward()
        zero.wait()
        memory.append(zero.memory()["gradients"])
    return all(torch.equal(value, results[1][name]) for name, value in results[0].items()), *memory


@pytest.mark.parametrize(
    "stage, base", [(KeepsWholeGradients, 2), (GathersTwice, 3)], ids=lambda x: getattr(x, "__name__", x)
)
def test_a_class_may_stand_for_a_stage(ranks, stage, base):
    for is_equal, own, theirs in ranks(2).run(own_stage, stage, base):
        assert is_equal and own == (2 * theirs if stage is KeepsWholeGradients else theirs)


def test_a_stage_may_reduce_in_a_lower_dtype_and_the_optimizer_gets_the_masters(ranks):
    def work():
        model, memory = blocks(), []
        zero = zeroify(model, momentum(model), ReducesInBf16)
        for _ in range(2):  # the sum of two micro-batches is in the master's dtype
            model(torch.ones(2, 24)).sum().backward()
            zero.wait()
            memory.append(zero.memory()["gradients"])
        zero.optimizer.step()
        dtypes = {state["momentum_buffer"].dtype for state in zero.optimizer.state.values()}
        model = blocks()
        expected = train(zeroify(model, momentum(model), 2))[0]
        model = blocks()
        got = train(zeroify(model, momentum(model), ReducesInBf16))[0]
        numel = sum(unit.S for unit in zero.units)
        return numel, memory, dtypes, max((got[name] - expected[name]).abs().max().item() for name in got)

    for numel, memory, dtypes, apart in ranks(2).run(work):
        assert memory == [2 * numel, 4 * numel] and dtypes == {torch.float32}
        assert 0 < apart < 1e-5  # an update is at most 0.1 times a norm of 0.01


def test_a_stage_may_bring_an_update_of_its_own(ranks):
    def work():
        norms = []
        for stage in (3, DoublesGradients):
            model = blocks()
            norms.append(train(zeroify(model, momentum(model), stage), steps=1)[1][0])
        return norms

    for plain, doubled in ranks(2).run(work):
        assert doubled == 2 * plain


def test_offload_goes_on_top_of_a_class_that_shards_states(ranks):
    def work():
        model, others = blocks(), []
        zero = zeroify(model, momentum(model), KeepsWholeGradients, offload="host")
        train(zero)
        for stage in (object, "2", zero_mini.ddp.DDP):
            try:
                zeroify(blocks(), momentum(blocks()), stage, offload="host")
            except ValueError as error:
                others.append(str(error))
        return zero.memory("host")["optimizer"], others

    for bytes_at_host, messages in ranks(2).run(work):
        assert bytes_at_host > 0
        assert ["stage" in message for message in messages] == [True] * 3 and "Zero2" in messages[0]


# --- where state is born ---------------------------------------------------------------------


def attributes_after_training(stage: type, dtype: torch.dtype | None) -> tuple[set[str], set[str]]:
    """Attributes of the handle and of its units that no __init__ has made."""
    at_birth = {}

    class Noting(stage):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            at_birth.update(handle=set(vars(self)), unit=set(vars(self.units[0])))

    model = blocks()
    zero = zeroify(model, momentum(model), Noting, dtype=dtype)
    train(zero)
    with zero.no_sync():
        model(torch.ones(2, 24)).sum().backward()
    model(torch.ones(2, 24)).sum().backward()
    zero.optimizer.step()
    zero.load_state_dict(zero.state_dict())
    return set(vars(zero)) - at_birth["handle"], set(vars(zero.units[0])) - at_birth["unit"]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [zero_mini.ddp.DDP, Zero2, Zero3], ids=lambda stage: stage.__name__)
def test_every_attribute_is_born_in_an_init(ranks, stage, dtype):
    assert ranks(2).run(attributes_after_training, stage, dtype) == [(set(), set())] * 2


# --- which file imports which ----------------------------------------------------------------


def imports_of(path: Path) -> set[str]:
    """Modules of this package that a file imports at the top, as "script" or "binding.hooks"."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "zero_mini":
            base = node.module.removeprefix("zero_mini").lstrip(".")
            for alias in node.names:
                inner = ".".join(filter(None, (base, alias.name)))
                is_module = (ROOT / (inner.replace(".", "/") + ".py")).exists()
                names.add(inner if is_module else base)
    return names - {""}


def test_the_book_imports_what_serves_it_and_nothing_imports_in_a_circle():
    graph = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): imports_of(path)
        for path in ROOT.rglob("*.py")
        if path != ROOT / "__init__.py"
    }
    serving = [name for name in graph if name in BOOK or name.split(".")[0] in SERVE_THE_BOOK]
    assert set(BOOK) < set(graph)
    reached, names = set(), ["zeroify"]
    while names:
        name = names.pop()
        if name not in reached:
            reached.add(name)
            names += graph[name]
    assert reached <= set(serving), reached - set(serving)
    done: set[str] = set()
    while ready := [name for name in graph if name not in done and graph[name] <= done]:
        done |= set(ready)
    assert done == set(graph), f"a circle of {sorted(set(graph) - done)}"
