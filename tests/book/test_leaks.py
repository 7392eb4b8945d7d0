"""Nothing is left behind by many steps."""

import gc

import pytest
import torch
from both_ways import EXACT, STAGES, Job, Tower, momentum

from zero_mini.binding.parameter import plainly


def objects_and_tensor_bytes() -> tuple[int, int]:
    gc.collect()
    objects = gc.get_objects()
    with plainly():
        storages = [each.untyped_storage() for each in objects if issubclass(type(each), torch.Tensor)]
    return len(objects), sum(
        {each._cdata: int(each.nbytes()) for each in storages}.values()
    )  # a traced one is symbolic


def growth(stage: int, dtype: torch.dtype | None, what: str) -> tuple[int, int]:
    """Objects and tensor bytes that 15 rounds of training or of evaluation leave behind, if 15 more do so as well."""
    job = Job(Tower, momentum, None, stage=stage, dtype=dtype)
    counts = []
    for step in range(41):
        if what == "training":
            job.train(step)
            job.zero.clip_grad_norm_(1.0)
        else:
            with torch.no_grad():
                job.model(job.batch(step)[0])
        if step in (10, 25, 40):
            counts.append(objects_and_tensor_bytes())
    return tuple(min(second - first, third - second) for first, second, third in zip(*counts))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("what", ["training", "evaluation"])
def test_nothing_is_left_behind_by_many_steps(ranks, stage, what):
    for objects, tensor_bytes in ranks(2).run(growth, stage, EXACT, what):
        assert tensor_bytes <= 0
        assert objects < 8  # less than one object every second round
