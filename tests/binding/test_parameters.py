"""A parameter read, saved, loaded or written at any moment is true, or it is loud (how that is seen: both_ways.py)."""

import copy
import io

import pytest
import torch
from both_ways import D, Job, Tower, descent
from torch import nn

# --- reading a parameter ------------------------------------------------------------------------------


def test_a_parameter_read_between_turns_is_true_or_refused(compare):
    def script(job):
        job.see_params()
        for step in range(3):
            loss = job.loss(step)
            job.see_params()
            loss.backward()
            job.see_params()
            job.optimizer.step()
            job.see_params()
            job.optimizer.zero_grad()
            job.see_params()
            job.see_output()
            job.see_params()

    compare(script, may_refuse=compare.stage == 3)


def test_a_parameter_read_in_another_units_turn_is_true_or_refused(compare):
    def script(job):
        for module in (*job.model.blocks, job.model.leave):
            module.register_forward_hook(lambda *_: job.see_params())
        for param in (job.model.leave.bias, *(block.norm.bias for block in job.model.blocks)):
            param.register_hook(lambda _: job.see_params())
        job.train(0, 1, 2)

    compare(script, may_refuse=compare.stage == 3)


def test_names_shapes_flags_and_counts_of_parameters_stay_what_they_were(compare):
    def script(job):
        for _ in range(2):
            for name, param in job.model.named_parameters():
                job.see((name, tuple(param.shape), param.numel(), param.device.type))
                job.see((param.requires_grad, param.is_leaf, isinstance(param, nn.Parameter)))
            job.see([type(module).__name__ for module in job.model.modules()])
            job.train(0)

    compare(script)


# --- state_dict ---------------------------------------------------------------------------------------


def test_state_dict_is_whole_true_and_fp32_at_every_moment(compare):
    def script(job):
        job.see_state()
        for step in range(2):
            loss = job.loss(step)
            job.see_state()
            loss.backward()
            job.see_state()
            job.see_state(job.model.blocks[1])
            job.optimizer.step()
            job.see_state()
            job.optimizer.zero_grad()
            with torch.no_grad():
                job.see_state()
            with torch.inference_mode():
                job.see_output()
                job.see_state()
            with job.full_params():
                job.see_state()
                job.see_state(job.model.blocks[2].fc)
        job.train(2)

    compare(script)


def test_state_dict_of_a_submodule_right_after_a_step_is_true_and_harms_nothing(compare):
    def script(job):
        for step, module in enumerate((job.model.blocks[1], job.model.leave, job.model.blocks[0].norm)):
            job.train(step)
            job.see_state(module)
        job.train(3)

    compare(script)


def test_state_dict_in_the_midst_of_a_forward_is_true_and_harms_nothing(compare):
    def script(job):
        hook = job.model.blocks[1].register_forward_hook(lambda *_: job.see_state())
        job.train(0, 1)
        hook.remove()
        job.train(2)

    compare(script)


def test_a_copied_state_dict_keeps_its_values_and_can_be_saved(compare):
    def script(job):
        job.train(0)
        copied = copy.deepcopy(job.model.state_dict())
        file = io.BytesIO()
        torch.save(job.model.state_dict(), file)
        job.train(1)
        file.seek(0)
        for state in (copied, torch.load(file, weights_only=True)):
            for value in state.values():
                job.see(value)
        plain = Tower()
        plain.load_state_dict(copied)
        job.see_rows(plain(Job.batch(job, 7)[0]))

    compare(script)


def test_state_dict_keep_vars_gives_true_values_or_an_error(compare):
    def script(job):
        job.train(0)
        for value in job.model.state_dict(keep_vars=True).values():
            job.see(value)
        job.train(1)

    compare(script, may_raise=True, may_refuse=True)


def test_a_state_dict_hook_that_raises_leaves_a_usable_model(compare):
    def script(job):
        def fail(*_):
            raise RuntimeError("from a hook")

        job.train(0)
        hook = job.model.blocks[1].register_state_dict_post_hook(fail)
        job.see_error(job.model.state_dict)
        hook.remove()
        job.train(1, 2)
        job.see_state()

    compare(script)


# --- load_state_dict ----------------------------------------------------------------------------------


def other_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return Tower().state_dict()


def test_load_state_dict_reaches_what_the_optimizer_updates(compare):
    def script(job):
        job.see(str(job.model.load_state_dict(other_state())))
        job.see_output()
        job.train(0, 1)
        job.model.load_state_dict(other_state())
        job.train(2)

    compare(script)


def test_load_state_dict_between_backward_and_step_keeps_the_gradients(compare):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        job.loss(1).backward()
        job.model.load_state_dict(other_state())
        job.optimizer.step()

    compare(script)


def test_load_state_dict_into_a_submodule_changes_that_one_alone(compare):
    def script(job):
        job.train(0)
        part = {name.removeprefix("blocks.1."): v for name, v in other_state().items() if name.startswith("blocks.1.")}
        job.model.blocks[1].load_state_dict(part)
        job.see_state()
        job.model.blocks[2].fc.load_state_dict({"weight": part["fc.weight"], "bias": part["fc.bias"]})
        job.train(1)

    compare(script)


def test_what_rank_0_loads_counts(compare):
    def script(job):
        state = other_state()
        if job.rank > 0 and job.zero is not None:
            state = {name: value + 1 for name, value in state.items()}
        job.model.load_state_dict(state)
        job.train(0)

    compare(script)


def test_errors_of_load_state_dict_are_torchs_and_leave_a_usable_model(compare):
    def script(job):
        job.train(0)
        state = other_state()
        missing = {name: value for name, value in state.items() if name != "blocks.1.fc.weight"}
        job.see_error(lambda: job.model.load_state_dict(missing))
        job.see_error(lambda: job.model.load_state_dict(state | {"unknown": torch.ones(1)}))
        job.see_error(lambda: job.model.load_state_dict(state | {"enter.bias": torch.ones(D + 1)}))
        job.see_error(lambda: job.model.load_state_dict(state | {"enter.bias": "text"}))
        job.see_error(lambda: job.model.load_state_dict(None))
        job.see(str(job.model.load_state_dict(missing | {"unknown": torch.ones(1)}, strict=False)))
        job.train(1, 2)

    compare(script)


# --- writing a parameter ------------------------------------------------------------------------------


PARTS = {
    "root": lambda model: model.leave.weight,
    "block": lambda model: model.blocks[2].out.weight,
}


MOMENTS = ("start", "evaluation", "backward", "step", "end")


@pytest.mark.parametrize(
    "part, moment", [*(("block", each) for each in MOMENTS), ("root", "start"), ("root", "backward")]
)
def test_a_write_in_place_counts_or_raises(compare, part, moment):
    def script(job):
        def now(name):
            if name == moment:
                with torch.no_grad():
                    PARTS[part](job.model).mul_(2)

        now("start")
        job.see_output()
        now("evaluation")
        job.see_output()
        job.loss(0).backward()
        now("backward")
        job.see_output()
        job.optimizer.step()
        now("step")
        job.see_output()
        now("end")
        job.see_output()
        job.train(1)

    compare(script, may_raise=True)


@pytest.mark.parametrize("part", PARTS)
def test_a_write_in_place_is_in_the_state_dict_or_raises(compare, part):
    def script(job):
        job.train(0)
        job.see_output()
        with torch.no_grad():
            PARTS[part](job.model).mul_(2)
        job.see_state()

    compare(script, may_raise=True)


@pytest.mark.parametrize("part", PARTS)
def test_a_write_in_place_between_forward_and_backward_raises_as_in_torch(compare, part):
    def script(job):
        job.train(0)
        loss = job.loss(1)
        with torch.no_grad():
            PARTS[part](job.model).mul_(2)
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()

    compare(script, may_raise=True)


def test_a_write_in_place_to_a_frozen_parameter_counts_or_raises(compare):
    def freeze(job):
        job.model.blocks[1].requires_grad_(False)

    def script(job):
        job.train(0)
        job.see_output()
        with torch.no_grad():
            job.model.blocks[1].out.weight.mul_(2)
        job.see_output()
        job.train(1)

    compare(script, before=freeze, may_raise=True)


def test_a_hand_written_optimizer_works_or_raises(compare):
    def script(job):
        job.loss(0).backward()
        with torch.no_grad():
            for param in job.model.parameters():
                param -= 0.5 * param.grad
        job.see_output()

    compare(script, may_raise=True)


def test_moving_to_where_it_is_harms_nothing(compare):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        job.model.to("cpu")
        job.model.cpu()
        if job.zero is None or not job.zero.mixed:
            job.model.float()
        job.see_state()
        job.train(1)

    compare(script)


def test_a_parameter_frozen_after_zeroify_stays_as_it_is_or_raises(compare):
    def script(job):
        job.train(0)
        job.optimizer.zero_grad()
        job.model.blocks[1].requires_grad_(False)
        job.train(1, 2)

    compare(script, may_raise=True)


def test_a_parameter_unfrozen_after_zeroify_trains_or_raises(compare):
    def freeze(job):
        job.model.blocks[1].requires_grad_(False)

    def script(job):
        job.train(0)
        job.model.blocks[1].requires_grad_(True)
        job.train(1, 2)

    compare(script, optimizer=descent, before=freeze, may_raise=True)
