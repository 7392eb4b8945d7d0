"""What people write by habit: it means the same, or raises with the remedy (how that is seen: both_ways.py)."""

import copy
import io

import pytest
import torch
from both_ways import D_IN, D_OUT, EXACT, MIXED, PRECISIONS, STAGES, Block, Compare, D, Tower, descent, momentum
from says import naming, tells
from torch import nn
from torch.optim.swa_utils import AveragedModel


# What a script reads, writes and freezes at stage 1 is what it does at stage 2; stage 1 is here in bf16.
@pytest.fixture(
    params=[each for each in PRECISIONS if each != (1, EXACT)],
    ids=lambda param: f"stage{param[0]}-{'bf16' if param[1] else 'fp32'}",
)
def compare(request, ranks) -> Compare:
    return Compare(ranks, *request.param)


@pytest.fixture(params=STAGES, ids=lambda stage: f"stage{stage}")
def compare_fp32(request, ranks) -> Compare:
    return Compare(ranks, request.param, EXACT)


NAMES_THE_REMEDY = "zero.full_params("


# --- parts of a model, called by themselves ---------------------------------------------------------------


def train_by(job, loss, steps=3) -> None:
    for step in range(steps):
        job.optimizer.zero_grad()
        x, y = job.batch(step)
        loss(job.model, x.to(job.zero.dtype) if job.zero else x, y).backward()
        job.optimizer.step()
        job.see_state()


def error_of(output, y):
    return (output - y).square().mean()


def in_chunks(model, x, y):
    """The head on parts of the features, as a loss in chunks does."""
    h = model.through(model.enter(x))
    return sum(error_of(model.leave(part), rows) for part, rows in zip(h.chunk(3), y.chunk(3))) / 3


def leaves_alone(model, x, y):
    """Modules inside a block, without the block."""
    h = model.enter(x)
    for block in model.blocks:
        h = h + block.out(torch.tanh(block.fc(block.norm(h))))
    return error_of(model.leave(h), y)


PARTS = {"features and head": lambda model, x, y: error_of(model.leave(model.through(model.enter(x))), y)}
PARTS |= {each.__name__: each for each in (in_chunks, leaves_alone)}


@pytest.mark.parametrize("part", PARTS)
def test_parts_called_by_themselves_train_right(compare, part):
    compare(lambda job: train_by(job, PARTS[part]))


def test_a_head_on_features_of_another_graph_trains_right(compare):
    def script(job):
        for step in range(3):
            job.optimizer.zero_grad()
            x, y = job.batch(step)
            x = x.to(job.zero.dtype) if job.zero else x
            with torch.no_grad():
                h = job.model.through(job.model.enter(x))
            error_of(job.model.leave(h), y).backward()  # no unit but the root, and not by the model's own forward
            job.optimizer.step()
            job.see_state()
        job.train(3)

    compare(script)


class CrossReads(Tower):
    """Its forward uses a block's weights before and after that block's own turn, and a view of one."""

    def through(self, h):
        late, early = self.blocks[2], self.blocks[0]
        h = h + 0.1 * torch.tanh(h @ late.fc.weight.t())[:, :D]
        h = super().through(h)
        return h + 0.1 * nn.functional.linear(torch.tanh(h @ early.fc.weight[:, :].t()), early.out.weight)


@pytest.mark.check
def test_a_blocks_weights_used_by_its_model_train_right(compare_fp32):
    compare_fp32(lambda job: job.train(0, 1, 2), build=CrossReads)


class DecaysInForward(Tower):
    def through(self, h):
        with torch.no_grad():
            self.blocks[2].fc.weight.mul_(0.9)
        return super().through(h)


def test_a_write_inside_forward_counts_or_names_the_remedy(compare):
    loud = compare.stage == 3 or compare.dtype is MIXED
    error = compare(lambda job: job.train(0, 1, 2), build=DecaysInForward, may_raise=loud)
    assert (error is not None) == loud
    assert error is None or NAMES_THE_REMEDY in error.splitlines()[-1]
    assert compare.stage < 3 or tells(error.splitlines()[-1], "mul_", "blocks.2.fc.weight")


class Teacher(nn.Module):
    """It follows the student inside forward, as BYOL's and DINO's do."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = Tower(), Tower().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters()):
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
            target = self.teacher(x)
        return self.student(x) + 0.1 * target


def test_a_teacher_that_follows_inside_forward_is_right_or_refused(compare):
    loud = compare.stage == 3 or compare.dtype is MIXED
    error = compare(lambda job: job.train(0, 1, 2, 3), build=Teacher, optimizer=students, may_raise=loud)
    assert error is None or NAMES_THE_REMEDY in error


def students(model):
    return torch.optim.SGD(model.student.parameters(), lr=0.1, momentum=0.9)


# --- averages, penalties ----------------------------------------------------------------------------------


def test_an_average_of_the_weights_over_named_parameters(compare):
    def script(job):
        average = {name: value.clone() for name, value in job.model.state_dict().items()}
        for step in range(3):
            job.train(step)
            pairs = job.model.named_parameters() if job.zero is None else job.zero.named_parameters()
            for name, value in pairs:
                average[name].lerp_(value.detach(), 0.1)
        for value in average.values():
            job.see(value)

    compare(script)


def test_torchs_averaged_model_follows_or_says_how(compare):
    def script(job):
        for step in range(2):
            job.train(step)
            with job.full_params():
                job.averaged.update_parameters(job.model)
        for value in job.averaged.state_dict().values():
            job.see(value)
        if job.zero is not None:
            with pytest.raises(RuntimeError, match="AveragedModel"):
                AveragedModel(job.model)

    def before(job):
        job.averaged = AveragedModel(job.model)

    compare(script, before=before)


def test_a_loop_over_parameters_after_a_step_is_true_or_refused(compare):
    def script(job):
        average = [param.detach().clone() for param in job.model.parameters()]
        for step in range(2):
            job.train(step)
            for mean, param in zip(average, job.model.parameters()):
                mean.lerp_(param.detach().to(mean.dtype), 0.1)
        for mean in average:
            job.see(mean)

    error = compare(script, may_raise=compare.stage == 3)
    assert (error is not None) == (compare.stage == 3)
    assert error is None or NAMES_THE_REMEDY in error


@pytest.mark.check
@pytest.mark.parametrize("first", [False, True], ids=["after-forward", "before-forward"])
def test_a_penalty_in_the_loss_is_right_or_refused(compare_fp32, first):
    def script(job):
        def penalty():
            return 0.1 * sum(param.square().sum() for param in job.model.parameters())

        for step in range(3):
            job.optimizer.zero_grad()
            loss = penalty() + job.loss(step) if first else job.loss(step) + penalty()
            loss.backward()
            job.optimizer.step()

    error = compare_fp32(script, may_raise=compare_fp32.stage == 3, tolerance=1e-6)
    assert (error is not None) == (compare_fp32.stage == 3)
    assert error is None or NAMES_THE_REMEDY in error


def test_add_penalty_is_a_penalty_in_the_loss(compare):
    def script(job):
        def penalty(name, param):
            return 0.1 * param.square().sum() + 0.1 * param.norm() if "weight" in name else None

        for step in range(3):
            job.optimizer.zero_grad()
            loss = job.loss(step)
            if job.zero is None:
                total = sum(penalty(name, p) for name, p in job.model.named_parameters() if "weight" in name)
                (loss + total).backward()
            else:
                loss.backward()
                total = job.zero.add_penalty(penalty)
            job.see(total)
            job.optimizer.step()

    compare(script, tolerance=1e-6 if compare.dtype is EXACT else None)


# --- writes -----------------------------------------------------------------------------------------------


def each(operation):
    def write(job):
        with torch.no_grad():
            for param in job.model.parameters():
                operation(param)

    return write


def assign(param):
    param.data = param.data * 0.5


def exchange(job):
    """Other values for an evaluation, then the old ones again, as classes for an average of the weights do it."""
    old_values = [param.data for param in job.model.parameters()]
    for param in job.model.parameters():
        param.data = param.data * 0.5
    job.see_output()
    for param, values in zip(job.model.parameters(), old_values):
        param.data = values


def from_a_vector(job):
    numel = sum(param.numel() for param in job.model.parameters())
    nn.utils.vector_to_parameters(
        torch.linspace(-1, 1, numel).to(next(job.model.parameters()).dtype), job.model.parameters()
    )


WRITES = {
    "clamp data": each(lambda param: param.data.clamp_(-0.1, 0.1)),
    "clamp": each(lambda param: param.clamp_(-0.1, 0.1)),
    "copy": each(lambda param: param.copy_(param * 0.5)),
    "add": each(lambda param: param.add_(0.1)),
    "assign data": each(assign),
    "exchange data": exchange,
    "init": each(lambda param: nn.init.constant_(param, 0.05)),
    "vector_to_parameters": from_a_vector,
    "apply": lambda job: job.model.apply(lambda m: m.weight.data.mul_(0.5) if isinstance(m, nn.Linear) else None),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_after_a_step_counts_or_names_the_remedy(compare, write):
    def script(job):
        job.train(0)
        WRITES[write](job)
        job.train(1)

    has_copies = compare.stage == 3 or compare.dtype is MIXED
    error = compare(script, may_raise=has_copies)
    assert (error is not None) == has_copies
    assert error is None or NAMES_THE_REMEDY in error


@pytest.mark.parametrize("write", WRITES)
def test_a_write_under_full_params_counts(compare_fp32, write):
    def script(job):
        job.train(0)
        with job.full_params():
            WRITES[write](job)
        job.train(1)

    compare_fp32(script)


def test_a_graph_from_before_a_step_raises_as_in_torch(compare):
    def script(job):
        loss, stale = job.loss(0), job.loss(1)
        loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()
        job.train(2, 3)

    compare(script)


# --- what lies in optimizer.param_groups ------------------------------------------------------------------


def params_of(job):
    return [param for group in job.optimizer.param_groups for param in group["params"]]


SHARD_USES = {
    "torch's clip_grad_norm_": lambda job: nn.utils.clip_grad_norm_(params_of(job), 1.0),
    "unscale": lambda job: [p.grad.div_(2) for p in params_of(job)],
    "noise": lambda job: [setattr(p, "grad", p.grad + torch.randn_like(p)) for p in params_of(job)],
    "a norm of gradients": lambda job: torch.stack([p.grad.norm() for p in params_of(job)]).norm(),
    "a norm": lambda job: torch.stack([p.norm() for p in params_of(job)]).norm(),
    "clamp": lambda job: [p.data.clamp_(-0.1, 0.1) for p in params_of(job)],
    "decay": lambda job: [p.mul_(0.9) for p in params_of(job)],
}


@pytest.mark.parametrize("use", SHARD_USES)
def test_a_shard_is_refused_outside_the_step_with_the_remedy(compare, use):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        job.loss(1).backward()
        if job.zero is not None:
            with torch.no_grad(), pytest.raises(RuntimeError, match=r"zero\.full_params\(|zero\.clip_grad_norm_"):
                SHARD_USES[use](job)
        job.optimizer.step()
        job.see([tuple(p.shape) for p in params_of(job)][:0])

    compare(script)


class Averaging(torch.optim.SGD):
    """Schedule-free's way: outside step() its parameters are exchanged for others, and back."""

    @torch.no_grad()
    def eval(self):
        for param in (param for group in self.param_groups for param in group["params"]):
            param.mul_(0.5)

    @torch.no_grad()
    def train(self):
        for param in (param for group in self.param_groups for param in group["params"]):
            param.mul_(2)


def test_an_optimizer_that_changes_parameters_in_eval_and_train_is_followed(compare):
    def script(job):
        for step in range(2):
            job.train(step)
            job.optimizer.eval()
            job.see_output()
            job.see_state()
            job.optimizer.train()
            job.see_output()

    compare(script, optimizer=lambda model: Averaging(model.parameters(), lr=0.1, momentum=0.9), elementwise=True)


class Recording(torch.optim.SGD):
    def step(self, closure=None, *more, record=None):
        self.seen = more, record
        return super().step(closure)


def test_a_step_gets_all_its_arguments(compare_fp32):
    def script(job):
        def closure():
            job.optimizer.zero_grad()
            loss = job.loss(0)
            loss.backward()
            return loss

        for arguments, named in (((closure, 1), {"record": 2}), ((), {"closure": closure, "record": 3})):
            job.optimizer.step(*arguments, **named)
            job.see(job.optimizer.seen)

    compare_fp32(script, optimizer=lambda model: Recording(model.parameters(), lr=0.1), elementwise=True)


# --- freezing ---------------------------------------------------------------------------------------------


def test_frozen_for_a_turn_and_back(compare):
    """A generator's turn, or a reference forward without adapters."""

    def script(job):
        for step in range(3):
            job.model.requires_grad_(False)
            job.see_output(step)
            job.model.requires_grad_(True)
            job.train(step)
            job.model.blocks[1].requires_grad_(False)
            job.train(step + 10)  # the others train on
            job.model.blocks[1].requires_grad_(True)

    compare(script)


@pytest.mark.parametrize("optimizer", [momentum, descent])
def test_unfrozen_one_after_the_other(compare, optimizer):
    def freeze(job):
        for module in (job.model.enter, *job.model.blocks[:2]):
            module.requires_grad_(False)

    def script(job):
        for step, module in enumerate((job.model.blocks[1], job.model.blocks[0].fc, job.model.enter)):
            job.train(step)
            module.requires_grad_(True)
            job.see([name for name, param in job.model.named_parameters() if param.requires_grad])
        job.train(3, 4)

    def all_parameters(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if optimizer is momentum else 0)

    compare(script, optimizer=all_parameters, before=freeze)


def test_unfreezing_what_the_optimizer_was_not_given_is_refused_there(compare):
    def freeze(job):
        job.model.blocks[1].requires_grad_(False)

    def script(job):
        job.train(0)
        if job.zero is not None:
            with pytest.raises(RuntimeError, match=naming("blocks.1.norm.weight", "param group")):
                job.model.blocks[1].requires_grad_(True)
        job.train(1)

    compare(script, optimizer=all_but_block_1, before=freeze)


def all_but_block_1(model):
    return momentum(nn.ModuleList([model.enter, model.leave, model.blocks[0], model.blocks[2]]))


# --- shapes of models -------------------------------------------------------------------------------------


class LastBlockIsTheOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(D_IN, D)
        self.net = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D_OUT))

    def forward(self, x):
        return self.net(self.embed(x))


class ListsOfLists(nn.Module):
    def __init__(self, pair=lambda *modules: nn.ModuleList(modules)):
        super().__init__()
        self.enter, self.leave = nn.Linear(D_IN, D), nn.Linear(D, D_OUT)
        self.layers = nn.ModuleList(pair(nn.LayerNorm(D), Block()) for _ in range(2))

    def forward(self, x):
        h = self.enter(x)
        for pair in self.layers:
            for module in pair.values() if isinstance(pair, nn.ModuleDict) else pair:
                h = h + torch.tanh(module(h))
        return self.leave(h)


class PassesOn(Block):
    """Under a condition it returns its input itself, as layer drop does."""

    passes = False

    def forward(self, h):
        return h if self.passes else super().forward(h)


def drops_a_layer(job):
    for step in range(3):
        job.model.blocks[step].passes = True
        job.train(step)
        job.model.blocks[step].passes = False


SHAPES = {
    "the last block is the output": (LastBlockIsTheOutput, None),
    "lists of lists": (ListsOfLists, None),
    "lists of dicts": (lambda: ListsOfLists(lambda a, b: nn.ModuleDict({"norm": a, "block": b})), None),
    "layer drop": (lambda: Tower(PassesOn), drops_a_layer),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_an_ordinary_shape_trains_right(compare_fp32, shape):
    build, script = SHAPES[shape]
    compare_fp32(script or (lambda job: job.train(0, 1, 2)), build=build)


# --- what ranks must have in common -----------------------------------------------------------------------


def set_other_rate(job):
    job.optimizer.param_groups[1]["lr"] = 0.1 / (1 + job.rank)


def set_other_betas(job):
    job.optimizer.param_groups[0]["momentum"] = 0.9 - job.rank / 10


def initialise_with_own_seed(job):
    """At stage 3 the write itself raises."""
    torch.manual_seed(job.rank)
    nn.init.normal_(job.model.blocks[1].fc.weight)


def replace_the_head(job):
    job.model.leave = nn.Linear(D, D_OUT)


def add_a_parameter(job):
    job.model.blocks[0].register_parameter("extra", nn.Parameter(torch.ones(2)))


def freeze_on_one_rank(job):
    job.model.blocks[0].requires_grad_(job.rank == 0)


def clear_gradients_on_one_rank(job):
    job.loss(1).backward()
    if job.rank == 1:
        job.optimizer.zero_grad()
    job.loss(2).backward()
    job.optimizer.step()


DIFFERENT = {  # what happens on ranks -> what the error of the next step names
    set_other_rate: ("lr", "group 1", "0.1 on rank 0", "0.05 on rank 1"),
    set_other_betas: ("momentum", "group 0", "0.9 on rank 0", "0.8 on rank 1"),
    initialise_with_own_seed: ("blocks.1", "zero.full_params()"),
    replace_the_head: ("leave.weight",),
    add_a_parameter: ("blocks.0.extra",),
    freeze_on_one_rank: ("requires_grad of blocks.0", "True on rank 0", "False on rank 1"),
    clear_gradients_on_one_rank: ("zero_grad()", "3 on rank 0", "1 on rank 1"),
}


@pytest.mark.check
@pytest.mark.parametrize("what", DIFFERENT, ids=lambda what: what.__name__)
def test_what_ranks_must_have_in_common_is_compared_at_the_step(compare_fp32, what):
    def script(job):
        job.train(0)
        if job.zero is not None:
            what(job)
        job.train(1)

    error = compare_fp32(script, may_raise=True)
    assert error is not None and all(name in error.splitlines()[-1] for name in DIFFERENT[what])


def test_the_same_write_on_every_rank_is_no_difference(compare_fp32):
    def script(job):
        job.train(0)
        if job.zero is None or "parameters" not in job.zero.sharded:
            torch.manual_seed(5)
            nn.init.normal_(job.model.blocks[1].fc.weight)
        job.train(1)

    if compare_fp32.stage < 3:
        compare_fp32(script)


# --- copies, transforms, moves ----------------------------------------------------------------------------

NO_COPIES = {
    "deepcopy": lambda job: copy.deepcopy(job.optimizer),
    "torch.save": lambda job: torch.save(job.optimizer, io.BytesIO()),
    "deepcopy of its groups": lambda job: copy.deepcopy(job.optimizer.param_groups),
}
UNDER_FULL_PARAMS = {
    "jvp": lambda job, x: torch.func.jvp(lambda x: job.model(x), (x,), (torch.ones_like(x),)),
    "vmap of jacrev": lambda job, x: torch.func.vmap(torch.func.jacrev(lambda x: job.model(x)))(x),
    "trace": lambda job, x: torch.jit.trace(job.model, x),
    "export": lambda job, x: torch.export.export(job.model, (x,)),
    "functional_call under grad": lambda job, x: torch.func.grad(lambda x: job.model(x).sum())(x),
}


def test_copies_of_the_optimizer_are_refused_and_a_snapshot_shares_nothing(compare_fp32):
    def script(job):
        for step in range(2):
            job.train(step)
            if job.zero is None:
                continue
            for copy_it in NO_COPIES.values():
                with pytest.raises(RuntimeError, match=r"zero\.state_dict\(\)|full_params"):
                    copy_it(job)
            snapshot, rate = job.zero.state_dict(), job.optimizer.param_groups[0]["lr"]
            assert snapshot["groups"][0]["lr"] is not rate
            job.zero.load_state_dict(snapshot)
            assert job.optimizer.param_groups[0]["lr"] is not snapshot["groups"][0]["lr"]

    def with_a_tensor(model):
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.05))

    compare_fp32(script, optimizer=with_a_tensor)


@pytest.mark.parametrize("what", UNDER_FULL_PARAMS)
def test_transforms_and_traces_work_under_full_params_and_name_it_elsewhere(compare_fp32, what):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        job.model.eval()
        x = job.batch(1)[0]
        if job.zero is not None and what != "export":
            with pytest.raises(RuntimeError, match=r"zero\.full_params\("):
                UNDER_FULL_PARAMS[what](job, x)
        with job.full_params():
            UNDER_FULL_PARAMS[what](job, x)
        job.model.train()
        job.train(1)

    compare_fp32(script)


@pytest.mark.parametrize("place", ["cpu:0", "cpu"])
def test_a_move_to_where_the_model_is_harms_nothing(compare, place):
    def script(job):
        for step in range(2):
            job.model.to(place)
            job.model.to(torch.device(place))
            job.train(step)
            job.model.to(place)

    compare(script)
