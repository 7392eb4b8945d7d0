"""The optimizer, what is built on it, and its states in zero.state_dict() (how that is seen: both_ways.py)."""

import copy

import pytest
import torch
from both_ways import MIXED, TOLERANCE, Job, Tower, double_tower, momentum
from torch import nn

# --- the optimizer and what is built on it ------------------------------------------------------------

SCHEDULERS = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda t: 0.5**t, lambda t: 1 + t]),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=6),
}


@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_built_before_or_after_zeroify_sets_the_learning_rate(compare_fp32, name, built):
    def build(job):
        job.scheduler = SCHEDULERS[name](job.optimizer)

    def script(job):
        if built == "after":
            build(job)
        for step in range(4):
            job.train(step)
            job.scheduler.step()
            job.see([group["lr"] for group in job.optimizer.param_groups])
            job.see(job.scheduler.get_last_lr())

    compare_fp32(script, before=build if built == "before" else None)


def test_options_of_a_group_can_be_changed_by_hand(compare):
    def script(job):
        job.train(0)
        job.optimizer.param_groups[0]["lr"] = 0.5
        job.optimizer.param_groups[1]["weight_decay"] = 0.5
        job.train(1)

    compare(script)


@pytest.mark.parametrize("as_keyword", [False, True])
def test_step_with_a_closure_runs_it_once_and_returns_its_loss(compare, as_keyword):
    def script(job):
        for step in range(3):

            def closure(step=step):
                job.see("called")
                job.optimizer.zero_grad()
                loss = job.loss(step)
                loss.backward()
                return loss

            loss = job.optimizer.step(closure=closure) if as_keyword else job.optimizer.step(closure)
            job.see(loss.requires_grad)

    compare(script)


def test_a_closure_that_raises_leaves_a_usable_optimizer(compare):
    def script(job):
        def closure():
            job.loss(0).backward()
            raise KeyError("from the closure")

        job.train(1)
        job.see_error(lambda: job.optimizer.step(closure))
        job.train(2, 3)

    compare(script)


def test_step_hooks_of_the_user_run_once_a_step(compare):
    def register(job):
        job.optimizer.register_step_pre_hook(lambda *_: job.see("before the step"))
        job.optimizer.register_step_post_hook(lambda *_: job.see("after it"))

    compare(lambda job: job.train(0, 1), before=register)
    compare(lambda job: (register(job), job.train(0, 1)))


def scaled_steps(job, scaler, unscale: bool = False) -> None:
    for step in range(3):
        job.optimizer.zero_grad()
        scaler.scale(job.loss(step)).backward()
        if unscale:
            scaler.unscale_(job.optimizer)
        scaler.step(job.optimizer)
        scaler.update()


def test_a_disabled_grad_scaler_changes_nothing(compare):
    compare(lambda job: scaled_steps(job, torch.amp.GradScaler("cpu", enabled=False)))
    compare(lambda job: scaled_steps(job, torch.amp.GradScaler("cpu", enabled=False), unscale=True))


@pytest.mark.parametrize("unscale", [False, True])
def test_an_enabled_grad_scaler_works_or_raises(compare, unscale):
    compare(lambda job: scaled_steps(job, torch.amp.GradScaler("cpu", init_scale=4.0), unscale), may_raise=True)


def test_autocast_around_the_model_means_what_it_means_alone(compare):
    def script(job):
        for step in range(3):
            job.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = job.loss(step)
            loss.backward()
            job.optimizer.step()

    compare(script, tolerance=TOLERANCE[MIXED])


# --- zero.state_dict ----------------------------------------------------------------------------------


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return torch.optim.AdamW([{"params": params[::2], "weight_decay": 0.3}, {"params": params[1::2]}], lr=0.03)


def train_on(steps, build, optimizer, saved=None, already=(), **wrap) -> tuple[dict, dict]:
    """Train, from `saved` if it is given; -> (zero.state_dict(), model.state_dict())."""
    torch.manual_seed(0 if saved is None else 1)
    job = Job(build, optimizer, None, **wrap)
    job.train(*already)
    if saved is not None:
        job.zero.load_state_dict(saved)
    job.train(*steps)
    return job.zero.state_dict(), copy.deepcopy(job.model.state_dict())


def train_alone(steps, build, optimizer) -> dict:
    torch.manual_seed(0)
    job = Job(build, optimizer, None)
    job.train(*steps)
    return job.model.state_dict()


def farthest(one: dict, other: dict) -> float:
    assert list(one) == list(other)
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.parametrize(
    "source, target, kind",
    [
        ((0, 1), (3, 2), "fp64"),
        ((1, 2), (0, 3), "fp32"),
        ((2, 3), (1, 1), "fp64"),
        ((3, 2), (2, 3), "fp64"),
        ((2, 2), (3, 1), "fp32"),
        ((3, 3), (1, 2), "fp64"),
        ((1, 2), (3, 3), "fp64"),
    ],
    ids=lambda place: place if isinstance(place, str) else "stage{}-n{}".format(*place),
)
def test_training_goes_on_from_a_saved_state_at_another_stage_and_number_of_ranks(ranks, source, target, kind):
    build, tolerance, optimizer = {"fp32": (Tower, 2e-6, momentum), "fp64": (double_tower, 1e-9, adamw)}[kind]
    saved, _ = ranks(source[1]).run(train_on, (0, 1), build, optimizer, stage=source[0])[0]
    (alone,) = ranks(1).run(train_alone, (0, 1, 2, 3), build, optimizer)
    for _, state in ranks(target[1]).run(train_on, (2, 3), build, optimizer, saved, already=(7,), stage=target[0]):
        assert farthest(state, alone) < tolerance


def test_at_the_same_stage_and_number_of_ranks_a_saved_state_goes_on_to_the_bit(compare):
    wrap = dict(stage=compare.stage, dtype=compare.dtype)
    saved, _ = compare.ranks(2).run(train_on, (0, 1), Tower, adamw, **wrap)[0]
    resumed = compare.ranks(2).run(train_on, (2, 3), Tower, adamw, saved, already=(7,), **wrap)
    whole = compare.ranks(2).run(train_on, (0, 1, 2, 3), Tower, adamw, **wrap)
    for (_, one), (_, other) in zip(resumed, whole):
        assert farthest(one, other) == 0


def test_a_state_saved_before_the_first_step_starts_anew(compare):
    wrap = dict(stage=compare.stage, dtype=compare.dtype)
    saved, _ = compare.ranks(2).run(train_on, (), Tower, adamw, **wrap)[0]
    resumed = compare.ranks(2).run(train_on, (0, 1), Tower, adamw, saved, already=(7, 8), **wrap)
    whole = compare.ranks(2).run(train_on, (0, 1), Tower, adamw, **wrap)
    for (_, one), (_, other) in zip(resumed, whole):
        assert farthest(one, other) == 0


def test_the_learning_rate_that_a_scheduler_reached_is_saved_and_loaded(compare):
    """As torch's own pair of optimizer.state_dict() and scheduler.state_dict() has it."""

    def script(job):
        torch.manual_seed(3)
        fresh = Job(Tower, momentum, None, **job.wrap)
        schedules = [SCHEDULERS["StepLR"](each.optimizer) for each in (job, fresh)]
        for step in range(2):
            job.train(step)
            schedules[0].step()
        schedules[1].load_state_dict(schedules[0].state_dict())
        if job.zero is None:
            fresh.model.load_state_dict(job.model.state_dict())
            fresh.optimizer.load_state_dict(job.optimizer.state_dict())
        else:
            fresh.zero.load_state_dict(job.zero.state_dict())
        for step in range(2, 4):
            fresh.train(step)
            schedules[1].step()
            job.see([group["lr"] for group in fresh.optimizer.param_groups])
        job.see_state(fresh.model)

    compare(script)
