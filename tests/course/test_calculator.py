"""The calculator of model states: its numbers against the paper's cells, its picture against its numbers."""

import copy
import math
import sys
from itertools import product

import pytest
from says import naming, tells

from zero_mini.course.lesson import recorded
from zero_mini.course.plots import calculator
from zero_mini.course.plots.calculator import draw_calculator
from zero_mini.course.plots.model_states import BACKWARD, BETWEEN, MODELS, STAGES, formula, found, states_by_stage
from zero_mini.course.plots.palette import CATEGORY, tint
from zero_mini.memory.formulas import OPTIMIZERS, model_state_bytes
from zero_mini.trainer.gpt import PRESETS, parameter_count

colors = pytest.importorskip("matplotlib.colors")
CATEGORIES = ("parameters", "gradients", "optimizer")
RECORDS = (recorded("memory"), recorded("speed"))
PSI_124M = parameter_count(PRESETS["124M"])
MASTER = " over an fp32 master"


def totals(*args, **options):
    return [sum(held.values()) for held in states_by_stage(*args, **options).values()]


# --- numbers --------------------------------------------------------------------------------------


def test_figure_1_of_the_paper():
    assert [round(total / 1e9, 1) for total in totals("7.5B", 64)] == [120, 31.4, 16.6, 1.9]


# GB at stages 1, 2, 3, as the paper's table 1 prints them.
@pytest.mark.parametrize(
    "model, N, printed",
    [
        ("7.5B", 1, (120, 120, 120)),
        ("7.5B", 4, (52.5, 41.3, 30)),
        ("7.5B", 1024, (30.1, 15.1, 0.12)),
        ("128B", 4, (896, 704, 512)),
        ("128B", 16, (608, 368, 128)),
        ("128B", 64, (536, 284, 32)),
        ("128B", 1024, (513, 257, 2)),
        ("1T", 1, (16000, 16000, 16000)),
        ("1T", 64, (4187, 2218, 250)),
        ("1T", 1024, (4011, 2013, 15.6)),
    ],
)
def test_cells_of_table_1(model, N, printed):
    for total, cell in zip(totals(model, N)[1:], printed, strict=True):
        digit = 1 if cell >= 100 else 0.1 if cell >= 10 else 0.01
        assert abs(total / 1e9 - cell) < digit  # the paper rounds some cells and truncates others


# Bytes a parameter: parameters, gradients, K = the fp32 master where the computation has 16 bits, 4 for each state.
BYTES = {
    ("bf16", "AdamW"): (2, 2, 12),
    ("fp16", "AdamW"): (2, 2, 12),
    ("fp32", "AdamW"): (4, 4, 8),
    ("bf16", "SGD with momentum"): (2, 2, 8),
    ("fp16", "SGD with momentum"): (2, 2, 8),
    ("fp32", "SGD with momentum"): (4, 4, 4),
    ("bf16", "SGD"): (2, 2, 4),
    ("fp16", "SGD"): (2, 2, 4),
    ("fp32", "SGD"): (4, 4, 0),
}


@pytest.mark.parametrize("precision, optimizer", BYTES)
@pytest.mark.parametrize("psi, N", [(192, 1), (192, 4), (10, 3), (7, 64)])
def test_a_stage_divides_its_categories_by_n_exactly_and_no_others(precision, optimizer, psi, N):
    p, g, o = BYTES[precision, optimizer]
    expected = {
        0: (p * psi, g * psi, o * psi),
        1: (p * psi, g * psi, o * psi / N),
        2: (p * psi, g * psi / N, o * psi / N),
        3: (p * psi / N, g * psi / N, o * psi / N),
    }
    shown = states_by_stage(psi, N, precision, optimizer)
    assert list(shown) == [0, 1, 2, 3]
    for stage, held in shown.items():
        assert tuple(held) == CATEGORIES
        assert list(held.values()) == pytest.approx(expected[stage], rel=1e-12)


@pytest.mark.parametrize("precision, optimizer", BYTES)
def test_the_formulas_that_are_written_give_the_numbers(precision, optimizer):
    psi, N = 1000, 8
    each = dict(zip(CATEGORIES, BYTES[precision, optimizer]))
    for stage, total in enumerate(totals(psi, N, precision, optimizer)):
        assert eval(formula(stage, each).replace("Ψ", "*psi"), {"psi": psi, "N": N}) == total


def test_a_preset_is_its_number_of_parameters():
    for name, config in PRESETS.items():
        assert states_by_stage(name, 2) == states_by_stage(parameter_count(config), 2)
    assert list(MODELS) == [*PRESETS, "7.5B", "128B", "1T"]


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"model": "7B"}, ("model", "'7B'", "124M", "7.5B", "13e9")),
        ({"model": 0}, ("model", "got 0", "> 0", "13e9")),
        ({"model": -1e9}, ("model", "-1000000000.0", "> 0")),
        ({"model": math.nan}, ("model", "nan", "> 0")),
        ({"model": None}, ("model", "None", "124M")),
        ({"N": 0}, ("N must", "got 0", "> 0", "pass 1")),
        ({"N": -2}, ("N must", "got -2")),
        ({"N": 2.5}, ("N must", "got 2.5", "whole")),
        ({"stage": 4}, ("stage", "got 4", "0, 1, 2, 3")),
        ({"stage": -1}, ("stage", "got -1")),
        ({"precision": "fp8"}, ("precision", "'fp8'", "fp32, bf16, fp16")),
        ({"optimizer": "Lion"}, ("optimizer", "'Lion'", "AdamW, SGD with momentum, SGD")),
        ({"gpu_GB": 0}, ("gpu_GB", "got 0", "> 0", "as 80")),
        ({"gpu_GB": "80"}, ("gpu_GB", "'80'", "number")),
    ],
)
def test_a_refusal_names_the_value_what_is_accepted_and_what_to_do(wrong, said):
    with pytest.raises(ValueError) as refused:
        draw_calculator(**wrong)
    assert all(part in str(refused.value) for part in said), refused.value
    assert "\n" not in str(refused.value)
    if not wrong.keys() & {"stage", "gpu_GB"}:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            states_by_stage(**{"model": "7.5B", "N": 64} | wrong)


def test_the_formula_itself_refuses_an_optimizer_that_it_does_not_know():
    with pytest.raises(ValueError, match=naming("AdamW, SGD with momentum, SGD", "'Lion'")):
        model_state_bytes(100, 2, 1, optimizer="Lion")


# --- the records ----------------------------------------------------------------------------------


def test_what_was_found_is_what_the_records_hold():
    memory, speed = RECORDS
    found_124M = found(memory, speed, PSI_124M, 2, "bf16")
    machine = f"2 x {memory['machine']['card']}"
    stages = memory["memory"]["stages"]
    assert found_124M[machine, BACKWARD] == {int(s): sum(row["held_bytes"].values()) for s, row in stages.items()}
    seen = set()
    for entry in speed["works"].values():
        N, psi = entry["machine"]["cards"], entry["work"]["psi"]
        where = f"{N} x {entry['machine']['card']}", BETWEEN
        held = found(memory, speed, psi, N, "bf16")[where]
        ours = {stage: entry["systems"].get(f"zero-{stage}", {}).get("state_bytes") for stage in STAGES}
        for stage, nbytes in ours.items():
            if nbytes:
                is_first = (where, psi, stage) not in seen
                assert held[stage] == nbytes if is_first else held[stage] == pytest.approx(nbytes, rel=0.03)
                seen.add((where, psi, stage))


def test_nothing_was_found_of_another_model_or_number_or_precision():
    for psi, N, precision in ((PSI_124M + 1, 2, "bf16"), (PSI_124M, 4, "bf16"), (PSI_124M, 2, "fp16")):
        assert found(*RECORDS, psi, N, precision) == {}


def test_two_machines_are_kept_apart_and_a_stage_that_failed_is_left_out():
    memory, speed = copy.deepcopy(RECORDS)
    memory["machine"]["card"] = "another"
    work = next(entry for entry in speed["works"].values() if entry["work"]["psi"] == PSI_124M)
    work["systems"]["zero-1"], work["systems"]["zero-2"]["state_bytes"] = {"failed": "out of memory"}, None
    speed["works"] = {"only": work}
    held = found(memory, speed, PSI_124M, 2, "bf16")
    assert list(held) == [("2 x another", BACKWARD), (f"2 x {work['machine']['card']}", BETWEEN)]
    assert [list(by_stage) for by_stage in held.values()] == [[0, 1, 2, 3], [0, 3]]


def test_what_was_measured_is_what_the_formula_says_less_the_gradients_between_steps():
    paper = states_by_stage("124M", 2)
    for (_, moment), held in found(*RECORDS, PSI_124M, 2, "bf16").items():
        for stage in (0, 1, 2):  # at stage 3 slots replace the 16-bit shard
            gone = paper[stage]["gradients"] if moment == BETWEEN else 0
            assert held[stage] == pytest.approx(sum(paper[stage].values()) - gone, rel=1e-3)


# --- the picture ----------------------------------------------------------------------------------

CASES = [
    {},
    {"stage": 0},
    {"model": "124M", "N": 2, "stage": 3, "records": RECORDS},
    {"model": "1.5B", "N": 2, "stage": 1, "gpu_GB": 24, "records": RECORDS},
    {"model": "1T", "N": 1024, "stage": 3, "optimizer": "SGD with momentum"},
    {"model": "nano", "N": 1, "stage": 1, "precision": "fp32", "optimizer": "SGD"},
    {"model": 13e9, "N": 3, "precision": "fp32", "optimizer": "SGD with momentum"},
]


def numbers(model="7.5B", N=64, precision="bf16", optimizer="AdamW", **_):
    return states_by_stage(model, N, precision, optimizer)


def written(figure):
    axes = figure.axes[0]
    return [text.get_text() for text in (*figure.texts, *axes.texts, *axes.get_xticklabels())]


@pytest.mark.parametrize("case", CASES)
def test_stacks_are_as_high_as_the_numbers_and_the_chosen_stage_alone_stands_out(case):
    axes = draw_calculator(**case).axes[0]
    chosen = case.get("stage", 2)
    bars = [
        (round(b.get_x() + b.get_width() / 2), b.get_y(), b.get_height(), colors.to_hex(b.get_fc()))
        for b in axes.patches
    ]
    expected = []
    for stage, held in numbers(**case).items():
        start = 0
        for category in CATEGORIES:
            if held[category]:
                colour = tint(CATEGORY[category], 1 if stage == chosen else 0.4)
                expected.append((stage, start, held[category], colour))
                start += held[category]
    assert [(bar[0], bar[3]) for bar in bars] == [(bar[0], bar[3]) for bar in expected]
    assert [bar[1:3] for bar in bars] == [pytest.approx(bar[1:3]) for bar in expected]
    labels = axes.get_xticklabels()
    bold = [label.get_text().splitlines()[0] for label in labels if label.get_fontweight() == "bold"]
    assert bold == [f"stage {chosen}"]
    assert len([text for text in axes.texts if text.get_fontweight() == "bold"]) == 1


def test_totals_formulas_and_settings_are_written_as_the_paper_has_them():
    told = written(draw_calculator())
    assert {"120 GB", "31.4 GB", "16.6 GB", "1.88 GB", "stage 2\nP_os+g\n2Ψ + 14Ψ/N", "optimizer 12Ψ"} <= set(told)
    note = next(text for text in told if text.startswith("parameters Ψ"))
    assert f"Ψ = 7,500,000,000, ranks N = 64, bf16{MASTER}, AdamW\n" in note
    assert tells(note, "Stage 2", "16.6 GB", "20.8 %", "80 GB", "1e9 bytes")
    told = written(draw_calculator(stage=0, precision="fp32", optimizer="SGD with momentum"))
    assert any("fp32, SGD with momentum\nStage 0: 90.0 GB on each rank, more than a GPU's 80 GB" in t for t in told)
    assert {"parameters 4Ψ", "optimizer 4Ψ", " a GPU's\n 80 GB"} <= set(told)


@pytest.mark.parametrize("gpu_GB, has_line", [(1, True), (80, True), (141, True), (480, True), (481, False)])
def test_the_line_is_at_the_memory_of_the_gpu_or_words_say_how_far_above(gpu_GB, has_line):
    figure = draw_calculator(gpu_GB=gpu_GB)  # stage 0: 120 GB
    axes = figure.axes[0]
    assert [list(line.get_ydata()) for line in axes.lines] == ([[gpu_GB * 1e9] * 2] if has_line else [])
    assert (f" ↑ a GPU's {gpu_GB} GB,\n {gpu_GB / 120:.2f} x stage 0" in written(figure)) == (not has_line)
    assert axes.get_ylim()[1] > (gpu_GB * 1e9 if has_line else 120e9)


def test_dots_lie_at_what_was_measured_and_their_machine_is_named():
    figure = draw_calculator("124M", 2, 3, records=RECORDS)
    held = found(*RECORDS, PSI_124M, 2, "bf16")
    dots = [[(round(x), y) for x, y in points.get_offsets()] for points in figure.axes[0].collections]
    assert dots == [list(by_stage.items()) for by_stage in held.values()]
    legend = [text for text in written(figure) if "measured" in text]
    assert len(legend) == len(held) >= 2
    for text, (machine, moment) in zip(legend, held, strict=True):
        assert text.endswith(f"measured on {machine}, {moment}") and text[0] == ("●" if moment == BACKWARD else "◆")


@pytest.mark.parametrize(
    "other",
    [
        {"records": None},
        {"N": 4},
        {"precision": "fp16"},
        {"precision": "fp32"},
        {"optimizer": "SGD"},
        {"model": "774M"},
    ],
)
def test_there_are_no_dots_where_nothing_was_measured(other):
    figure = draw_calculator(**{"model": "124M", "N": 2, "records": RECORDS} | other)
    assert not figure.axes[0].collections
    assert not any("measured" in text for text in written(figure))


def boxes(figure):
    """(text, box) of everything written, in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).draw()
    axes = figure.axes[0]
    texts = (*figure.texts, *axes.texts, *axes.get_xticklabels())
    return [(text.get_text(), text.get_window_extent()) for text in texts]


@pytest.mark.parametrize("model", ["nano", "124M", "1.5B", "7.5B", "1T", 9.99e14])
def test_no_text_leaves_the_page_or_lies_on_another(model):
    trainings = (("bf16", "AdamW"), ("fp32", "SGD with momentum"))
    for (stage, gpu_GB), N, (precision, optimizer) in product(((0, 141), (3, 16)), (2, 1024), trainings):
        figure = draw_calculator(model, N, stage, precision, optimizer, gpu_GB, RECORDS)
        there, edge = boxes(figure), figure.bbox
        for index, (text, box) in enumerate(there):
            assert edge.x0 <= box.x0 and box.x1 <= edge.x1 and edge.y0 <= box.y0 and box.y1 <= edge.y1, text
            for other, over in there[:index]:
                across, down = min(box.x1, over.x1) - max(box.x0, over.x0), min(box.y1, over.y1) - max(box.y0, over.y0)
                assert across <= 2 or down <= 6, (text, other)  # pixels of 1120: boxes are higher than their letters


# --- the widget -----------------------------------------------------------------------------------


def test_the_widget_draws_anew_at_each_change():
    pytest.importorskip("ipywidgets")
    widget = calculator.calculator()
    controls = {control.description: control for control in widget.children if hasattr(control, "description")}
    assert set(controls) == {"model", "N", "stage", "precision", "optimizer", "gpu_GB"}
    assert widget.f is draw_calculator
    assert set(controls["optimizer"].options) == set(OPTIMIZERS)
    widget.update()
    assert "16.6 GB" in written(widget.result)
    for name, value in (("model", "124M"), ("N", 2), ("stage", 3), ("optimizer", "SGD"), ("gpu_GB", 24)):
        before, controls[name].value = widget.result, value
        assert widget.result is not before
    highest = max(bar.get_y() + bar.get_height() for bar in widget.result.axes[0].patches)
    assert highest == pytest.approx(sum(states_by_stage("124M", 2, "bf16", "SGD")[0].values()))
    assert not widget.result.axes[0].collections
    controls["optimizer"].value = "AdamW"
    assert len(widget.result.axes[0].collections) >= 2


def test_every_choice_of_the_widget_is_accepted():
    pytest.importorskip("ipywidgets")
    for control in calculator.calculator().children:
        for value in getattr(control, "options", ()):
            draw_calculator(**{control.description: value})


def test_importing_it_needs_no_widgets(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert draw_calculator().axes
    with pytest.raises(ImportError):
        calculator.calculator()
