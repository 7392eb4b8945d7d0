"""Draw FAILURES.md beside this file: what goes wrong in systems like this one, what happens here, and who shows it.

    python tests/tables.py

What happens is what the tests recorded (faults.json, saving.json and models.json in zero_mini/measured), by the command
in RECORD.
"""

import json
import re
from pathlib import Path

FOLDER = Path(__file__).parent
MEASURED = FOLDER.parent / "zero_mini" / "measured"
RECORD = (
    "python -m pytest --record zero_mini/measured"
    " tests/book/test_{faults,parity,gradients,exceptions,evaluation,unusual_models}.py"
    " tests/binding/test_{refusals,parameters,full_params,optimizers}.py"
    " tests/checkpoint/test_checkpoint.py tests/trainer/test_resume.py"
)

# What may go wrong -> the tests, models of the zoo and refusals that show what does happen.
Lines = dict[str, list[str]]

AUTOGRAD: Lines = {
    "autograd's views of a weight keep memory that was to be freed": [
        "test_the_walk_and_a_recorder_of_every_allocation_agree_within_one_percent"
    ],
    "a weight is gathered in place after autograd saved it": [
        "the model 'plain blocks'",
        "test_a_write_in_place_between_forward_and_backward_raises_as_in_torch",
    ],
    "a new parameter object at every gather": [
        "test_names_shapes_flags_and_counts_of_parameters_stay_what_they_were",
        "test_hooks_of_the_user_run_as_often_and_with_the_same_effect",
    ],
    "the optimizer holds other tensors than the model": [
        "test_a_parameter_of_the_optimizer_that_is_not_the_models_is_refused",
        "test_a_trainable_parameter_that_no_group_has_is_refused",
        "refused: add_param_group",
    ],
    "tied weights": [
        "the model 'tied embedding and head'",
        "the model 'tied blocks'",
        "test_a_tied_gradient_is_the_sum_of_both_uses",
    ],
    "frozen parameters, LoRA on a frozen base": [
        "the model 'frozen'",
        "the model 'only biases'",
        "the model 'checkpoint of frozen, re-entrant'",
    ],
    "a parameter is frozen or unfrozen in mid-training": [
        "test_a_parameter_frozen_after_zeroify_stays_as_it_is_or_raises",
        "test_a_parameter_unfrozen_after_zeroify_trains_or_raises",
    ],
    "parameters without a gradient on some ranks, or on all": [
        "the model 'unused on some ranks'",
        "the model 'unit skipped on some ranks'",
        "test_what_no_rank_used_in_a_step_is_left_alone_as_torch_ddp_leaves_it",
    ],
    "a mixture of experts, routed by the data": ["the model 'mixture of experts'"],
    "ranks run different units": ["test_ranks_that_run_different_blocks_never_take_each_others_numbers"],
    "a module called twice, or in another order": ["the model 'unit called twice'", "the model 'order changes'"],
    "conditional branches": ["the model 'branches'", "the model 'unit skipped on some ranks'"],
    "`block.forward(x)` called directly": ["test_a_forward_called_directly_works_or_is_loud"],
    "a weight used outside its module": [
        "test_a_block_used_outside_its_own_call_works_or_is_loud",
        "test_the_roots_weights_may_be_used_at_any_time_in_its_forward",
    ],
    "an output changed in place": [
        "the model 'outputs changed in place'",
        "test_an_output_changed_in_place_trains_right",
    ],
    "an output that is a view, changed in place": [
        "test_an_output_that_is_a_view_changed_in_place_works_or_raises",
        "test_a_view_changed_in_place_raises_at_every_stage_or_at_none",
    ],
    "an output of an unknown class": ["test_a_blocks_output_of_an_unknown_class_works_or_raises"],
    "the first unit's input has no gradient": ["the model 'no root'", "the model 'recurrent'"],
    "recompute inside a backward": [
        "the model 'checkpoint'",
        "the model 'checkpoint, re-entrant'",
        "the model 'checkpoint of two, re-entrant'",
        "the model 'checkpoint without early stop'",
        "the model 'checkpoint in checkpoint, re-entrant'",
        "the model 'checkpoint of what is called twice, re-entrant'",
    ],
    "the end of a backward is asked for where there is none": [
        "test_two_backwards_through_one_graph_add_up",
        "test_gradients_with_respect_to_inputs_are_true_and_harm_nothing",
    ],
    "a gather before the update is done, an update before the reduction is": [
        "test_late_collectives_change_no_bit",
        "test_a_slow_wire_shows_that",
    ],
    "what is being sent is freed or used again": ["test_late_collectives_change_no_bit", "test_a_slow_wire_shows_that"],
    "`eval()`, `no_grad`, `inference_mode`": [
        "test_evaluation_between_steps_is_right_and_harms_nothing",
        "test_evaluation_between_forward_and_backward_is_right_and_harms_nothing",
    ],
    "generation, also to different lengths": [
        "test_a_generation_that_feeds_outputs_back_is_right",
        "test_a_generation_whose_ranks_stop_at_different_lengths_is_right_if_they_take_equal_steps",
    ],
    "an exception in forward, and on": ["test_training_goes_on_after_an_exception_in_forward"],
    "an exception in backward, and on": [
        "test_training_goes_on_after_an_exception_in_backward",
        "test_the_gradients_of_a_failed_backward_count_as_in_torch_or_raise",
    ],
    "deepcopy": ["refused: deepcopy"],
    "pickle": ["refused: pickle"],
    "`module.to(dtype)`": ["refused: to dtype", "test_moving_to_where_it_is_harms_nothing"],
    "`load_state_dict` after wrapping": [
        "test_load_state_dict_reaches_what_the_optimizer_updates",
        "refused: load_state_dict(assign=True)",
    ],
    "double backward, a gradient penalty": ["test_a_gradient_penalty_works_or_raises"],
    "`retain_graph`, two losses": [
        "test_two_backwards_through_one_graph_add_up",
        "test_two_losses_of_one_forward_add_up",
    ],
    "forward, forward, backward, backward": ["test_two_forwards_then_two_backwards_add_up"],
    "hooks of the user": [
        "the model 'hooks and parametrisations'",
        "test_hooks_of_the_user_run_as_often_and_with_the_same_effect",
    ],
    "`weight_norm` and other parametrisations": ["test_parametrised_weights_train_as_alone"],
    "`torch.compile` of blocks": ["test_blocks_are_compiled_once_and_train_alike"],
    "0-dim and 0-element parameters, fewer elements than ranks": [
        "the model '0-dim and 0-element'",
        "the model 'odd sizes'",
        "test_slices_and_pieces_cover_the_buffer_once_and_each_element_is_in_its_group",
        "test_slices_of_n_ranks_become_those_of_m_and_again_of_n_to_the_bit",
    ],
    "one giant layer among tiny ones": ["the model 'one giant layer'"],
    "recurrent networks": ["the model 'recurrent'"],
    "convolutions, BatchNorm, channels_last": [
        "the model 'convolutions and batch norm, channels last'",
        "test_a_channels_last_model_keeps_its_strides",
    ],
    "buffers": ["the model 'buffers'", "test_batch_norm_buffers_are_those_of_torch_ddp_on_every_rank"],
    "complex parameters": ["refused: complex"],
    "mixed dtypes": ["refused: two dtypes"],
    "two parameters in one memory": ["refused: one memory"],
    "`Embedding(sparse=True)`": ["refused: sparse", "test_a_sparse_gradient_that_no_module_announced_is_refused"],
    "a little more memory every step": ["test_nothing_is_left_behind_by_many_steps"],
    "any of these in any order": ["test_any_training_is_what_it_is_alone"],
}

NUMBERS: Lines = {
    "a sum where a mean is meant": [
        "test_whole_numbers_come_out_exact_in_any_order_of_summation",
        "test_parity_fails_if",
    ],
    "unequal batches, weighted by their tokens": ["test_unequal_micro_batches_weighted_by_their_rows_are_one_batch"],
    "the loss depends on the number of ranks": [
        "test_losses_depend_neither_on_the_stage_nor_on_the_number_of_ranks",
        "test_in_float64_every_stage_trains_as_one_process_with_the_whole_batch",
    ],
    "accumulation": [
        "test_micro_batches_add_up_with_and_without_no_sync",
        "test_micro_batches_add_up_as_in_torch_ddp_with_and_without_no_sync",
        "test_gradients_of_micro_batches_add_up_and_are_zero_where_there_was_none",
    ],
    "a local norm, padding or tied weights counted in it": [
        "test_clipping_is_torchs_and_its_norm_one_float_everywhere",
        "test_memory_full_of_numbers_that_nobody_wrote_changes_no_gradient_and_no_norm",
    ],
    "torch's own `clip_grad_norm_`": ["refused: torch's clip_grad_norm_"],
    "an fp16 overflow that one rank alone sees": ["test_an_overflow_that_one_rank_alone_can_see_skips_the_step_on_all"],
    "clipping of scaled gradients": [
        "test_all_stages_decide_and_train_alike_on_four_ranks_with_micro_batches_and_clipping"
    ],
    "weight decay reaches the wrong group": [
        "test_options_of_a_group_can_be_changed_by_hand",
        "test_slices_and_pieces_cover_the_buffer_once_and_each_element_is_in_its_group",
    ],
    "a scheduler built on the old optimizer": ["test_a_scheduler_built_before_or_after_zeroify_sets_the_learning_rate"],
    "dropout draws anew in a recompute": ["the model 'checkpoint'", "test_parity_fails_if"],
    "ranks start from different values": ["the model 'ranks start differently'"],
    "a bf16 master copy": [
        "test_bf16_is_torch_ddp_with_a_bf16_copy_to_the_bit",
        "test_bf16_strays_no_further_from_fp32_than_twice_what_torch_ddp_in_bf16_does",
    ],
}


def recorded(name: str) -> list[dict]:
    return json.loads((MEASURED / f"{name}.json").read_text())[name]


def draw() -> str:
    """The page."""
    parts = [
        "# What goes wrong, and what happens then",
        "Drawn by `python tests/tables.py` from what the tests saw and recorded: `" + RECORD + "`.",
        "## One rank fails",
        "Real processes on gloo, 3 ranks. The others leave within 15 s of a death, or when the time-out that they were"
        " given is over (2 s here), and one of them says:",
        drawn("faults", {"what happens": "what", "stage": "stages", "to rank": "culprit", "another rank says": "says"}),
        "(torch's FSDP2 says nothing when ranks gather different units of one size: each computes with parts of both."
        " `test_fsdp2_says_nothing_when_ranks_gather_different_units` shows it.)",
    ]
    parts += [
        "## A checkpoint, or the job around it, is hurt",
        "What was saved before is whole in every case, and the newest whole one is used.",
        drawn("saving", {"what happens": "what", "result": "result", "message": "says"}),
    ]
    for title, lines in (("Sharding and autograd", AUTOGRAD), ("Numbers", NUMBERS)):
        rows = [[line, outcome(tests), "<br>".join(map(shown, tests))] for line, tests in lines.items()]
        parts += [f"## {title}", table(["what goes wrong elsewhere", "here", "shown by"], rows)]
    return "\n\n".join(parts) + "\n"


def drawn(name: str, columns: dict[str, str]) -> str:
    """What was recorded, row by row; `columns`: the head of each -> the cell that is in it."""
    shown = {"stages": lambda stages: ", ".join(map(str, stages)), "says": quoted}
    rows = [[shown.get(key, str)(row[key]) for key in columns.values()] for row in recorded(name)]
    return table(list(columns), rows)


def outcome(tests: list[str]) -> str:
    """What the tests saw, at all four stages unless a stage is named; the first message of each."""
    seen: list[str] = []
    for test in tests:
        rows = [row for row in recorded("models") if row["what"] == test]
        good = [row["result"] for row in rows if row["result"].startswith("as ")]
        bad = [row for row in rows if not row["result"].startswith("as ")]
        seen += good
        if bad:
            stages = ", ".join(map(str, sorted(bad[0]["stages"])))
            where = "" if stages in ("any", "0, 1, 2, 3") else f" (stage {stages})"
            seen.append(f"{'or ' if good else ''}raises{where}: {quoted(bad[0]['says'])}")
    return "<br>".join(dict.fromkeys(seen)) or "right"


def shown(test: str) -> str:
    return f"`{test}`" if test.startswith("test_") else test


def quoted(message: str) -> str:
    return "*" + re.sub(r"([*_|<>])", r"\\\1", message) + "*"


def table(head: list[str], rows: list[list[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


if __name__ == "__main__":
    (FOLDER / "FAILURES.md").write_text(draw())
