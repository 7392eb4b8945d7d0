"""Forwards that no backward follows: evaluation and generation (how that is seen: both_ways.py)."""

import contextlib

import pytest
import torch
from both_ways import D_IN, D_OUT
from torch.nn import functional as F


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_evaluation_between_steps_is_right_and_harms_nothing(compare, mode):
    def script(job):
        for step in range(3):
            job.model.eval()
            with mode():
                for batch in (50, 51):
                    job.see_rows(job.model(job.batch(batch)[0]))
            job.model.train()
            job.train(step)

    compare(script)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_generation_that_feeds_outputs_back_is_right(compare, mode):
    def script(job):
        job.train(0)
        with mode():
            x = job.batch(50)[0]
            for _ in range(5):
                x = F.pad(job.model(x), (0, D_IN - D_OUT))
            job.see_rows(x)
        job.train(1)

    compare(script)


def test_a_generation_whose_ranks_stop_at_different_lengths_is_right_if_they_take_equal_steps(compare):
    """At stage 3 every forward is a collective: who is done goes on until all are."""

    def script(job):
        job.train(0)
        with torch.inference_mode():
            x = job.batch(50)[0]
            kept, lengths = x.clone(), torch.zeros(len(x))
            running = torch.ones(len(x), dtype=torch.bool)
            while any(job.every(running.any().item())):
                x = F.pad(job.model(x), (0, D_IN - D_OUT))
                kept[running] = x[running]
                lengths += running
                running &= x[:, 0] > 1.6 * lengths - 3
            job.see_rows(kept)
            job.see_rows(lengths)
        job.train(1)

    compare(script)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_forward_and_backward_is_right_and_harms_nothing(compare, mode):
    def script(job):
        for step in range(3):
            job.optimizer.zero_grad()
            loss = job.loss(step)
            with mode():
                job.see_rows(job.model(job.batch(50)[0]))
            loss.backward()
            with mode():
                job.see_rows(job.model(job.batch(50)[0]))
            job.optimizer.step()

    compare(script)
