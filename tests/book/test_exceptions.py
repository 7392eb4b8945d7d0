"""Training goes on after an exception in forward or backward (how that is seen: both_ways.py)."""

import pytest
from both_ways import descent, fail, failing_backward


@pytest.mark.parametrize("before", [False, True], ids=["after-its-forward", "before-its-forward"])
@pytest.mark.parametrize("where", ["enter", "blocks.0", "blocks.1", "blocks.2", "leave"])
def test_training_goes_on_after_an_exception_in_forward(compare_fp32, where, before):
    def script(job):
        job.train(0)
        for step in (1, 2):
            module = job.model.get_submodule(where)
            hook = module.register_forward_pre_hook(fail) if before else module.register_forward_hook(fail)
            with pytest.raises(KeyError):
                job.loss(step)
            hook.remove()
            job.see_output()
            job.train(step)

    compare_fp32(script)


@pytest.mark.parametrize("block", [0, 1, 2])
def test_training_goes_on_after_an_exception_in_backward(compare, block):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        failing_backward(job, 1, block)
        job.train(2)
        job.see_state()
        failing_backward(job, 3, block)
        job.train(4)

    compare(script)


def test_the_gradients_of_a_failed_backward_count_as_in_torch_or_raise(compare):
    def accumulated(job):
        job.train(0)
        job.optimizer.zero_grad()
        failing_backward(job, 1, block=1)
        job.loss(2).backward()
        job.optimizer.step()

    def stepped(job):
        job.train(0)
        job.optimizer.zero_grad()
        failing_backward(job, 1, block=1)
        job.optimizer.step()

    compare(accumulated, optimizer=descent, may_raise=True)
    compare(stepped, optimizer=descent, may_raise=True)


def test_a_state_dict_after_an_exception_is_true(compare):
    def script(job):
        job.train(0)
        hook = job.model.blocks[1].register_forward_hook(fail)
        with pytest.raises(KeyError):
            job.loss(1)
        hook.remove()
        job.see_state()
        failing_backward(job, 1, block=1)
        job.see_state()
        with job.full_params():
            job.see_params()
        job.train(2)

    compare(script)
