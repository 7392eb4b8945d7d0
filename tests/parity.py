"""One loop that trains any model of the zoo under torch DDP, under a stage, or alone, and what two such runs differ in.

What a loop leaves behind is a `Run`: the loss, the mean gradients and the parameters of every step. A
test trains one model twice and asks for the differences of two runs. All of it runs inside a rank.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from models import Case, Turn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero_mini.binding.units import merge_blocks
from zero_mini.zeroify import zeroify

# --- optimizers -----------------------------------------------------------------------------------


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Frozen parameters are in its group, as `model.parameters()` has them."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups: matrices decay, the rest does not. Frozen parameters are in neither."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    return torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": matrices}], lr=0.01, weight_decay=0.3)


def dyadic_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Its hyperparameters are powers of two: on whole numbers it does not round."""
    return torch.optim.SGD(model.parameters(), lr=2**-6, momentum=0.5)


def adam_without_eps(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-30)


OPTIMIZERS = {"SGD": sgd, "AdamW": adamw, "dyadic SGD": dyadic_sgd, "Adam": adam_without_eps}


# --- the loop -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """How to train."""

    optimizer: str = "SGD"
    steps: int = 3
    micro_batches: int = 1
    no_sync: bool = False  # on all micro-batches but the last
    clip: tuple[float, float] | None = None  # (max_norm, norm_type); in the second step by a maximum out of reach
    evaluate: bool = False  # forwards that no backward follows, before each step
    watch: bool = True  # look at gradients and parameters after every step, or at the last ones only
    dtype: torch.dtype = torch.float32  # of the parameters
    compute_dtype: torch.dtype | None = None
    units: tuple[str, ...] | None = None  # names of modules, instead of the repeated blocks
    merge: int = 0  # units of several blocks, of that many parameters at least
    offload: str | None = None  # zeroify's: "host", or a folder


@dataclass
class Step:
    losses: list[torch.Tensor]
    norm: torch.Tensor | None = None
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)  # what the optimizer is given
    params: dict[str, torch.Tensor] = field(default_factory=dict)  # the state_dict after it, buffers too


@dataclass
class Run:
    start: dict[str, torch.Tensor]
    steps: list[Step]


class Stage:
    """One of zero_mini's stages."""

    def __init__(self, case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loop: Loop, stage: int):
        self.model, self.module, self.optimizer = model, model, optimizer
        units = None if loop.units is None else [model.get_submodule(name) for name in loop.units]
        units = merge_blocks(model, loop.merge) if loop.merge else units
        self.zero = zeroify(model, optimizer, stage=stage, dtype=loop.compute_dtype, units=units, offload=loop.offload)
        self.shares = [dist.get_rank()]
        self.no_sync = self.zero.no_sync

    def after_backward(self) -> None:
        """Nothing to do."""

    def before_step(self) -> None:
        """Nothing to do."""

    def clip(self, max_norm: float, norm_type: float, _) -> torch.Tensor:
        return self.zero.clip_grad_norm_(max_norm, norm_type).clone()

    def grads(self) -> dict[str, torch.Tensor | None]:
        with self.zero.full_params(grads=True):
            return {name: copy_of(param.grad) for name, param in self.model.named_parameters()}


class Alone:
    """Plain PyTorch: this rank alone, or in place of all of them."""

    def __init__(self, case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loop: Loop, shares=None):
        self.model, self.module, self.optimizer = model, model, optimizer
        self.shares = range(dist.get_world_size()) if shares is None else shares
        self.no_sync = contextlib.nullcontext

    def after_backward(self) -> None:
        """Nothing to do."""

    def before_step(self) -> None:
        """Nothing to do."""

    def clip(self, max_norm: float, norm_type: float, norm: torch.Tensor | None) -> torch.Tensor:
        """Returns torch's own norm; with `norm`, scales by its coefficient, so that bits can be compared."""
        params = [param for param in self.module.parameters() if param.grad is not None]
        before = [param.grad.clone() for param in params]
        own_norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        if norm is not None:
            for param, grad in zip(params, before):
                param.grad.copy_(grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0)))
        return own_norm

    def grads(self) -> dict[str, torch.Tensor | None]:
        return {name: copy_of(param.grad) for name, param in self.module.named_parameters()}


class TorchDDP(Alone):
    """torch DistributedDataParallel."""

    def __init__(self, case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loop: Loop, **options):
        super().__init__(case, model, optimizer, loop, shares=[dist.get_rank()])
        self.model = DistributedDataParallel(
            model, find_unused_parameters=case.unused, static_graph=case.static_graph, **options
        )
        self.no_sync = self.model.no_sync


class CastDDP(TorchDDP):
    """torch DDP in mixed precision by hand: it trains a copy in `compute_dtype`, the optimizer an fp32 master."""

    def __init__(self, case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loop: Loop):
        super().__init__(case, copy.deepcopy(model).to(loop.compute_dtype), optimizer, loop)
        self.ddp, self.model, self.master, self.dtype = self.model, self.forward, model, loop.compute_dtype

    def forward(self, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        with torch.no_grad():
            for param, master in zip(self.module.parameters(), self.master.parameters()):
                param.copy_(master)
        return self.ddp(x.to(self.dtype), turn).float()

    def before_step(self) -> None:
        for param, master in zip(self.module.parameters(), self.master.parameters()):
            master.grad, param.grad = param.grad.float(), None

    def grads(self) -> dict[str, torch.Tensor | None]:
        return {name: copy_of(param.grad) for name, param in self.master.named_parameters()}


class Magnitudes(Alone):
    """Its gradients are the sums of |g| over ranks and micro-batches: the scale of rounding errors."""

    def __init__(self, case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, loop: Loop):
        super().__init__(case, model, optimizer, loop, shares=[dist.get_rank()])
        self.sums = {name: torch.zeros_like(param) for name, param in model.named_parameters()}

    def after_backward(self) -> None:
        for name, param in self.module.named_parameters():
            if param.grad is not None:
                self.sums[name] += param.grad.abs()
        self.module.zero_grad()

    def grads(self) -> dict[str, torch.Tensor | None]:
        sums, self.sums = self.sums, {name: torch.zeros_like(total) for name, total in self.sums.items()}
        for total in sums.values():
            dist.all_reduce(total)
        return sums


def build(case: Case, loop: Loop, seed: int = 0) -> nn.Module:
    """The model as this rank makes it; with the default seed, as rank 0 does."""
    draw_from(seed)
    return case.build().to(place(), loop.dtype)


def train(case: Case, loop: Loop, side: type, follow: Run | None = None, **options) -> Run:
    """Train a fresh model by `side`, one of the classes above.

    With `follow` each step starts from the parameters which that run had, and clips by its norm.
    Two runs that differ by rounding so stay comparable at every step; where the two are equal to the
    bit, it changes nothing.
    """
    starts_differ = case.seeds_differ and issubclass(side, (Stage, TorchDDP))
    model = build(case, loop, seed=dist.get_rank() if starts_differ else 0)
    optimizer = OPTIMIZERS[loop.optimizer](model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    side = side(case, model, optimizer, loop, **options)
    run = Run(copies_of(model.state_dict()), [])
    for number in range(loop.steps):
        if follow is not None and number > 0 and follow.steps[number - 1].params:
            model.load_state_dict(follow.steps[number - 1].params)
        step = Step(losses=evaluate(case, loop, side, number) if loop.evaluate else [])
        for micro in range(loop.micro_batches):
            last = micro == loop.micro_batches - 1
            with side.no_sync() if loop.no_sync and not last else contextlib.nullcontext():
                for share in side.shares:
                    loss = loss_of(case, loop, side.model, share, number, micro) / loop.micro_batches
                    (loss / len(side.shares)).backward()
                    side.after_backward()
                    step.losses.append(loss.detach().clone())
        side.before_step()
        if loop.clip:
            max_norm, norm_type = loop.clip
            norm = follow and follow.steps[number].norm
            step.norm = side.clip(1e6 if number == 1 else max_norm, norm_type, norm)
        look = loop.watch or number == loop.steps - 1
        if look:
            step.grads = side.grads()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if look:
            step.params = copies_of(model.state_dict())
        run.steps.append(step)
    return run


def draw_from(seed: int) -> None:
    """torch.manual_seed() without its call stacks, which it writes down for each kind of GPU that may come yet."""
    if place().type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def place() -> torch.device:
    """Where this rank trains: its GPU if ranks talk by NCCL."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def loss_of(case: Case, loop: Loop, model: nn.Module, rank: int, step: int, micro: int) -> torch.Tensor:
    turn = Turn(rank, dist.get_world_size(), step)
    batch = [part.to(place()) for part in case.batch(turn, micro)]
    batch = [part.to(loop.dtype) if part.is_floating_point() else part for part in batch]
    draw_from(100 * rank + step)  # for dropout
    return case.loss(model(batch[0], turn), batch[1])


def evaluate(case: Case, loop: Loop, side, step: int) -> list[torch.Tensor]:
    """Losses of an eval() forward without gradients, and of a forward whose graph is thrown away."""
    side.model.eval()
    with torch.no_grad():
        losses = [loss_of(case, loop, side.model, share, step, 50) for share in side.shares]
    side.model.train()
    if not loop.no_sync:  # torch DDP would take the next backward for this forward's, and reduce under no_sync
        losses += [loss_of(case, loop, side.model, share, step, 51).detach() for share in side.shares]
    return losses


def replay(case: Case, loop: Loop, run: Run) -> Run:
    """What the plain optimizer makes of the gradients that the run had."""
    model = build(case, loop)
    optimizer = OPTIMIZERS[loop.optimizer](model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    steps = []
    for step in run.steps:
        for name, param in model.named_parameters():
            param.grad = copy_of(step.grads[name])
        optimizer.step()
        schedule.step()
        updated = {name: copy_of(param) for name, param in model.named_parameters(remove_duplicate=False)}
        steps.append(replace(step, params={**step.params, **updated}))  # buffers are no optimizer's
    return Run(run.start, steps)


def copy_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def copies_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: copy_of(tensor) for name, tensor in tensors.items()}


# --- comparing ------------------------------------------------------------------------------------

Close = Callable[[torch.Tensor, torch.Tensor], bool]


def differences(
    label: str, one: Run, other: Run, equal: Close = torch.equal, what=("losses", "grads", "params")
) -> list[str]:
    """What is not equal in two runs, in words: which step, what, by how much. [] if they agree."""
    found = []

    def compare(name: str, a: torch.Tensor | None, b: torch.Tensor | None) -> None:
        if (a is None) != (b is None):
            found.append(f"{label}: {name} is {'None' if a is None else 'a tensor'} here and not there")
        elif a is not None and not equal(a, b):
            gap = (a - b).abs().max().item() if a.shape == b.shape else f"shapes {a.shape} and {b.shape}"
            found.append(f"{label}: {name} differs by {gap}")

    if "params" in what:
        for name in one.start:
            compare(f"{name} at the start", one.start[name], other.start[name])
    for number, (a, b) in enumerate(zip(one.steps, other.steps, strict=True)):
        if "losses" in what:
            for micro, (loss, other_loss) in enumerate(zip(a.losses, b.losses, strict=True)):
                compare(f"step {number}, loss {micro}", loss, other_loss)
        for kind in {"grads", "params"} & set(what):
            ours, theirs = getattr(a, kind), getattr(b, kind)
            if ours and theirs:
                if list(ours) != list(theirs):
                    found.append(f"{label}: step {number}, {kind} have names {list(ours)}, {list(theirs)}")
                else:
                    for name in ours:
                        compare(f"step {number}, {kind[:-1]} of {name}", ours[name], theirs[name])
    return found


def agree(results: list[list[str]]) -> bool:
    """No rank found a difference; if one did, the first few are the message."""
    found = [f"rank {rank}: {difference}" for rank, result in enumerate(results) for difference in result]
    assert not found, "\n".join([f"{len(found)} differences", *found[:8]])
    return True


def parity(case: Case, loop: Loop, stages: tuple[int, ...] = (0, 1, 2, 3), reference: type = TorchDDP) -> list[str]:
    """Train the case at all stages and under torch DDP; return this rank's differences.

    Stages that add in the same order must agree to the bit, at every N. With torch DDP they must do so
    wherever it adds in that order too. Where it does not, gradients at equal parameters may differ by
    the rounding of two sums of that many terms, and the update must be the plain optimizer's to the bit.

    Reading is not free of effect: full_params() before a step empties the slots of stage 3, so a loop that
    watches cannot see values of the last step in them. Only loops with watch=False train undisturbed.
    """
    world_size, found = dist.get_world_size(), []
    with exactly():
        for alike, exact in alike_stages(case, loop, world_size):
            alike = [stage for stage in alike if stage in case.stages and stage in stages]
            if not alike:
                continue
            first, *others = [train(case, loop, Stage, stage=stage) for stage in alike]
            for stage, run in zip(alike[1:], others):
                label = f"stages {alike[0]} and {stage}"
                found += differences(label, first, run) + differences_of_norms(label, first, run, tolerance=0)
            theirs = train(case, loop, reference, follow=first)
            label = f"stage {alike[0]} and torch DDP"
            found += differences(label, first, theirs, what=("losses",))
            found += differences_of_norms(label, first, theirs, tolerance=1e-6)
            if exact:
                found += differences(label, first, theirs, what=("grads", "params"))
            else:
                scale = train(case, loop, Magnitudes, follow=first)
                terms = world_size * loop.micro_batches * (1 + case.comes_twice)
                found += differences_beyond(2 * (terms - 1) * 2**-24, scale, label, first, theirs)
                found += differences("the plain optimizer", first, replay(case, loop, first), what=("params",))
            norms = [step.norm and step.norm.item() for step in first.steps]
            dist.all_gather_object(everyone := [None] * world_size, norms)
            found += [f"ranks have norms {a} and {b}" for a, b in zip(everyone, everyone[1:]) if a != b]
    return found


def alike_stages(case: Case, loop: Loop, world_size: int) -> list[tuple[tuple[int, ...], bool]]:
    """[(stages that add in the same order, does torch DDP add in that order too?)].

    Two terms have one sum, three have several: at N >= 3 DDP's order depends on its buckets. And NCCL may add in a tree
    for an all-reduce, which stage 0 does, while its reduce-scatter is a ring.
    """
    if world_size > 2 and dist.get_backend() == "nccl":
        return [((0,), False), *([((1, 2, 3), False)] if not loop.no_sync else [((1,), False), ((2, 3), False)])]
    if loop.micro_batches == 1:
        return [((0, 1, 2, 3), world_size == 1 or (world_size == 2 and not case.comes_twice))]
    if not loop.no_sync:  # DDP averages the sum of its last mean and this gradient, a stage adds two means
        return [((0, 1, 2, 3), world_size == 1)]
    return [((0, 1), world_size <= 2), ((2, 3), world_size == 1)]  # 2 and 3 reduce every micro-batch


def differences_beyond(unit: float, scale: Run, label: str, one: Run, other: Run) -> list[str]:
    """The gradients in two runs that are further apart than `unit` times those of `scale`."""
    found = []
    for number, (a, b, bounds) in enumerate(zip(one.steps, other.steps, scale.steps, strict=True)):
        for name in a.grads:
            if (a.grads[name] is None) != (b.grads[name] is None):
                found.append(f"{label}: step {number}, gradient of {name} is None in one of them")
            elif a.grads[name] is not None:
                excess = (a.grads[name].double() - b.grads[name].double()).abs() - unit * bounds.grads[name].double()
                if not (excess <= 0).all():  # a NaN is no small number
                    found.append(f"{label}: step {number}, gradient of {name} is {excess.max()} beyond the bound")
    return found


def differences_of_norms(label: str, one: Run, other: Run, tolerance: float) -> list[str]:
    pairs = [(a.norm, b.norm) for a, b in zip(one.steps, other.steps, strict=True) if a.norm is not None]
    return [f"{label}: norms {a} and {b}" for a, b in pairs if not (a - b).abs() <= tolerance * b.abs()]


@contextlib.contextmanager
def exactly() -> Iterator[None]:
    """One thread and deterministic algorithms, so that equal programs give equal bits.

    torch.empty() is full of NaN then, so that nothing can be right by reading what nobody wrote.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


@contextlib.contextmanager
def empties_full_of(value: float) -> Iterator[None]:
    """What torch.empty() and its kin return is filled with a value that could pass for data."""
    makers = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    originals = [getattr(owner, name) for owner, name in makers]

    def filling(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args, **kwargs) -> torch.Tensor:
            tensor = original(*args, **kwargs)
            return tensor.fill_(value) if tensor.is_floating_point() else tensor

        return make

    for (owner, name), original in zip(makers, originals):
        setattr(owner, name, filling(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(makers, originals):
            setattr(owner, name, original)
