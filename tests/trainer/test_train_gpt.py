"""The trainer: the same result at every stage and number of ranks, and one line for whatever cannot be trained."""

import contextlib
import json
import os
import random
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import Forked, job_of_two
from says import naming, tells

from zero_mini import train_gpt
from zero_mini.train_gpt import main
from zero_mini.trainer import fits, launch, report
from zero_mini.trainer.gpt import GPT, PRESETS, GPTConfig, parameter_count
from zero_mini.trainer.job import find_device, find_precision, prepare
from zero_mini.trainer.launch import Place, Refusal
from zero_mini.trainer.options import Options, parse
from zero_mini.trainer.progress import read
from zero_mini.update.loss_scale import LossScaler
from zero_mini.zeroify import zeroify

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = "zero_mini/train_gpt.py"
# --width, not --d: see trainer/options.py.
TINY = [
    "--L",
    "1",
    "--width",
    "32",
    "--heads",
    "2",
    "--global-batch",
    "8",
    "--sequence-length",
    "16",
    "--log-every",
    "1",
]
TINY += ["--sample-length", "5"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
IN_TWO = Place(rank=0, world_size=2, local_rank=0, local_world_size=2)


def start(command: list[str], **environ: str) -> subprocess.Popen:
    # PYTHONPATH must not be what lets the script find its package.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    kept |= {"OMP_NUM_THREADS": "1", **environ}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=REPOSITORY, env=kept, text=True, stdout=pipe, stderr=pipe)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


def refusal(capsys, *argv: str) -> str:
    """The one line that main() prints on stderr before it exits with status 2."""
    with pytest.raises(SystemExit) as stop:
        main(list(argv))
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert len(lines) == 1 and lines[0].startswith("train_gpt.py: error: ")
    return lines[0].removeprefix("train_gpt.py: error: ")


def said(err: str) -> list[str]:
    """Lines of the trainer itself; torchrun and torch's C++ side write to stderr too."""
    return [line for line in err.splitlines() if line.startswith("train_gpt.py: ")]


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [line.get("loss", line.get("validation_loss")) for line in metrics(folder)]


def free_port() -> int:
    """One below 32768, which no system gives to a socket that asks for any: those of other tests will not take it."""
    for port in random.SystemRandom().sample(range(20000, 29000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("100 ports below 29000 are taken")


@pytest.fixture
def by_hand(monkeypatch):
    """by_hand(rank, world_size): this process is told that it is that rank. Returns the port of the job."""

    def tell(rank: int, world_size: int) -> int:
        port = free_port()
        for name, value in dict(RANK=rank, WORLD_SIZE=world_size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port).items():
            monkeypatch.setenv(name, str(value))
        return port

    return tell


# --- it trains --------------------------------------------------------------------------------


def test_one_rank_alone_trains_and_says_how_to_get_more(by_hand, alone, capsys):
    by_hand(0, 1)
    main(["--stage", "2", *TINY, "--steps", "3"])
    out = capsys.readouterr().out
    assert "torchrun --standalone --nproc-per-node 2 zero_mini/train_gpt.py --stage 2" in " ".join(out.split())
    assert "validation loss: " in out and "step 3/3: loss " in out


def train_at_each_stage(folder: Path, *argv: str) -> None:
    for stage in range(4):
        options = parse([*TINY, "--stage", str(stage), "--out", str(folder / str(stage)), *argv])
        place = Place(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size())
        train_gpt.train(options, prepare(options, place), place)


def test_losses_depend_neither_on_the_stage_nor_on_the_number_of_ranks(ranks, tmp_path):
    for n in (1, 2):
        ranks(n).run(train_at_each_stage, tmp_path / str(n), "--steps", "5", "--lr", "0.01")
    expected = losses(tmp_path / "1" / "0")
    assert len(expected) == 7  # validation, five steps, validation
    assert expected[-1] < expected[0] - 0.05, "nothing was learned, so that equality would prove nothing"
    for n in (1, 2):
        for stage in range(4):
            assert losses(tmp_path / str(n) / str(stage)) == pytest.approx(expected, rel=1e-5), (
                f"{n} ranks, stage {stage}"
            )


def test_accumulated_micro_batches_give_the_losses_of_one_and_cost_the_wire_what_the_formula_says(ranks, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ranks(2).run(train_at_each_stage, whole, "--steps", "3", "--lr", "0.01")
    ranks(2).run(train_at_each_stage, parts, "--steps", "3", "--lr", "0.01", "--micro-batch", "1")
    shape = json.loads((whole / "0" / "config.json").read_text())["model_shape"]
    psi = parameter_count(GPTConfig(**shape))
    for stage in range(4):
        assert losses(parts / str(stage)) == pytest.approx(losses(whole / str(stage)), rel=1e-5)
        for folder, k in ((whole, 1), (parts, 4)):
            sent = metrics(folder / str(stage))[3]["wire_bytes"]
            paper = report.wire_bytes(psi, stage, 2, 4, k)
            if stage < 3:
                assert paper <= sent < 1.02 * paper
            else:  # what still stands in a slot is not sent again; a single block always does
                assert sent < paper


def test_16_bits_learn_what_fp32_learns(ranks, tmp_path):
    for precision in ("fp32", "bf16", "fp16"):
        ranks(2).run(train_at_each_stage, tmp_path / precision, "--steps", "4", "--precision", precision)
    for stage in range(4):
        exact = losses(tmp_path / "fp32" / str(stage))
        for precision in ("bf16", "fp16"):
            assert losses(tmp_path / precision / str(stage)) == pytest.approx(exact, rel=5e-3)
        last = metrics(tmp_path / "fp16" / str(stage))[-2]
        assert (last["loss_scale"], last["skipped"]) == (2.0**16, 0)


def test_a_skipped_step_is_counted_and_moves_neither_weights_nor_learning_rate(ranks, tmp_path):
    def train(exponent: int) -> None:
        """With warm-up, every step has a rate of its own."""

        def begun(*args, **options):
            return zeroify(*args, scaler=LossScaler(scale=2.0**exponent), **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_gpt, "zeroify", begun)
            folder = tmp_path / str(exponent)
            train_at_each_stage(folder, "--steps", "4", "--log-every", "1", "--precision", "fp16")

    for exponent in (16, 40):
        ranks(2).run(train, exponent)
    for stage in range(4):
        good, skipping = (metrics(tmp_path / str(exponent) / str(stage)) for exponent in (16, 40))
        assert [line["skipped"] for line in skipping[1:-1]] == [1, 2, 3, 4] and "loss" not in skipping[1]
        assert [line["loss_scale"] for line in skipping[1:-1]] == [2.0**39, 2.0**38, 2.0**37, 2.0**36]
        assert {line["lr"] for line in skipping[1:-1]} == {good[1]["lr"]}
        assert skipping[-1]["validation_loss"] == skipping[0]["validation_loss"]


def test_activations_that_are_computed_again_change_no_loss(ranks, tmp_path):
    plain, saving = tmp_path / "plain", tmp_path / "saving"
    ranks(2).run(train_at_each_stage, plain, "--steps", "3")
    options = ["--checkpoint-activations", "1", "--keep-activations", "host", "--loss-chunks", "4"]
    ranks(2).run(train_at_each_stage, saving, "--steps", "3", *options)
    for stage in range(4):
        assert losses(saving / str(stage)) == pytest.approx(losses(plain / str(stage)), rel=1e-6)
        sent = [metrics(folder / str(stage))[-2]["wire_bytes"] for folder in (plain, saving)]
        assert sent[0] == sent[1]


def test_what_waited_in_host_memory_is_said_at_the_end(alone, capsys):
    main([*TINY, "--L", "3", "--steps", "1", "--checkpoint-activations", "2", "--keep-activations", "host"])
    two_inputs = 2 * 8 * 16 * 32 * 4  # of (B, T, d) in fp32
    assert tells(capsys.readouterr().out, "2 blocks", f"{two_inputs / 1e3:.1f} kB")


def test_host_memory_without_checkpointing_is_refused(capsys):
    said = refusal(capsys, *TINY, "--keep-activations", "host")
    assert tells(said, "--keep-activations", "--checkpoint-activations 1")


def test_weights_written_by_two_ranks_at_stage_3_start_one_rank_at_stage_0(tmp_path, alone, capsys):
    argv = ["--stage", "3", *TINY, "--steps", "40", "--lr", "0.02", "--out", str(tmp_path / "two")]
    job = job_of_two(tmp_path / "said", free_port(), REPOSITORY / SCRIPT, argv, argv)
    (status, out, err), (other, nothing, _) = [rank.finish() for rank in job]
    assert (status, other, nothing) == (0, 0, ""), err
    first = losses(tmp_path / "two")
    assert first[-1] < first[0] - 1.5
    assert out.count("validation loss: ") == 1
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        *("config.json", "lock", "metrics.jsonl", "weights.pt")
    ]

    again = ["--steps", "1", "--init-from", str(tmp_path / "two" / "weights.pt"), "--out", str(tmp_path / "one")]
    main([*TINY, "--stage", "0", *again])
    assert losses(tmp_path / "one")[0] == pytest.approx(first[-1], rel=1e-5)


def test_flags_and_options_are_the_same_thing():
    assert parse([]) == Options()
    assert parse(["--d", "64", "--lr", "1e-4"]) == parse(["--width", "64", "--lr", "0.0001"]) == Options(d=64, lr=1e-4)


# --- what cannot be trained -------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, things",
    [
        ("--stage 4", ["--stage", "0, 1, 2 or 3", 4]),
        ("--lr nan", ["--lr", "nan"]),
        ("--lr 0", ["--lr", 0.0]),
        ("--lr inf", ["--lr", "inf"]),
        ("--clip -1", ["--clip", -1.0]),
        ("--weight-decay -0.1", ["--weight-decay", -0.1]),
        ("--steps 0", ["--steps", 1, 0]),
        ("--steps 2.5", ["--steps", 1, 2.5]),
        ("--seed 99999999999999999999", ["--seed", "9.22337e+18"]),
        ("--time-out 1e300", ["--time-out", "1e+09"]),
        ("--stage two", ["--stage", "0, 1, 2 or 3", "two"]),
        *((f"{flag}=", [flag]) for flag in ("--out", "--data", "--init-from", "--offload", "--resume")),
        ("--micro-batch -1", ["--micro-batch", 1, -1]),
        ("--global-batch 0", ["--global-batch", 1, 0]),
        ("--time-out nan", ["--time-out", "nan"]),
        ("--model 7B", ["--model", "nano", "124M", "350M", "774M", "1.5B", "7B"]),
        ("--step 5", ["--step 5", "--steps"]),
        ("--stgae=2", ["--stgae=2", "--stage"]),
        ("--d 130 --heads 4", ["d=130", "heads=4", 128, 132]),  # the nearest that would do
        ("--data nowhere.txt", ["nowhere.txt"]),
        ("--init-from nowhere.pt", ["--init-from", "nowhere.pt"]),
        ("--global-batch 33 --micro-batch 4", [33, 4]),
        ("--backend nccl --device cpu", ["nccl"]),
    ],
)
def test_a_bad_argument_is_refused_in_one_line(alone, capsys, argv, things):
    assert tells(refusal(capsys, *argv.split()), *things)


@pytest.mark.parametrize(
    "data, things",
    [
        (b"Seventeen bytes.\n", [17, 65]),
        (b"", ["data"]),
        (b"\x7fELF\x02\xd0\xff", ["UTF-8", "0xd0", 5]),
        (b"a" * 600, ["validation", 60, 65]),
        (b"a" * 500, [7, 64, 8]),
    ],
)
def test_data_that_holds_no_text_or_too_little_is_refused(alone, capsys, tmp_path, data, things):
    (tmp_path / "data").write_bytes(data)
    assert tells(refusal(capsys, "--global-batch", "8", "--data", str(tmp_path / "data")), *things)


def test_fewer_samples_than_ranks_are_refused(tmp_path):
    (tmp_path / "data").write_text("a" * 800)
    options = Options(data=str(tmp_path / "data"), global_batch=2)
    with pytest.raises(ValueError, match=naming(1, 64, 2)):
        prepare(options, IN_TWO)


def test_a_global_batch_that_ranks_cannot_share_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=naming(33, 2, 4, 8, 32, 40)):
        prepare(Options(global_batch=33, micro_batch=4), IN_TWO)
    with pytest.raises(ValueError, match=naming(33, 2, 32, 34)):  # no micro-batch given: any even number would do
        prepare(Options(global_batch=33), IN_TWO)


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("auto", "auto", Place(3, 4, 1, 2)) == (torch.device("cuda", 1), "nccl")
    assert find_device("auto", "gloo", Place(3, 4, 3, 4)) == (torch.device("cpu"), "gloo")
    with pytest.raises(ValueError, match=naming("nccl", 4, 2)):
        find_device("auto", "auto", Place(3, 4, 3, 4))
    with pytest.raises(ValueError, match=naming("--device cpu", "--backend nccl")):
        find_device("cpu", "nccl", IN_TWO)


def test_bf16_is_refused_on_a_gpu_that_would_only_emulate_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    with pytest.raises(ValueError, match=naming("Old GPU", "bf16", "--precision fp16")):
        prepare(Options(precision="bf16"), IN_TWO)
    assert find_precision("auto", torch.device("cuda")) == "fp16"


def test_a_folder_that_cannot_be_written_or_is_full_is_refused_at_the_start(alone, capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    assert tells(refusal(capsys, "--out", str(tmp_path / "file")), tmp_path / "file", "File exists")
    usage = report.shutil.disk_usage(tmp_path)._replace(free=300_000)
    monkeypatch.setattr(report.shutil, "disk_usage", lambda folder: usage)
    assert tells(refusal(capsys, "--out", str(tmp_path / "new")), "3.70 MB", "300 kB")


def test_weights_of_another_model_are_refused_by_name(alone, capsys, tmp_path):
    config = GPTConfig(L=1, d=32, heads=2, T=16)
    torch.save(GPT(config).state_dict(), tmp_path / "weights.pt")
    (tmp_path / "config.json").write_text(json.dumps({"model_shape": {"heads": 2}}))
    (tmp_path / "text.pt").write_text("no weights at all")
    argv = [*TINY, "--init-from", str(tmp_path / "weights.pt")]
    assert tells(refusal(capsys, *argv, "--width", "64"), "wte.weight", "(256, 32)", "(256, 64)")
    assert tells(refusal(capsys, *argv, "--L", "2"), "blocks.1.ln_1.weight", "(32,)")
    assert tells(refusal(capsys, *argv, "--heads", "4"), "--heads 2")
    assert tells(refusal(capsys, *argv[:-1], str(tmp_path / "text.pt")), tmp_path / "text.pt")


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(alone, capsys):
    argv = [*TINY, "--steps", "9", "--lr", "1e30", "--clip", "1e30", "--log-every", "5", "--warmup", "0"]
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert tells(last_line, "train_gpt.py: error:", "nan", "step 2", "rank 0", "--lr", "1e+30")


@pytest.mark.parametrize("more", [["--lr", "1e+30"], ["--lr", "1e+09", "--steps", "4", "--precision", "fp16"]])
def test_a_model_that_the_last_update_broke_is_said_before_it_writes_a_text(alone, capsys, more):
    with pytest.raises(SystemExit) as stop:
        main([*TINY, "--steps", "1", "--warmup", "0", "--sample-length", "4", *more])
    assert stop.value.code == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert tells(last_line, "train_gpt.py: error:", "validation loss", "nan", "--lr", more[1])


def test_a_folder_with_the_weights_of_a_run_that_ended_is_not_written_over(alone, capsys, tmp_path):
    argv = [*TINY, "--steps", "1", "--out", str(tmp_path)]
    main(argv)
    weights = (tmp_path / "weights.pt").read_bytes()
    capsys.readouterr()
    for resume in ([], ["--resume", "auto"]):  # there is no checkpoint to go on from
        said = refusal(capsys, *argv, "--seed", "1", *resume)
        assert tells(said, tmp_path, "weights.pt") and "--resume" not in said
    (tmp_path / "step-1").mkdir()
    assert tells(refusal(capsys, *argv), "--resume auto")
    assert (tmp_path / "weights.pt").read_bytes() == weights


# --- ranks that do not fit together -----------------------------------------------------------


def test_ranks_with_different_arguments_leave_with_one_line_between_them(tmp_path):
    argvs = [[*TINY, "--lr", lr] for lr in ("0.001", "0.01")]
    job = job_of_two(tmp_path, free_port(), REPOSITORY / SCRIPT, *argvs)
    (status_0, _, err_0), (status_1, _, err_1) = [rank.finish() for rank in job]
    assert (status_0, status_1) == (2, 2)
    (line,) = said(err_0)
    assert tells(line, "--lr", "rank 0", 0.001, "rank 1", 0.01)
    assert said(err_1) == []


def test_under_torchrun_a_bad_argument_is_said_once():
    status, _, err = finish(start([*TORCHRUN, "--nproc-per-node", "2", SCRIPT, "--stage", "4"]))
    assert status == 1
    (line,) = said(err)
    assert tells(line, "--stage", "0, 1, 2 or 3", 4)
    assert "exitcode  : 2" in err
    last = [line for line in err.splitlines() if line.strip(" =")][-1]  # of torchrun's report, under which is a rule
    assert last.endswith(line)


def test_a_model_that_cannot_fit_is_refused_with_what_would(monkeypatch):
    def refused(**options) -> str:
        with pytest.raises(ValueError) as error:
            prepare(Options(**options), IN_TWO)
        return str(error.value)

    monkeypatch.setattr(fits, "host_bytes", lambda: 40e9)  # 19.7 GB for each of two ranks
    would_fit = ["--stage 1", "--stage 2", "--stage 3", "--model 774M"]
    assert tells(refused(model="1.5B", stage=0), "--model 1.5B", "--stage 0", "24.9 GB", "19.7 GB", *would_fit)
    fits.check_memory(Options(stage=1), PRESETS["1.5B"], torch.device("cpu"), torch.float32, IN_TWO)
    monkeypatch.setattr(fits, "host_bytes", lambda: 1e9)
    assert "124M" not in refused(model="1.5B", stage=3) and "nano" in refused(model="1.5B", stage=3)


@pytest.mark.parametrize("broken", ["encoding", "pipe", "disk"])
def test_whatever_breaks_the_printing_the_weights_are_there(tmp_path, broken):
    argv = [*TINY, "--steps", "3", "--sample-length", "200", "--out", str(tmp_path)]
    command = [sys.executable, SCRIPT, *argv]
    if broken == "encoding":
        status, out, err = Forked(tmp_path, REPOSITORY / SCRIPT, *argv, PYTHONIOENCODING="ascii").finish()
        assert out.isascii() and "\r" not in out and not re.search(r"[\x00-\x09\x0b-\x1f]", out)
        assert [line for line in out.splitlines() if line.startswith("step 3/3: loss ")]
    else:
        line = f"{shlex.join(command)} {'| head -1' if broken == 'pipe' else '> /dev/full'}"
        status, _, err = finish(start(["bash", "-c", line]))
    assert status == 0 and "Traceback" not in err and "Exception" not in err
    assert (tmp_path / "weights.pt").is_file()


def test_a_problem_of_one_rank_is_said_by_rank_0():
    words = [({"lr": 1.0}, None), ({"lr": 1.0}, "it.txt is a problem")]
    assert launch.judge(words) == "rank 1: it.txt is a problem"
    assert launch.judge([({"lr": 1.0}, None)] * 2) is None


def test_a_rank_outside_the_world_is_refused(by_hand, capsys):
    by_hand(3, 2)
    assert tells(refusal(capsys), "RANK", 3, "WORLD_SIZE", 2)


def test_a_world_size_alone_is_refused(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE" in refusal(capsys)


def test_rank_0_names_the_ranks_that_did_not_arrive(by_hand, capsys):
    by_hand(0, 3)
    assert tells(refusal(capsys, "--time-out", "0.5"), 1, 3, "0.5 s", "rank 1", "rank 2")


def test_a_rank_that_finds_no_rank_0_says_where_it_looked(by_hand, capsys):
    port = by_hand(1, 2)
    assert tells(refusal(capsys, "--time-out", "1"), "rank 1", "rank 0", f"127.0.0.1:{port}", "1 s")


def test_a_taken_port_is_refused(by_hand, capsys, monkeypatch):
    by_hand(0, 2)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert tells(refusal(capsys), port, "MASTER_PORT")


def test_a_lost_rank_is_one_line_but_a_mistake_keeps_its_traceback(alone, capsys, monkeypatch):
    def lose(*_):
        raise RuntimeError("[gloo/pair.cc:553] Connection closed by peer. This is typically caused by\nmore")

    monkeypatch.setattr(train_gpt, "train", lose)
    line = refusal(capsys, *TINY, "--time-out", "9")
    assert tells(line, "rank 0", "9 s", "Connection closed by peer") and "typically" not in line
    dist.destroy_process_group()

    def mistake(*_):
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(train_gpt, "train", mistake)
    with pytest.raises(RuntimeError, match="shapes cannot"):
        main(TINY)


def test_every_rank_hears_of_a_loss_that_is_not_finite_on_one():
    class Handle:
        class comm:
            class host:
                gather = staticmethod(lambda mine: [mine, [[1.0, 1.0], [float("inf"), 1.0]]])

    recent = [torch.tensor([1.0, 1.0])] * 2
    with pytest.raises(Refusal, match=naming("inf", "step 20", "rank 1")):
        read(recent, 20, Handle, Options())
