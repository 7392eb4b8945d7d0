"""Every number that the ZeRO paper prints about memory and volume, recomputed cell by cell."""

import math

import pytest

from zero_mini.memory.formulas import built_state_bytes, largest_model, model_state_bytes, wire_numel

GB = 1e9  # the paper counts in powers of ten


def total(psi, world_size, stage, **options):
    return sum(model_state_bytes(psi, world_size, stage, **options).values())


def as_printed(gigabytes):
    """Table 1's rounding: whole numbers truncated, smaller ones half up to three figures.

    >>> as_printed(4187.5), as_printed(41.25), as_printed(1.875)
    (4187, 41.3, 1.88)
    """
    if gigabytes >= 100:
        return math.floor(gigabytes)
    digits = 10 if gigabytes >= 10 else 100
    return math.floor(gigabytes * digits + 0.5) / digits


# GB per device at P_os, P_os+g, P_os+g+p (stages 1, 2, 3).
TABLE_1 = {
    7.5e9: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}


@pytest.mark.parametrize("psi", TABLE_1)
@pytest.mark.parametrize("world_size", [1, 4, 16, 64, 256, 1024])
def test_table_1_is_reproduced_as_printed(psi, world_size):
    printed = tuple(as_printed(total(psi, world_size, stage) / GB) for stage in (1, 2, 3))
    assert printed == TABLE_1[psi][world_size]


def test_figure_1_is_reproduced():
    gigabytes = [total(7.5e9, 64, stage) / GB for stage in range(4)]
    assert [round(x, 1) for x in gigabytes] == [120, 31.4, 16.6, 1.9]


def test_a_gpt_of_7_5_billion_parameters_costs_what_figure_1_says():
    layers, width, vocabulary, context = 32, 4352, 50304, 1024
    attention_and_mlp = 12 * width**2 + 9 * width  # matrices, then their biases
    layer_norms = 4 * width
    psi = (
        layers * (attention_and_mlp + layer_norms)
        + (vocabulary + context) * width  # embeddings; the head is tied
        + 2 * width  # the last layer norm
    )
    assert round(psi / 1e9, 3) == 7.498
    gigabytes = [total(psi, 64, stage) / GB for stage in range(4)]
    assert [round(x, 2) for x in gigabytes] == [119.97, 31.40, 16.64, 1.87]


# Billions of parameters on 32 GB devices, 64-way data parallel; a row is the first times mp.
TABLE_2_THEORY = {
    1: (2, 7.6, 14.4, 128),
    2: (4, 15.2, 28.8, 256),
    4: (8, 30.4, 57.6, 512),  # printed as 0.5T
    8: (16, 60.8, 115.2, 1024),  # 1T
    16: (32, 121.6, 230.4, 2048),  # 2T
}


@pytest.mark.parametrize("mp", TABLE_2_THEORY)
def test_table_2_largest_models_are_reproduced(mp):
    # The paper multiplies the rounded cell: 7.6 x 16 = 121.6, where 7.64 x 16 would print 122.3.
    first_row = [largest_model(32 * GB, 64, stage) / 1e9 for stage in range(4)]
    assert [round(round(x, 1) * mp, 1) for x in first_row] == list(TABLE_2_THEORY[mp])
    assert [largest_model(32 * GB, 64, stage, mp=mp) / 1e9 for stage in range(4)] == pytest.approx(
        [x * mp for x in first_row]
    )


def test_the_largest_models_of_two_80_gb_cards():
    billions = [largest_model(85.5e9, 2, stage) / 1e9 for stage in range(4)]
    assert [round(x, 1) for x in billions] == [5.3, 8.6, 9.5, 10.7]


def test_the_largest_model_fills_the_device_exactly():
    for stage in range(4):
        assert total(largest_model(32e9, 8, stage), 8, stage) == pytest.approx(32e9)


def test_savings_approach_4x_8x_and_are_exactly_n_at_stage_3():
    psi, many = 10**9, 10**9
    assert total(psi, many, 0) / total(psi, many, 1) == pytest.approx(4)
    assert total(psi, many, 0) / total(psi, many, 2) == pytest.approx(8)
    for world_size in (1, 2, 64, 1024):
        assert total(psi, world_size, 0) / total(psi, world_size, 3) == world_size


def test_a_trillion_parameters_fit_on_1024_devices_at_stage_3():
    assert total(1e12, 1, 0) == 16e12
    assert total(1e12, 1024, 3) == pytest.approx(15.6e9, rel=0.01)


def test_mixed_precision_states_are_2_2_and_12_bytes_a_parameter():
    assert model_state_bytes(1, 1, 0) == {"parameters": 2, "gradients": 2, "optimizer": 12}
    assert model_state_bytes(8, 2, 1) == {"parameters": 16, "gradients": 16, "optimizer": 48}
    assert model_state_bytes(8, 2, 2) == {"parameters": 16, "gradients": 8, "optimizer": 48}
    assert model_state_bytes(8, 2, 3) == {"parameters": 8, "gradients": 8, "optimizer": 48}


@pytest.mark.parametrize("world_size", [1, 2, 3, 64])
def test_fp32_states_follow_their_formulas(world_size):
    psi, n = 192, world_size
    formulas = [16 * psi, 8 * psi + 8 * psi / n, 4 * psi + 12 * psi / n, 16 * psi / n]
    assert [total(psi, n, stage, compute_dtype_bytes=4) for stage in range(4)] == formulas


def test_several_micro_batches_keep_gradients_in_fp32():
    psi, n = 192, 4
    gradients = [model_state_bytes(psi, n, stage, accumulate=True)["gradients"] for stage in range(4)]
    assert gradients == [4 * psi, 4 * psi, 4 * psi / n, 4 * psi / n]
    # In fp32 they are that wide already.
    assert total(psi, n, 2, compute_dtype_bytes=4, accumulate=True) == total(psi, n, 2, compute_dtype_bytes=4)


def test_stage_3_as_built_keeps_no_16_bit_shard_but_a_root_and_two_slots():
    psi, n = 10**6, 4
    assert sum(built_state_bytes(psi, n, 3).values()) == 14 * psi / n
    built = built_state_bytes(psi, n, 3, root_numel=1000, largest_unit_numel=500)
    assert built == {
        "parameters": 2 * 1000,
        "gradients": 2 * psi / n,
        "optimizer": 12 * psi / n,
        "communication": 2 * 2 * 500,
    }


def test_as_built_equals_the_paper_where_nothing_differs():
    for stage in range(3):
        assert sum(built_state_bytes(960, 4, stage).values()) == total(960, 4, stage)
    # In fp32 the master is the parameter shard: there is nothing to leave out.
    assert sum(built_state_bytes(960, 4, 3, compute_dtype_bytes=4).values()) == 16 * 960 / 4


def test_volume_is_2_psi_and_3_psi_at_stage_3():
    psi, many = 10**9, 10**9
    assert [wire_numel(psi, many, stage) / psi for stage in range(4)] == pytest.approx([2, 2, 2, 3])
    assert [wire_numel(psi, 4, stage) for stage in range(4)] == [1.5e9, 1.5e9, 1.5e9, 2.25e9]


def test_one_rank_sends_nothing():
    assert [wire_numel(10**9, 1, stage) for stage in range(4)] == [0, 0, 0, 0]


def test_volume_with_k_micro_batches():
    psi, n, k = 960, 2, 5
    assert [wire_numel(psi, n, stage, micro_batches=k) for stage in range(4)] == [
        2 * psi / 2,
        2 * psi / 2,
        (k + 1) * psi / 2,
        3 * k * psi / 2,
    ]


@pytest.mark.parametrize("formula", [model_state_bytes, built_state_bytes, wire_numel])
def test_arguments_that_make_no_sense_are_refused(formula):
    with pytest.raises(ValueError, match="stage"):
        formula(100, 2, 4)
    with pytest.raises(ValueError, match="world_size"):
        formula(100, 0, 2)


def test_a_compute_dtype_of_neither_2_nor_4_bytes_is_refused():
    with pytest.raises(ValueError, match="compute_dtype_bytes"):
        model_state_bytes(100, 2, 1, compute_dtype_bytes=8)
