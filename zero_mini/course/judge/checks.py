"""The checks of a stage: what is measured, what is expected, and what the difference usually means.

values     against torch DDP on the same ranks: to the bit where the order of sums is fixed (2 ranks) or does not
           matter (whole numbers), else within rounding
waits      the same, with collectives that do nothing until they are waited for
traffic    elements that torch hands to the backend
memory     bytes of all tensors alive on a rank
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch

from zero_mini.course.judge import trial
from zero_mini.course.judge.models import CONFIG
from zero_mini.course.ranks import Ranks
from zero_mini.trainer.gpt import parameter_count

PSI = parameter_count(CONFIG)
BLOCK = 12 * CONFIG.d**2 + 13 * CONFIG.d
ROOT = PSI - CONFIG.L * BLOCK
ROUNDING = 1e-5  # of a parameter's largest change
OK = None
RUNS: WeakKeyDictionary[Ranks, dict] = WeakKeyDictionary()  # see once()


MEANING = {  # kind of a fault -> what it usually means
    "early": "a buffer is used before its collective was waited for",
    "stale": "the first step is right and a later one is not: something old is used again, for example parameters "
    "gathered before the update, or gradients that were not dropped",
    "names": "full_parameters() gives every parameter of the model, by its name in named_parameters()",
    "shapes": "full_parameters() gives whole parameters in the shapes of the model",
    "full parameters": "all losses are right, so the training is: full_parameters() gives something else, for example "
    "a slot that holds another block by now",
    "old forward": "parameters are right after the steps, but a forward computed with other ones",
    "not copies": "a write to a tensor of full_parameters() changes the model: full_parameters() must return copies",
    "nan": "memory was read that nobody had written",
    "unchanged": "these parameters did not change: at stage 3 usually a buffer from before the update is read, at the "
    "others their gradients are not sent, or are dropped before the update, or the optimizer has other parameters",
    "unchanged root": "the root did not change: parameters that are in no block need a unit, too",
    "summed": "the change is N times the right one: gradients are summed over ranks, not averaged",
    "divided twice": "the change is 1/N of the right one: the reductions of Comm give the mean, divided by N already",
    "one slice": "each rank has only its own slice of the update: the all-gather after the step is missing, or it runs "
    "before the update",
    "ranks differ": "gradients of this rank alone were used, or a gather is missing, or a collective was not "
    "waited for",
    "micro-batches": "one micro-batch is right and two are not: their gradients are to be added, and not averaged "
    "(each loss is divided by their number already)",
    "gradients": "ranks agree with each other and not with DDP: a gradient is missing, counted twice, or misplaced "
    "(the slice of another rank?)",
    "other block": "usually a block's backward has read the parameters of another block: gather them again, to "
    "where its forward had them. Else a gradient is missing, counted twice, or misplaced",
    "frozen": "the result is right if no parameter is frozen. A frozen one has no gradient, and belongs in no buffer",
    "unused": "the result is right if all parameters are used. A unit with an unused one is never complete by itself: "
    "send it after the backward, in one order on all ranks",
    "missing collectives": "something that has to travel does not",
    "extra collectives": "something is sent more often than needed",
    "every micro-batch": "each micro-batch is sent: only the one with last=True needs to be",
    "all-reduce": "all-reduce and all-gather: for the slice that a rank updates, a reduce-scatter is enough",
    "summed before": "gradients of several micro-batches are added before they are sent, so they are kept whole",
    "kept whole": "blocks are gathered less than twice a step: their parameters stay whole in between, or they are "
    "not gathered again for backward",
    "whole": "gradients or parameters are whole where a rank needs 1/N of them, or exist twice",
    "whole states": "optimizer states of which a rank needs 1/N are whole, or gradients are kept more than once",
    "pile": "whole gradients pile up until backward ends, or whole parameters are kept: a block's are to be sent and "
    "freed when backward has left it",
    "error": "your code raised an error; the line is one of your file",
    "import": "the notebook has a name that my_zero.py lacks: keep() copies only the class, so write imports "
    "and helper functions into the file",
    "sizes": "a size does not fit. Usually it is the padding: a buffer has N times the elements of a shard, and zeros "
    "at its end. Else a buffer is too short for a larger block",
    "died": "a rank ended within a collective: usually ranks start collectives of different sizes, or in another order",
    "hang": "a rank waits for a collective that another rank does not start",
    "not run": "the first check raised, or two did not end",
}


@dataclass(frozen=True)
class Fault:
    """What a check found; `kind` is a key of MEANING."""

    kind: str
    expected: str
    came: str

    @property
    def meaning(self) -> str:
        return MEANING[self.kind]


@dataclass(frozen=True)
class Check:
    """One line of a report."""

    name: str
    points: int
    world_size: int
    run: Callable[[Ranks, str, int], Fault | None]  # (ranks, path, stage)
    found: Callable[[Ranks, str, int], str] | None = None  # the number that a right file has, in words


def values(name: str, steps: int, micros: int = 1, exact: bool = True, wire: str | None = None):
    """The check that a stage trains a case as torch's DDP does."""

    def run(ranks: Ranks, path: str, stage: int) -> Fault | None:
        theirs = of_torch_ddp(ranks, name, steps, micros)
        mine = ranks.run(trial.trained, path, stage, name, steps, micros, wire)
        fault = compare(mine, theirs, exact)
        if fault is None:
            return OK
        prompt = wire and ranks.run(trial.trained, path, stage, name, steps, micros, "prompt")
        if wire and compare(prompt, theirs, exact) is OK:
            return replace(fault, kind="early")
        if name in ("frozen", "unused"):
            simpler = ranks.run(trial.trained, path, stage, "uneven", steps, micros, wire)
            is_right = compare(simpler, of_torch_ddp(ranks, "uneven", steps, micros), exact) is OK
            return replace(fault, kind=name) if is_right and fault.kind != "not copies" else in_words_of(stage, fault)
        if steps == micros == 1:
            return in_words_of(stage, fault)
        if fault.kind == "full parameters":
            return fault
        plain = "gpt, SGD" if name == "gpt" else name  # AdamW hides a factor: it divides by the gradient's size
        simpler = ranks.run(trial.trained, path, stage, plain, 1, 1, wire)
        one_step = compare(simpler, of_torch_ddp(ranks, plain, 1, 1), exact)
        if one_step is OK:
            return replace(fault, kind="stale" if micros == 1 else "micro-batches")
        return in_words_of(stage, replace(one_step, expected=f"{one_step.expected} (after one step)"))

    return run


def in_words_of(stage: int, fault: Fault) -> Fault:
    """At stage 3 wrong gradients have one more cause, and it is the usual one."""
    return replace(fault, kind="other block") if stage == 3 and fault.kind == "gradients" else fault


def of_torch_ddp(ranks: Ranks, name: str, steps: int, micros: int) -> list[dict]:
    return once(ranks, trial.trained, None, 0, name, steps, micros, None)


def once(ranks: Ranks, function: Callable, *args) -> list:
    """`ranks.run(function, *args)`, or what it gave before: two checks, or all stages, may look at one run."""
    known, what = RUNS.setdefault(ranks, {}), (function, *args)
    if what not in known:
        known[what] = ranks.run(function, *args)
    return known[what]


def compare(mine: list[dict], theirs: list[dict], exact: bool) -> Fault | None:
    """Every rank's parameters and losses against torch DDP's."""
    end, start = theirs[0]["end"], theirs[0]["start"]
    expected = "the parameters of torch DDP" + (", to the bit" if exact else f", within {ROUNDING} of their change")
    for rank, result in enumerate(mine):
        if set(result["end"]) != set(end):
            name = min(set(result["end"]) ^ set(end))
            return Fault("names", "the names of the model's parameters", f"{name} is in one of the two only")
        wrong = [key for key in end if not same(result["end"][key], end[key], start[key], exact)]
        if wrong:
            key = max(wrong, key=lambda key: distance(result["end"][key], end[key]))
            gap = distance(result["end"][key], end[key])
            came = f"on rank {rank} {len(wrong)} of {len(end)} differ, {key} by {gap:.3g}"
            kind = kind_of([found["end"] for found in mine], end, start, wrong)
            if exact and len(result["losses"]) > 2 and all(a["losses"] == b["losses"] for a, b in zip(mine, theirs)):
                kind = "full parameters"
            return Fault(kind, expected, came)
        if exact and result["losses"] != theirs[rank]["losses"]:
            return Fault("old forward", f"losses {theirs[rank]['losses']}", f"{result['losses']} on rank {rank}")
        if not result["copies"]:
            return Fault("not copies", "tensors of their own from full_parameters()", "tensors that others use, too")
    return OK


def same(mine: torch.Tensor, right: torch.Tensor, start: torch.Tensor, exact: bool) -> bool:
    if mine.shape != right.shape or exact:
        return torch.equal(mine, right)
    return distance(mine, right) <= ROUNDING * max(1e-3, distance(right, start))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return (a - b).abs().nan_to_num(torch.inf).max().item()


def kind_of(mine: list[dict], right: dict, start: dict, wrong: list[str]) -> str:
    """The kind of a wrong update: N times the right one, or missing, or only this rank's slice."""
    if any(mine[0][key].shape != right[key].shape for key in wrong):
        return "shapes"
    changes = {key: right[key] - start[key] for key in right}
    if not all(torch.isfinite(ours[key]).all() for ours in mine for key in right):
        return "nan"
    if all(torch.equal(mine[0][key], start[key]) for key in wrong):
        return "unchanged root" if all("blocks" not in key for key in wrong) else "unchanged"
    change = torch.cat([changes[key].flatten() for key in right])
    found = [torch.cat([(ours[key] - start[key]).flatten() for key in right]) for ours in mine]
    if (found[0] - len(mine) * change).norm() < 1e-2 * change.norm():
        return "summed"
    if (len(mine) * found[0] - change).norm() < 1e-2 * change.norm():
        return "divided twice"
    if all(torch.equal(found[0], one) for one in found):
        return "gradients"
    to_move = change.abs() > 1e-7
    still = [((one == 0) & to_move).sum().item() / to_move.sum().item() for one in found]
    return "one slice" if min(still) > 0.3 else "ranks differ"


def traffic(micros: int):
    """The check of elements sent in a step, in units of Psi (N-1)/N."""

    def run(ranks: Ranks, path: str, stage: int) -> Fault | None:
        fault = traffic_fault(ranks, path, stage, micros)
        simpler = traffic_fault(ranks, path, stage, 1) if fault and micros > 1 else OK
        return replace(fault, kind=simpler.kind) if simpler else fault  # what is wrong with one is not about two

    return run


def traffic_fault(ranks: Ranks, path: str, stage: int, k: int) -> Fault | None:
    """k micro-batches' elements in units of Psi (N-1)/N, against what the stage has to send."""
    expected = {0: 2, 1: 2, 2: k + 1, 3: 3 * k}[stage]
    least = expected * 0.99 if stage < 3 else k * (3 - (2 * ROOT + 4 * BLOCK) / PSI)
    found, calls = in_psi(ranks, path, stage, k)
    if least <= found <= expected * 1.01:
        return OK
    kind = "missing collectives" if found < least else "extra collectives"
    if stage < 2 and k > 1 and found > expected:
        kind = "every micro-batch"
    elif stage == 1 and 2.9 < found < 3.1:
        kind = "all-reduce"
    elif stage == 2 and k > 1 and found < least:
        kind = "summed before"
    elif stage == 3 and found < least:
        kind = "kept whole"
    counted = ", ".join(f"{calls.count(name)} {name}" for name in dict.fromkeys(calls)) or "no call"
    return Fault(kind, f"{expected} Psi (N-1)/N elements", f"{found:.2f} ({counted})")


def in_psi(ranks: Ranks, path: str, stage: int, k: int) -> tuple[float, list[str]]:
    """(elements that a rank sends in a step, in units of Psi (N-1)/N; the calls)."""
    elements, calls = max(once(ranks, trial.sent, path, stage, k))
    return elements / (PSI * (ranks.world_size - 1) / ranks.world_size), calls


def bytes_held(ranks: Ranks, path: str, stage: int) -> float:
    """A parameter, after a backward, on the rank that holds most."""
    return max(once(ranks, trial.held, path, stage))[0] / PSI


def memory(ranks: Ranks, path: str, stage: int) -> Fault | None:
    """Bytes a parameter after a backward: fp32 and Adam."""
    N = ranks.world_size
    allowed = {0: 16, 1: 8 + 8 / N, 2: 4 + 12 / N, 3: 16 / N}[stage]
    extra = 4 * (ROOT + 2.2 * BLOCK) / PSI if stage == 3 else 0
    found = bytes_held(ranks, path, stage)
    if found <= allowed + extra + 0.3:
        return OK
    kind = "whole states" if found - allowed - extra > 5 else "whole"  # 8 (1 - 1/N) or less
    return Fault(kind, f"at most {allowed + extra + 0.3:.1f} bytes a parameter after a backward", f"{found:.1f}")


def peak(ranks: Ranks, path: str, stage: int) -> Fault | None:
    """Bytes a parameter at the highest point of a backward."""
    N = ranks.world_size
    allowed = {2: 4 + 12 / N, 3: 16 / N + 4 * (ROOT + 2.2 * BLOCK) / PSI}[stage] + 7 * 4 * BLOCK / PSI
    found = max(peak for _, peak in once(ranks, trial.held, path, stage)) / PSI
    if found <= allowed:
        return OK
    return Fault("pile", f"at most {allowed:.1f} bytes a parameter during a backward", f"{found:.1f}")


def checks(stage: int) -> list[Check]:
    """In the order in which they run."""
    micros, held = "traffic of a step of 2 micro-batches", "memory after a backward, on 4 ranks"
    found = [
        Check("4 steps of AdamW on 2 ranks, to the bit", 4, 2, values("gpt", 4)),
        Check("2 micro-batches, whole numbers, to the bit", 2, 2, values("uneven", 1, 2)),
        Check("nothing is used before it was waited for", 3, 2, values("gpt", 4, wire="late")),
        Check("traffic of a step", 2, 2, traffic(1), lambda *at: f"{in_psi(*at, 1)[0]:.2f} Psi (N-1)/N"),
        Check(micros, 1, 2, traffic(2), lambda *at: f"{in_psi(*at, 2)[0]:.2f} Psi (N-1)/N"),
        Check(held, 2, 4, memory, lambda *at: f"{bytes_held(*at):.1f} bytes a parameter"),
        Check("frozen parameters; full_parameters() gives copies", 1, 2, values("frozen", 1)),
        Check("a parameter that no forward uses", 1, 2, values("unused", 1)),
        Check("uneven blocks on 3 ranks (padding), to the bit", 2, 3, values("uneven", 1)),
        Check("5 steps on 3 ranks, within rounding", 1, 3, values("gpt, SGD", 5, exact=False)),
    ]
    if stage >= 2:
        found.append(Check("memory during a backward, on 4 ranks", 2, 4, peak))
    return found
