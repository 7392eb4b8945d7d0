"""zero.full_params(): whole parameters, to be read and changed (how that is seen: both_ways.py)."""

import contextlib

import torch
from both_ways import D_OUT, descent
from torch import nn


def test_full_params_shows_all_values_in_the_precision_of_the_master_copy(compare):
    def script(job):
        for step in range(2):
            with job.full_params():
                job.see_params()
                job.see([param.dtype for param in job.model.parameters()])
            loss = job.loss(step)
            with job.full_params():
                job.see_params()
            loss.backward()
            job.optimizer.step()
            with job.full_params():
                job.see_params()

    compare(script)


def test_a_write_under_full_params_counts_for_training(compare):
    def script(job):
        job.train(0)
        with job.full_params(), torch.no_grad():
            job.model.enter.weight.mul_(2)
            job.model.blocks[1].fc.weight.add_(0.5)
            nn.init.ones_(job.model.leave.bias)
        job.see_output()
        job.train(1)

    compare(script)


def test_what_rank_0_writes_under_full_params_counts_on_all_ranks(compare):
    def script(job):
        with job.full_params(), torch.no_grad():
            for param in job.model.parameters():
                param.add_(0.05 if job.rank == 0 or job.zero is None else 7.0)
        job.see_state()
        job.train(0)

    compare(script)


def test_a_write_to_data_under_full_params_counts_or_raises(compare):
    def script(job):
        with job.full_params():
            job.model.blocks[1].fc.weight.data.mul_(2)
            job.model.leave.weight.data = job.model.leave.weight.data * 2
        job.see_state()
        job.train(0)

    compare(script, may_raise=True)


def test_full_params_with_grads_shows_the_mean_gradient(compare):
    def script(job):
        with job.full_params(grads=True):
            job.see([param.grad for param in job.model.parameters()])
        for step in range(2):
            job.loss(step).backward()
            with job.full_params(grads=True):
                for param in job.model.parameters():
                    job.see(param.grad)
                    job.see((param.grad.shape, param.grad.dtype))
            job.optimizer.step()

    compare(script)


def test_a_gradient_changed_under_full_params_is_what_the_step_uses(compare):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        job.loss(1).backward()
        with job.full_params(grads=True):
            for param in job.model.parameters():
                param.grad.mul_(-3)
        job.optimizer.step()

    compare(script)


def test_a_gradient_that_rank_0_changes_under_full_params_counts_on_all_ranks(compare):
    def script(job):
        job.loss(0).backward()
        with job.full_params(grads=True):
            for param in job.model.parameters():
                if job.rank == 0 or job.zero is None:
                    param.grad.fill_(3.0)
        job.optimizer.step()

    compare(script)


def test_a_gradient_replaced_under_full_params_is_what_the_step_uses_or_raises(compare):
    def script(job):
        job.loss(0).backward()
        with job.full_params(grads=True):
            job.model.leave.bias.grad = torch.ones(D_OUT)
            job.model.blocks[1].fc.weight.grad = None
        job.optimizer.step()

    compare(script, optimizer=descent, may_raise=True)


def test_a_forward_under_full_params_runs_on_them(compare):
    def script(job):
        job.train(0)
        with job.full_params(), torch.no_grad():
            job.model.blocks[1].fc.bias.add_(1)
            job.see_rows(job.model(job.batch(5)[0]))
            job.see_rows(job.model(job.batch(6)[0]))
        job.see_output()
        job.train(1)

    compare(script)


def test_training_under_full_params_works_or_raises(compare):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        with job.full_params():
            job.loss(1).backward()
        job.optimizer.step()
        job.train(2)

    compare(script, may_raise=True)


def test_a_graph_made_under_full_params_trains_or_raises_later(compare):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        with job.full_params():
            loss = job.loss(1)
        loss.backward()
        job.optimizer.step()

    compare(script, may_raise=True)


def test_full_params_can_be_nested(compare):
    def script(job):
        job.loss(0).backward()
        with job.full_params():
            with torch.no_grad():
                job.model.enter.weight.mul_(2)
            with job.full_params(grads=True):
                job.see(job.model.leave.weight.grad)
                with torch.no_grad():
                    job.model.leave.weight.mul_(2)
            job.see_params()
            job.see_state()
            with torch.no_grad():
                job.model.blocks[0].fc.weight.mul_(2)
        job.optimizer.step()
        job.train(1)

    compare(script)


def test_an_exception_under_full_params_leaves_a_usable_model_with_what_was_written(compare):
    def script(job):
        job.train(0)
        for grads in (False, True):
            with contextlib.suppress(KeyError), job.full_params(grads=grads), torch.no_grad():
                job.model.blocks[1].fc.weight.add_(1)
                raise KeyError
        job.see_state()
        job.train(1)

    compare(script)


def test_an_exception_while_gradients_are_shown_leaves_them_as_they_were(compare):
    def script(job):
        job.loss(0).backward()
        with contextlib.suppress(KeyError), job.full_params(grads=True):
            raise KeyError
        job.loss(1).backward()
        job.optimizer.step()

    compare(script)


def test_full_params_between_forward_and_backward_harms_nothing(compare):
    def script(job):
        for step in range(2):
            loss = job.loss(step)
            with job.full_params():
                job.see_params()
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()

    compare(script)
