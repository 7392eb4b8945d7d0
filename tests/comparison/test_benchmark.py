"""The benchmark: what it lets through its gate, what becomes of a run that fails, and what it keeps."""

import functools
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from says import tells

from zero_mini.comparison import absent_peers, benchmark, measure, plain, scores, systems
from zero_mini.comparison.models import make_model
from zero_mini.comparison.systems import SYSTEMS
from zero_mini.comparison.trainee import Trainee, adamw, stepper
from zero_mini.comparison.works import ABLATIONS, BASELINE, ON_CPU, WORKS, Work
from zero_mini.course.ranks import RankError, run
from zero_mini.trainer.gpt import GPTConfig

TINY = Work("tiny", GPTConfig(L=3, d=64, heads=2, T=32), batch=4, bf16=False, lr=1e-3)


def row(ranks, system: str, work: Work, build=systems.build) -> dict:
    """Measured on the ranks that all tests share: a fresh group takes seconds."""
    return scores.merge_ranks(ranks(2).run(measure.measure, system, work, build))


@pytest.fixture(scope="module")
def ddp(ranks) -> dict:
    return row(ranks, "ddp", TINY)


def entry(work: Work, rows: dict[str, dict]) -> dict:
    return {
        "machine": {"card": "CPU", "cards": 2, "torch": torch.__version__},
        "rates": None,
        "command": "",
        "work": benchmark.described(work),
        "systems": rows,
    }


# --- the gate ---------------------------------------------------------------------------------


@pytest.mark.parametrize("system", [name for name in ON_CPU if name != "ddp"])
def test_every_system_trains_as_torch_ddp_does(ranks, ddp, system):
    found = row(ranks, system, TINY)
    result = scores.score(entry(TINY, {"ddp": ddp, system: found}))[system]
    assert "reason" not in result
    assert found["losses_differ_by"] < 1e-5
    assert result["ms"] > 0


def test_the_losses_fall_by_more_than_the_gate_could_overlook(ddp):
    assert ddp["losses"][0] - ddp["losses"][-1] > 0.5


def unreduced(system: str, work: Work, device: torch.device) -> Trainee:
    model = make_model(work, device)
    return Trainee(model, stepper(model, adamw(model, work)))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda s, work, device: systems.build(s, replace(work, lr=2 * work.lr), device), id="lr doubled"),
        pytest.param(unreduced, id="gradients stay with their rank"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_system_that_trains_otherwise_shows_no_speed(ranks, ddp, wrong, precision):
    found = row(ranks, "zero-2", TINY, wrong)
    result = scores.score(entry(replace(TINY, bf16=precision == "bf16"), {"ddp": ddp, "zero-2": found}))["zero-2"]
    assert tells(result["reason"], "ddp")
    assert "ms" not in result


def test_losses_that_are_not_numbers_fail_the_gate(ddp):
    broken = ddp | {"losses": ddp["losses"][:-1] + [math.nan]}
    assert tells(scores.score(entry(TINY, {"ddp": ddp, "zero-2": broken}))["zero-2"]["reason"], "inf")


def test_without_a_reference_nothing_shows_a_speed(ddp):
    result = scores.score(entry(TINY, {"zero-3": dict(ddp)}))["zero-3"]
    assert result["reason"] and "ms" not in result


@pytest.mark.parametrize("change", [{"checkpointing": True}, {"bf16": True}])
@pytest.mark.parametrize("system", ["zero-3", "fsdp2"])
def test_checkpointing_changes_nothing_and_bf16_little(ranks, ddp, change, system):
    found = row(ranks, system, replace(TINY, **change))
    assert scores.distance(found["losses"], ddp["losses"]) < (0.03 if "bf16" in change else 1e-5)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_baseline_updates_one_of_n_parts_of_the_parameters(bf16):
    work, device = replace(TINY, bf16=bf16), torch.device("cpu")
    model = make_model(work, device)
    psi = sum(param.numel() for param in model.parameters())
    whole, half = (plain.UpdateOfSlices(model, work, device, N) for N in (1, 2))
    assert len(half.masters) == 1 + work.config.L
    assert sum(master.numel() for master in whole.masters) == pytest.approx(psi, rel=0.02)
    assert sum(master.numel() for master in half.masters) == pytest.approx(psi / 2, rel=0.02)
    master, grad = half.masters[1].detach().clone(), half.grads[1].float()
    half.step()
    change = half.masters[1].detach() - master * (1 - 0.1 * work.lr)  # AdamW's first step: the sign of the gradient
    torch.testing.assert_close(change, -work.lr * grad / (grad.abs() + 1e-8), rtol=1e-3, atol=1e-7)
    if bf16:
        assert torch.equal(half.casts[1], half.masters[1].bfloat16())


def test_a_plain_step_leaves_no_gradients_and_that_of_the_baseline_updates_once(monkeypatch):
    numels = []
    monkeypatch.setattr(plain.UpdateOfSlices, "step", lambda self: numels.append(sum(m.numel() for m in self.masters)))
    for updates, times in ((0, 0), (2, 1)):
        trainee = plain.build_plain(TINY, torch.device("cpu"), updates)
        trainee.step(torch.zeros(4, 33, dtype=torch.int64))
        assert all(param.grad is None for param in trainee.model.parameters())
        assert len(numels) == times
    psi = sum(param.numel() for param in trainee.model.parameters())
    assert numels[0] == pytest.approx(psi / 2, rel=0.02)


@pytest.mark.parametrize("stage", range(4))
def test_beside_absent_peers_a_rank_does_what_one_of_two_does_and_sends_nothing(ranks, stage):
    def one_step(comm=None) -> tuple[list, int]:
        trainee = systems.build_zero(stage, TINY, torch.device("cpu"), comm=comm)
        loss = trainee.step(torch.zeros(4, 33, dtype=torch.int64))
        calls = [(call.kind, call.unit, call.numel, call.itemsize) for call in trainee.zero.ledger]
        assert loss.isfinite()
        return calls, trainee.state_bytes()

    assert one_step(absent_peers.Silent(2)) == ranks(2).run(one_step)[0]


def test_a_rank_beside_absent_peers_has_slice_0_and_random_numbers_in_place_of_the_others():
    silent, group = absent_peers.Silent(4), absent_peers.SilentGroup(0, 4)
    assert (silent.rank, silent.world_size, group.rank(), group.size()) == (0, 4, 0, 4)
    gradients, own = torch.arange(8.0), torch.tensor([7.0, 9.0])
    for reduce in (
        lambda shard, buffer: silent.reduce_scatter(shard, buffer, "root"),
        lambda shard, buffer: group.reduce_scatter_single(shard, buffer),
    ):
        shard = torch.full((2,), math.nan)
        reduce(shard, gradients.clone()).wait()
        assert shard.tolist() == [0, 1]
    buffer = gradients.clone()
    for collective in (silent.all_reduce, silent.broadcast):
        collective(buffer, "root").wait()
    assert torch.equal(buffer, gradients)
    silent.all_gather(buffer, own, "root").wait()
    assert buffer.tolist() == [7, 9, 2, 3, 4, 5, 6, 7]
    group.all_gather_single(buffer, own).wait()
    assert buffer.tolist() == [7, 9] * 4
    assert silent.empty(10_000, torch.float32, buffer.device).std().item() == pytest.approx(0.02, rel=0.1)


def test_systems_beside_absent_peers_have_one_of_n_parts():
    def states_and_losses() -> dict[str, tuple[int, list[float]]]:
        found = {}
        for system in ("zero-3", "ddp", "fsdp2"):
            trainee = absent_peers.build(4, system, TINY, torch.device("cpu"))
            losses = [trainee.step(torch.zeros(4, 33, dtype=torch.int64)).item() for _ in range(3)]
            found[system] = trainee.state_bytes(), losses
            if system == "zero-3":
                assert trainee.zero.world_size == 4
        return found

    (_, zero_losses), (ddp_bytes, ddp_losses), (fsdp2_bytes, fsdp2_losses) = run(states_and_losses, 1)[0].values()
    assert fsdp2_bytes == pytest.approx(ddp_bytes / 4, rel=0.01)
    # One rank's gradient stands for the mean, so DDP learns; what FSDP2 gathers is a quarter of the model, four times.
    assert ddp_losses[2] < ddp_losses[0] and all(map(math.isfinite, fsdp2_losses + zero_losses))


def test_the_baseline_beside_absent_peers_updates_one_of_n_parts_and_plain_none(monkeypatch):
    monkeypatch.setattr(absent_peers, "build_plain", lambda work, device, updates=0: updates)
    assert [absent_peers.build(4, system, TINY, torch.device("cpu")) for system in ("plain", BASELINE)] == [0, 4]


def test_beside_absent_peers_no_loss_is_compared_and_the_record_has_a_file_of_its_own(tmp_path):
    alone = entry(TINY, {"zero-3": invented(8, losses=[9.0]), BASELINE: invented(5)}) | {"rank_of": 4}
    alone["machine"]["cards"], alone["rates"] = 1, {"matmul_flops": 1e9, "copy_bytes": 1e9, "all_reduce_bytes": 0.0}
    shown = benchmark.save(tmp_path, "cpu", alone)
    assert [path.name for path in tmp_path.iterdir()] == ["alone.json"]
    assert shown["scores"]["zero-3"]["over_baseline"] == pytest.approx(8 / 5)
    assert tells(scores.table("cpu", shown), "rank 0 of 4")
    parts = scores.floor_parts_s("zero-3", alone)
    assert parts["update"] == pytest.approx(28 * shown["work"]["psi"] / 4 / 1e9) and parts["wire"] == 0
    elsewhere = entry(TINY, {"zero-2": invented(7)}) | {"machine": alone["machine"], "rank_of": 8}
    assert list(benchmark.save(tmp_path, "cpu", elsewhere)["systems"]) == ["zero-2"]  # not beside rows of another N


def test_what_cannot_run_without_peers_is_refused(capsys):
    assert benchmark.parse(["--work", "cpu", "--alone", "2"]).ranks == 1
    assert benchmark.parse(["--work", "cpu"]).ranks == (torch.cuda.device_count() or 2)
    wrong = (["--alone", "1"], ["--alone", "2", "--ranks", "2"], ["--alone", "2", "--systems", "zero-3 no prefetch"])
    for arguments in wrong:
        with pytest.raises(SystemExit):
            benchmark.parse(["--work", "cpu", *arguments])
        assert tells(capsys.readouterr().err, "--alone", *arguments[2:3], arguments[-1])


@pytest.mark.parametrize("option, value", [("--rounds", "0"), ("--limit", "nan"), ("--out", "/dev/null")])
def test_numbers_and_folders_that_cannot_be_are_refused_before_a_run(capsys, option, value):
    with pytest.raises(SystemExit):
        benchmark.parse(["--work", "cpu", option, value])
    assert tells(capsys.readouterr().err.splitlines()[-1], option)


# --- ablations --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stage_3(ranks) -> Callable[[Work], dict]:
    return functools.cache(lambda work: row(ranks, "zero-3", work))


@pytest.mark.parametrize("ablation", [name for name in ABLATIONS if name.startswith("zero-3 ")])
def test_an_ablation_computes_what_stage_3_does_to_the_bit(ranks, stage_3, ablation):
    work = replace(TINY, bf16=ablation == "zero-3 16-bit shard")  # in fp32 its shard is the master
    stage_3, other = stage_3(work), row(ranks, ablation, work)
    assert other["losses"] == stage_3["losses"]
    if work.bf16:
        units = ranks(2).run(lambda: sum(u.S for u in systems.build("zero-3", work, torch.device("cpu")).zero.units))
        assert other["state_bytes"] - stage_3["state_bytes"] == 2 * units[0]
        return
    gathers_more = ablation == "zero-3 storage resize"  # it gives back what stage 3 finds in its slots again
    assert (other["wire_bytes"] > stage_3["wire_bytes"]) == gathers_more
    assert (other["state_bytes"] < stage_3["state_bytes"]) == gathers_more


def test_after_an_ablation_stage_3_is_itself_again(ranks):
    def kinds():
        device, names = torch.device("cpu"), []
        for system in ("zero-3 no prefetch", "zero-3"):
            names.append(type(systems.build(system, TINY, device).zero).__name__)
        return names

    assert ranks(2).run(kinds)[0] == ["NoPrefetch", "Zero3"]


# --- runs that fail ---------------------------------------------------------------------------


def fails_for_zero_2(system: str, work: Work, device: torch.device) -> Trainee:
    if system == "zero-2":
        raise RuntimeError("no such thing. Advice follows")
    return systems.build(system, work, device)


def test_a_run_that_raises_is_a_row_with_its_reason_and_the_others_go_on(monkeypatch, capfd):
    monkeypatch.setattr(benchmark, "missing", lambda system: "deepspeed" if system.startswith("deepspeed") else None)
    names = ["zero-2", "deepspeed-2", "ddp"]
    rows = benchmark.compare(TINY, names, rounds=1, ranks=2, limit_s=100, build=fails_for_zero_2)
    assert list(rows) == names
    assert tells(rows["zero-2"]["failed"], "ranks 0, 1", "RuntimeError: no such thing")
    assert tells(rows["deepspeed-2"]["failed"], "deepspeed")
    assert len(rows["ddp"]["step_ms"]) == TINY.timed_steps
    printed = scores.table("tiny", entry(TINY, rows))
    assert all(reason["failed"] in printed for reason in list(rows.values())[:2])
    assert "1.00" in printed  # ddp is as fast as ddp
    assert "tiny, round 1 of 1, ddp:" in capfd.readouterr().out


def leaves_its_number_and_sleeps(system: str, work: Work, device: torch.device) -> Trainee:
    Path(system, str(os.getpid())).touch()
    time.sleep(1000)


def test_a_run_past_its_limit_is_killed(tmp_path):
    found = benchmark.in_a_fresh_group(2, 3, measure.measure, str(tmp_path), TINY, leaves_its_number_and_sleeps)
    assert tells(found, "ranks 0, 1", "3 s")
    numbers = [int(path.name) for path in tmp_path.iterdir()]
    assert len(numbers) == 2
    for number in numbers:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


def test_memory_that_runs_out_is_said_in_three_words(monkeypatch):
    def run(*_, **__):
        raise RankError("rank 1 raised torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", 1)

    monkeypatch.setattr(benchmark, "run", run)
    assert benchmark.attempt("zero-0", TINY, 2, 1) == {"failed": "out of memory"}


def test_systems_take_turns(monkeypatch):
    order = []

    def attempt(system, *_):
        order.append(system)
        return {"step_ms": [1.0], "losses": [1.0]}

    monkeypatch.setattr(benchmark, "attempt", attempt)
    rows = benchmark.compare(TINY, ["zero-0", "ddp"], rounds=2, ranks=2, limit_s=1)
    assert order == ["zero-0", "ddp", "zero-0", "ddp"]
    assert rows["ddp"]["round_medians_ms"] == [1.0, 1.0]


# --- what is kept -----------------------------------------------------------------------------


def invented(ms: float, **more) -> dict:
    return {"step_ms": [ms, ms], "losses": [3.0, 2.0], **more}


def test_speed_json_is_merged_by_work_and_by_system_on_the_same_machine(tmp_path):
    cpu, other = entry(TINY, {"ddp": invented(10), "zero-2": invented(8)}), entry(TINY, {"ddp": invented(5)})
    benchmark.save(tmp_path, "other", other)
    benchmark.save(tmp_path, "cpu", cpu)
    shown = benchmark.save(tmp_path, "cpu", entry(TINY, {"zero-2": invented(4)}))
    kept = json.loads((tmp_path / "speed.json").read_text())["works"]
    assert list(kept) == ["other", "cpu"]
    assert kept["cpu"] == json.loads(json.dumps(shown))
    assert kept["cpu"]["scores"]["zero-2"]["x_ddp"] == pytest.approx(2.5)
    assert kept["other"]["systems"]["ddp"]["step_ms"] == [5, 5]

    elsewhere = entry(TINY, {"ddp": invented(1)})
    elsewhere["machine"]["card"] = "another"
    benchmark.save(tmp_path, "cpu", elsewhere)
    kept = json.loads((tmp_path / "speed.json").read_text())["works"]
    assert list(kept["cpu"]["systems"]) == ["ddp"]
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json"]


def test_scores_and_floors_of_invented_numbers():
    work = replace(WORKS["124M batch 32"], batch=1)
    work_entry = entry(
        work, {"ddp": invented(100.0), "zero-3": invented(50.0), "plain": invented(40.0), BASELINE: invented(45)}
    )
    work_entry["machine"]["card"] = "NVIDIA H100 80GB HBM3"
    work_entry["rates"] = {"matmul_flops": 1e15, "copy_bytes": 1e12, "all_reduce_bytes": 1e11}
    psi, flops = work_entry["work"]["psi"], work_entry["work"]["flops_per_token"]
    result = scores.score(work_entry)
    assert result["zero-3"]["tokens_s"] == pytest.approx(1024 / 0.050)
    assert result["zero-3"]["tflops"] == pytest.approx(1024 / 0.050 * flops / 1e12)
    assert result["zero-3"]["mfu"] == pytest.approx(1024 / 0.050 * flops / 989.4e12)
    assert result["zero-3"]["x_ddp"] == pytest.approx(2.0)
    assert result["zero-3"]["of_plain"] == pytest.approx(0.8)
    assert result["zero-3"]["over_baseline"] == pytest.approx(50 / 45)
    assert tells(scores.table("x", work_entry), "1.111")
    attention = 6 * 12 * 768 * 1024  # of a causal kernel: half of what MFU counts
    compute, update, wire = 1024 * (flops - attention) / 1e15, 28 * psi / 2 / 1e12, 6 * psi / 2 / 1e11
    assert wire > compute
    assert result["zero-3"]["x_floor"] == pytest.approx(0.050 / (wire + update))
    assert scores.floor_parts_s("plain", work_entry)["floor"] == pytest.approx(compute)
    work_entry["work"]["checkpointing"] = True
    again = {"zero-3": (flops - attention) / 3, "zero-3 keep attention": (flops - 2 * attention) / 3}
    for system, more in again.items():
        assert scores.floor_parts_s(system, work_entry)["compute"] == pytest.approx(compute + 1024 * more / 1e15)
    assert "floor of zero-3" in scores.table("x", work_entry)


def test_every_work_asks_for_systems_that_exist_and_for_one_to_compare_with():
    for name, work in WORKS.items():
        assert set(work.systems) <= set(SYSTEMS), name
        assert set(work.systems) & set(scores.REFERENCES), name
        assert BASELINE in work.systems


def test_a_work_for_gpus_is_refused_where_there_is_none(monkeypatch, capsys, tmp_path):
    """It would try to train 1.5 billion parameters on the CPU, once for each system."""
    for gpus in (0, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert benchmark.parse(["--work", "cpu"]).work == ["cpu"]
    assert benchmark.parse(["--work", "1.5B"]).ranks == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit):
        benchmark.parse(["--work", "cpu", "1.5B", "--out", str(tmp_path / "speed")])
    assert tells(capsys.readouterr().err, "--work", "1.5B", "--work cpu")
    assert not (tmp_path / "speed").exists()


def test_the_picture_shows_every_system_or_the_reason(tmp_path):
    pytest.importorskip("matplotlib")
    from zero_mini.course.plots import speed

    rows = {"ddp": invented(9, peak_bytes=2**33), "zero-2": invented(8), "fsdp2": {"failed": "out of memory"}}
    benchmark.save(tmp_path, "cpu", entry(TINY, rows | {"plain": invented(5)}))
    benchmark.draw(tmp_path)
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    figure = speed.draw(json.loads((tmp_path / "speed.json").read_text())["works"])
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert {"out of memory", "8 GiB", "plain "} <= set(texts)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["ddp", "zero-2", "fsdp2"]


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: None)
    benchmark.draw(tmp_path)
    assert capsys.readouterr().out.count("\n") == 1
