"""The two commands: what they print, what they write, and one line for what cannot be."""

import dataclasses
import json
import re

import pytest
import torch

from zero_mini import train_gpt
from zero_mini.simulate import paper, setup
from zero_mini.simulate.__main__ import main
from zero_mini.simulate.measure import Training, measure
from zero_mini.trainer.gpt import GPTConfig

TINY = "--L 1 --width 32 --heads 2 --global-batch 4 --sequence-length 16 --log-every 1 --sample-length 0".split()


pytestmark = pytest.mark.usefixtures("one_thread")


def losses(text: str) -> list[str]:
    return re.findall(r"loss of step \d\s+(\S+)", text)


@pytest.mark.check
def test_the_trainer_as_rank_r_of_n_has_the_first_loss_of_a_real_run(alone, capsys, tmp_path):
    train_gpt.main([*TINY, "--steps", "2", "--out", str(tmp_path)])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first, second = (line["loss"] for line in lines if "loss" in line)
    capsys.readouterr()
    for stage in ("0", "3"):
        train_gpt.main([*TINY, "--stage", stage, "--pretend-world", "64", "--pretend-rank", "63"])
        pretended = losses(capsys.readouterr().out)
        assert pretended[0] == f"{first:.6f}"
        assert (pretended[1] == f"{second:.6f}") is (stage == "0")  # nothing of another rank is needed at stage 0


@pytest.mark.parametrize(
    "argv, thing",
    [
        ("--pretend-world 0", "--pretend-world"),
        ("--pretend-world 4 --pretend-rank 4", "0 to 3"),
        ("--pretend-rank 1", "--pretend-world N"),
        ("--pretend-world 100000000", "at most"),
        ("--pretend-world 4 --out x", "--out"),
        ("--pretend-world 4 --save-every 1", "--save-every does not go"),
        ("--pretend-world 4 --dropout 0.1", "--dropout"),
        ("--pretend-world 4 --device cuda", "GPU"),
        ("--pretend-world 4 --model 1.5B --L 100000 --stage 0", "GB"),
    ],
)
def test_the_trainer_refuses_in_one_line_what_cannot_be_pretended(alone, capsys, monkeypatch, argv, thing):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SystemExit) as stop:
        train_gpt.main(argv.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and thing in line


@pytest.mark.parametrize(
    "argv, thing",
    [
        ("--world 0", "0"),
        ("--world 4 --rank 4", "0 to 3"),
        ("--world 100000000", "at most"),
        ("--model 3B", "nano"),
        ("--model 1T --L 100000000", "host memory to describe"),
        ("--model 1T --d 100000000000", "larger than torch can describe"),
        ("--model 7.5B --stage 0 --world 64", "GB"),
        ("--device cuda", "no GPU"),
        ("--memory nan", "GB > 0"),
        ("--memory 32 --device cpu", "leave --memory out"),
        ("--L 1 --json /dev/null/one.json", "/dev/null/one.json"),
        ("--steps 3", "got 3"),
        ("--stage 4", "stage"),
        ("--stgae 3", "--stage?"),
        ("--d 101", "multiple of heads"),
    ],
)
def test_the_module_refuses_in_one_line(capsys, monkeypatch, argv, thing):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(setup, "host_bytes", lambda: 20e9)
    assert main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert thing in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize("command", [main, paper.main])
def test_what_is_refused_after_the_options_leaves_the_file_as_it_was(capsys, monkeypatch, tmp_path, command):
    def refused(self, steps=2):
        raise ValueError("this model cannot be built")

    monkeypatch.setattr(setup.Setup, "run", refused)
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("{}")
    for path in (old, new):
        argv = ["--model", "nano", "--device", "cpu", "--json", str(path)]
        assert command(["figure1", *argv] if command is paper.main else argv) == 2
        assert capsys.readouterr().err == "simulate: error: this model cannot be built\n"
    assert old.read_text() == "{}" and not new.exists()


@pytest.mark.parametrize("wrong", [{"precision": "fp16"}, {"device": "gpu"}, {"batch": 0}])
def test_a_setup_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{[*wrong][0]} must be .*{[*wrong.values()][0]}"):
        setup.Setup(setup.SHAPES["nano"], **wrong)


def test_the_module_says_what_is_real_and_writes_what_it_measured(capsys, tmp_path):
    path = tmp_path / "one.json"
    argv = "--L 2 --d 128 --heads 2 --sequence-length 8 --stage 2 --world 16 --rank 3 --device cpu --json"
    assert main([*argv.split(), str(path)]) == 0
    out = capsys.readouterr().out
    assert "Real:" in out and "Not real:" in out and len(losses(out)) == 2
    record = json.loads(path.read_text())
    (run,) = record["simulated"]
    assert run["outcome"] == "ran" and run["rank"] == 3 and run["psi"] == run["numel"]
    assert run["states_bytes"] == pytest.approx(run["paper_bytes"], rel=0.03)  # of a small model much is padding
    assert run["moments"].keys() == {"build", "step 1", "step 2"}
    assert all(moment["peak_bytes"] > run["states_bytes"] / 2 for moment in run["moments"].values())


def test_the_trap_prints_another_loss(capsys):
    argv = "--L 2 --d 64 --heads 2 --sequence-length 8 --world 16 --device cpu --steps 1".split()
    main(argv)
    true = losses(capsys.readouterr().out)
    main([*argv, "--own-slice"])
    out = capsys.readouterr().out
    assert losses(out) != true and "(true)" not in out


def test_an_out_of_memory_is_a_result():
    def build():
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB. GPU 0 has a total capacity of 1 GiB.")

    result = measure(Training(build, None, None), torch.device("cpu"))
    assert result["outcome"].startswith("out of memory in build: Tried to allocate 2 GiB")


# --- the paper ----------------------------------------------------------------------------------


def test_bisection_finds_the_largest_number_that_fits():
    assert paper.largest(lambda n: n <= 37, 1, 100) == 37
    assert paper.largest(lambda n: True, 1, 8) == 8
    assert paper.largest(lambda n: False, 1, 8) == 0


class TwoBlocksFit(setup.Setup):
    """The third block is too much for rank 0; rank 1 does not know, and waits for it."""

    def training(self, absent=True):
        mine = super().training(absent)

        def compute(zero):
            if self.config.L > 2 and zero.rank == 0:
                raise torch.OutOfMemoryError("Tried to allocate 2 GiB.")
            return mine.compute(zero)

        return dataclasses.replace(mine, compute=compute)


def test_the_pair_is_tried_on_real_ranks_and_one_that_does_not_fit_is_a_result(monkeypatch):
    monkeypatch.setattr(paper, "PAIR_WIDTH", 32)
    base = TwoBlocksFit(GPTConfig(L=1, d=2, heads=1, vocab=8, T=4), device_bytes=16 * 12 * 32**2 * 4)
    found = next(paper.pair(base))
    assert found["config"]["L"] == 2 and found["tried"][3].startswith("out of memory in step 1")
    real = found["real"]
    assert real[2]["outcome"] == "ran" and real[2]["states_bytes"] == found["states_bytes"]
    assert "rank 0" in real[3]["outcome"] and "out of memory in step 1" in real[3]["outcome"]


def test_table_2_searches_for_what_fits(monkeypatch):
    """A device where a rank needs 10 % more than its states."""
    asked = []

    class Fake(setup.Setup):
        def run(self, steps=2):
            asked.append((self.stage, self.config.L))
            about, result = {"config": {"L": self.config.L}, "stage": self.stage}, {"outcome": "ran"}
            return about, result if 1.1 * self.states_bytes < self.device_bytes else {"outcome": "out of memory"}

    monkeypatch.setattr(paper, "report", lambda *_, **__: "")
    base = Fake(GPTConfig(L=1, d=2, heads=1, vocab=8, T=4), world_size=64, device_bytes=32e9)
    monkeypatch.setattr(setup, "host_bytes", lambda: float("inf"))
    for run in paper.table_2(base):
        L, stage = run["config"]["L"], run["stage"]
        assert run["tried"][L] == "ran" and run["tried"][L + 1] == "out of memory"
        psi = 12 * paper.WIDTHS[stage] ** 2 * L
        assert 0.87 < psi / run["theory_numel"] < 0.92
        assert run["theory_numel"] == pytest.approx(paper.TABLE_2[stage], rel=0.01)
    assert len(asked) < 4 * 9  # a bisection


def test_table_1_runs_the_cells_that_may_fit(monkeypatch):
    ran = []
    monkeypatch.setattr(setup, "host_bytes", lambda: float("inf"))
    monkeypatch.setattr(paper, "run", lambda one: ran.append(one) or {})
    list(paper.table_1(setup.Setup(setup.SHAPES["nano"], device_bytes=80e9)))
    for one in ran:
        name = next(name for name, config in setup.SHAPES.items() if config == one.config)
        printed = paper.TABLE_1[name][one.world_size][one.stage - 1]
        assert one.states_bytes / 1e9 == pytest.approx(printed, rel=0.02, abs=0.005) and printed < 90
    assert {(one.config.L, one.world_size) for one in ran if one.stage == 3} >= {(32, 4), (101, 64), (128, 1024)}


def test_the_shapes_are_the_papers_sizes():
    for name, psi in (("7.5B", 7.5e9), ("128B", 128e9), ("1T", 1e12)):
        assert setup.Setup(setup.SHAPES[name], world_size=1024).psi == pytest.approx(psi, rel=0.01)


def test_figure_1_of_a_small_model_has_the_papers_proportions():
    shape = GPTConfig(L=4, d=128, heads=2, vocab=64, T=8)
    runs = paper.figure_1(setup.Setup(shape, world_size=8, device="cpu"))
    assert [run["stage"] for run in runs] == [0, 1, 2, 3]
    for run in runs:
        assert run["states_bytes"] == pytest.approx(run["built_bytes"], rel=0.02)
