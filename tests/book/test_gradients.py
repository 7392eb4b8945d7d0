"""Gradients: when there are some, how they add up, and other ways to differentiate (how that is seen: both_ways.py)."""

import contextlib
import itertools
import types

import pytest
import torch
from both_ways import ROWS, Job, descent

# --- gradients ----------------------------------------------------------------------------------------


def test_there_is_no_gradient_before_a_backward_and_after_zero_grad(compare):
    def script(job):
        for step in range(2):
            job.see([param.grad for param in job.model.parameters()])
            job.see(torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0))
            job.train(step)
            job.optimizer.zero_grad()

    compare(script)


def test_a_frozen_parameter_has_no_gradient_after_a_backward(compare):
    def freeze(job):
        job.model.blocks[1].requires_grad_(False)
        job.model.enter.bias.requires_grad_(False)

    def script(job):
        job.loss(0).backward()
        job.see([param.grad for param in job.model.parameters() if not param.requires_grad])
        job.optimizer.step()

    compare(script, before=freeze)


@pytest.mark.parametrize(
    "discard",
    [
        lambda job: job.optimizer.zero_grad(),
        lambda job: job.optimizer.zero_grad(set_to_none=False),
        lambda job: job.optimizer.zero_grad(False),
        lambda job: job.model.zero_grad(),
        lambda job: job.model.zero_grad(set_to_none=False),
    ],
    ids=["optimizer", "optimizer-zeros", "optimizer-positional", "model", "model-zeros"],
)
def test_zero_grad_discards_gradients_wherever_they_are(compare, discard):
    def script(job):
        job.train(0)
        job.loss(1).backward()
        discard(job)
        job.loss(2).backward()
        job.optimizer.step()
        discard(job)
        job.optimizer.step()

    compare(script)


def test_zero_grad_to_zeros_lets_momentum_and_decay_go_on_and_to_none_stops_them(compare):
    def script(job):
        job.optimizer.zero_grad(set_to_none=False)
        job.optimizer.step()
        job.see_state()
        job.train(0)
        job.optimizer.zero_grad(set_to_none=False)
        for _ in range(3):
            job.optimizer.step()
        job.see_state()
        job.optimizer.zero_grad(set_to_none=True)
        job.optimizer.step()

    compare(script)


def test_zero_grad_under_no_sync_discards_what_was_accumulated(compare):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        with job.no_sync():
            job.loss(1).backward()
            job.optimizer.zero_grad(set_to_none=False)
        job.optimizer.step()
        with job.no_sync():
            job.loss(2).backward()
        job.optimizer.zero_grad()
        job.loss(3).backward()
        job.optimizer.step()

    compare(script)


def test_zero_grad_between_forward_and_backward_keeps_the_new_gradients(compare):
    def script(job):
        for step in range(3):
            loss = job.loss(step)
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()

    compare(script)


def test_zero_grad_of_a_submodule_discards_its_gradients_or_raises(compare):
    def script(job):
        job.loss(0).backward()
        job.model.blocks[1].zero_grad()
        job.optimizer.step()

    compare(script, optimizer=descent, may_raise=True)


def test_setting_every_grad_to_none_discards_gradients_or_raises(compare):
    def script(job):
        job.train(0)
        for param in job.model.parameters():
            param.grad = None
        job.loss(1).backward()
        job.optimizer.step()

    compare(script, may_raise=True)


def test_a_grad_set_by_hand_is_what_the_step_uses_or_raises(compare):
    def script(job):
        for param in job.model.parameters():
            param.grad = torch.ones_like(param)
        job.optimizer.step()
        job.train(1)

    compare(script, may_raise=True)


def test_without_zero_grad_gradients_add_up_over_steps(compare):
    def script(job):
        for step in range(3):
            job.loss(step).backward()
            job.optimizer.step()
        job.optimizer.step()

    compare(script)


def test_a_step_without_a_backward_changes_nothing(compare):
    def script(job):
        job.optimizer.step()
        job.see_state()
        job.train(0)
        job.optimizer.zero_grad()
        job.optimizer.step()
        job.optimizer.step()
        job.train(1)

    compare(script)


def test_a_forward_without_a_backward_changes_nothing(compare):
    def script(job):
        job.train(0)
        job.loss(9)
        job.train(1)
        kept = job.loss(9)
        job.train(2)
        job.see(kept.requires_grad)

    compare(script)


def test_two_backwards_through_one_graph_add_up(compare):
    def script(job):
        for step in range(2):
            loss = job.loss(step)
            job.optimizer.zero_grad()
            loss.backward(retain_graph=True)
            (2 * loss).backward()
            job.optimizer.step()

    compare(script)


def test_two_losses_of_one_forward_add_up(compare):
    def script(job):
        for step in range(2):
            x, y = job.batch(step)
            output = job.model(x)
            job.optimizer.zero_grad()
            (output - y).square().mean().backward(retain_graph=True)
            output[:, 0].sin().mean().backward()
            job.optimizer.step()

    compare(script)


def test_a_second_backward_without_retain_graph_raises_as_in_torch(compare):
    def script(job):
        loss = job.loss(0)
        loss.backward()
        with pytest.raises(RuntimeError, match="retain_graph"):
            loss.backward()
        job.train(1, 2)

    compare(script)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["oldest-first", "newest-first"])
def test_two_forwards_then_two_backwards_add_up(compare, order):
    def script(job):
        for step in range(2):
            job.optimizer.zero_grad()
            losses = job.loss(10 * step), job.loss(10 * step + 1)
            for index in order:
                losses[index].backward()
            job.optimizer.step()

    compare(script)


def test_one_backward_of_two_forwards_adds_up(compare):
    def script(job):
        for step in range(2):
            job.optimizer.zero_grad()
            (job.loss(10 * step) + 2 * job.loss(10 * step + 1)).backward()
            job.optimizer.step()

    compare(script)


def test_micro_batches_add_up_with_and_without_no_sync(compare):
    def script(job):
        for step in range(3):
            job.optimizer.zero_grad()
            for micro in range(3):
                with job.no_sync() if step != 1 and micro < 2 else contextlib.nullcontext():
                    job.loss(10 * step + micro).backward()
            job.optimizer.step()

    compare(script)


def test_unequal_micro_batches_weighted_by_their_rows_are_one_batch(compare):
    """A rank's mean counts as much as another's, however many rows it is of: so the loss is a sum, times N over all."""

    def script(job):
        for step in range(2):
            x, y = Job.batch(types.SimpleNamespace(zero=None, model=job.model), step)
            bounds = [[0, 1, 5], [5, 8, ROWS]][job.rank] if job.zero is not None else [0, 2, ROWS]
            scale = (1 if job.zero is None else job.world_size) / y.numel()
            job.optimizer.zero_grad()
            for first, after in itertools.pairwise(bounds):
                errors = job.model(x[first:after].float()) - y[first:after].float()
                (scale * errors.square().sum()).backward()
            job.optimizer.step()

    compare(script)


def test_a_backward_for_some_parameters_alone_leaves_the_others(compare):
    def script(job):
        job.loss(0).backward(inputs=[job.model.leave.weight, job.model.blocks[1].fc.bias])
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.loss(1).backward(inputs=list(job.model.parameters()))
        job.optimizer.step()

    compare(script, optimizer=descent, may_raise=True)


def test_clipping_by_the_optimizers_own_parameters_works_or_raises(compare_fp32):
    def script(job):
        for step in range(2):
            job.optimizer.zero_grad()
            job.loss(step).backward()
            torch.nn.utils.clip_grad_norm_([p for group in job.optimizer.param_groups for p in group["params"]], 0.5)
            job.optimizer.step()

    compare_fp32(script, may_raise=True)


# --- other ways to differentiate ----------------------------------------------------------------------


def test_gradients_with_respect_to_inputs_are_true_and_harm_nothing(compare):
    def script(job):
        for step in range(2):
            job.train(step)
            x = job.batch(5)[0].requires_grad_()
            job.see_rows(torch.autograd.grad(job.model(x).sin().sum(), x)[0])

    compare(script, may_raise=True)


def test_gradients_with_respect_to_inputs_are_none_for_the_optimizer(compare):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        x = job.batch(5)[0].requires_grad_()
        torch.autograd.grad(job.model(x).sum(), x)
        job.optimizer.step()

    compare(script, may_raise=True)


def test_gradients_with_respect_to_a_parameter_are_this_ranks_or_raise(compare):
    def script(job):
        job.train(0)
        weight = job.model.blocks[1].fc.weight
        rows = job.model(job.batch(5)[0])
        rows = rows[job.rank :: job.world_size] if job.zero is None else rows
        job.see(torch.autograd.grad(rows.square().mean(), weight)[0])
        job.train(1)

    compare(script, may_raise=True)


def test_a_gradient_penalty_works_or_raises(compare):
    def script(job):
        for step in range(2):
            job.optimizer.zero_grad()
            x = job.batch(step)[0].requires_grad_()
            (slope,) = torch.autograd.grad(job.model(x).sin().sum(), x, create_graph=True)
            (job.loss(step) + slope.square().mean()).backward()
            job.optimizer.step()

    compare(script, may_raise=True)


def test_training_goes_on_after_a_refused_create_graph(compare):
    def script(job):
        job.train(0)
        loss = job.loss(1)
        with contextlib.suppress(RuntimeError):
            loss.backward(create_graph=True)
        job.train(2, 3)

    compare(script)


def test_functional_call_uses_the_tensors_it_is_given(compare):
    def script(job):
        job.train(0)
        state = {name: 2 * value for name, value in job.model.state_dict().items()}
        with torch.no_grad():
            job.see_rows(torch.func.functional_call(job.model, state, (job.batch(5)[0],)))
        job.train(1)

    compare(script, may_raise=True)
