"""The numbers of the calculator: bytes of model states at each stage, by formula and as measured.

    a model, N, precision, optimizer -> stage -> category -> bytes on one rank
    the same, and the records        -> machine and moment -> stage -> bytes on one rank

calculator.py draws them. Psi and N are the paper's: parameters and ranks.

Left out: activations, buffers, an allocator's rounding, padding to a multiple of N. The formula is always the paper's.
This package differs from it at stage 3: it keeps no 16-bit shard, but two slots and the root (`built_state_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from numbers import Real

from zero_mini.course.plots.frame import cards
from zero_mini.memory.formulas import OPTIMIZERS, model_state_bytes
from zero_mini.trainer.gpt import PRESETS, parameter_count

PAPER = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}  # figure 1 and table 1
MODELS = {name: parameter_count(config) for name, config in PRESETS.items()} | PAPER
STAGES = (0, 1, 2, 3)
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}  # 16 bits: over an fp32 master; fp16 is the paper's
BACKWARD, BETWEEN = "after a backward", "between steps, when there are no gradients"


def psi_of(model: str | float) -> float:
    """Parameters of a preset or of a model of the paper's table 1; a number is its own answer.

    >>> psi_of("124M"), psi_of("7.5B"), psi_of(10)
    (124475904, 7500000000.0, 10)
    """
    psi = MODELS.get(model) if isinstance(model, str) else model
    if not (isinstance(psi, Real) and 0 < psi < inf):
        known = f"one of {', '.join(MODELS)}, or a number of parameters > 0"
        raise ValueError(f"model must be {known} (got {model!r}); for another size pass its number, as 13e9")
    return psi


def states_by_stage(
    model: str | float, N: int, precision: str = "bf16", optimizer: str = "AdamW"
) -> dict[int, dict[str, float]]:
    """Bytes on one rank: stage -> category -> bytes. ValueError for what cannot be counted.

    >>> {stage: sum(held.values()) / 1e9 for stage, held in states_by_stage("7.5B", 64).items()}
    {0: 120.0, 1: 31.40625, 2: 16.640625, 3: 1.875}
    """
    psi = psi_of(model)
    if not (isinstance(N, int) and N >= 1):
        raise ValueError(f"N must be a whole number of ranks > 0 (got {N!r}); for one GPU pass 1")
    check_one_of("precision", precision, ITEMSIZE)
    check_one_of("optimizer", optimizer, OPTIMIZERS)
    return {stage: model_state_bytes(psi, N, stage, ITEMSIZE[precision], optimizer=optimizer) for stage in STAGES}


def check_one_of(name: str, value: object, accepted: Iterable) -> None:
    """ValueError that lists the choices."""
    if value not in tuple(accepted):
        raise ValueError(f"{name} must be one of {', '.join(map(str, accepted))} (got {value!r}); pass one of these")


def formula(stage: int, each: dict[str, float]) -> str:
    """A rank's bytes, from the bytes a parameter of each category: what is whole and what is sharded.

    >>> [formula(stage, {"parameters": 2, "gradients": 2, "optimizer": 12}) for stage in (0, 1, 2, 3)]
    ['16Ψ', '4Ψ + 12Ψ/N', '2Ψ + 14Ψ/N', '16Ψ/N']
    """
    parts = list(each.values())  # a stage shards the last ones
    terms = ((sum(parts[: 3 - stage]), "Ψ"), (sum(parts[3 - stage :]), "Ψ/N"))
    return " + ".join(f"{nbytes:g}{of}" for nbytes, of in terms if nbytes)


def found(memory: dict, speed: dict, psi: float, N: int, precision: str) -> dict[tuple[str, str], dict[int, int]]:
    """What memory.json and speed.json hold of this training with AdamW: (machine, moment) -> stage -> bytes.

    Of several runs the first counts: another batch has the same states, but units, and so slots, may differ.

    >>> kept = {"model": "124M", "precision": "bf16", "stages": {"1": {"held_bytes": {"parameters": 4}}}}
    >>> found({"machine": {"cards": 2, "card": "X"}, "memory": kept}, {"works": {}}, 124475904, 2, "bf16")
    {('2 x X', 'after a backward'): {1: 4}}
    """
    run = memory["memory"]
    walks = {int(stage): sum(row["held_bytes"].values()) for stage, row in run["stages"].items()}
    runs = [(memory["machine"], BACKWARD, MODELS[run["model"]], run["precision"], walks)]
    for entry in speed["works"].values():
        rows = {stage: entry["systems"].get(f"zero-{stage}", {}).get("state_bytes") for stage in STAGES}
        runs.append((entry["machine"], BETWEEN, entry["work"]["psi"], entry["work"]["precision"], rows))
    same: dict[tuple[str, str], dict[int, int]] = {}
    for machine, moment, *training, rows in runs:
        if [*training, machine["cards"]] == [psi, precision, N]:
            held = same.setdefault((cards(machine), moment), {})
            held |= {stage: nbytes for stage, nbytes in rows.items() if nbytes and stage not in held}
    return {where: held for where, held in same.items() if held}
