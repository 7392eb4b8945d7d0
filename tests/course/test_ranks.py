"""A function on N ranks: results, output, and every way in which a rank can fail."""

import gc
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from says import naming, tells
from torch.utils.data import DataLoader, Dataset, IterableDataset

import zero_mini.course.ranks
from zero_mini.activations.kept_outputs import ATTENTION
from zero_mini.comm import Comm
from zero_mini.course.ranks import RankError, Ranks, run
from zero_mini.trainer.gpt import GPT, GPTConfig

# Without `if __name__ == "__main__"`: what it prints shows if a rank ran it a second time. Its ranks are never closed,
# and their workers would not notice that they are gone.
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from zero_mini.course.ranks import Ranks

print("the script begins")

class Number:
    def __init__(self, value):
        self.value = value

def total(number):
    tensor = torch.tensor(number.value + dist.get_rank())
    dist.all_reduce(tensor)
    return Number(tensor.item())

class Slow(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, i):
        time.sleep(1000)

def load():
    sys.kept = iter(DataLoader(Slow(), num_workers=1))
    return [os.getpid(), *(worker.pid for worker in sys.kept._workers)]

ranks = Ranks(2)
print([result.value for result in ranks.run(total, Number(1)) if isinstance(result, Number)])
print(*sum(ranks.run(load), []), flush=True)
ranks.run(time.sleep, SECONDS)
"""

# For scripts that Python starts in a process of its own.
FINDS_ZERO_MINI = os.environ | {"PYTHONPATH": str(Path(zero_mini.course.ranks.__file__).parents[2])}


@dataclass
class Report:
    rank: int
    total: float


def report(start: float, step: float = 1.0) -> Report:
    tensor = torch.tensor(start + step * dist.get_rank())
    dist.all_reduce(tensor)
    return Report(dist.get_rank(), tensor.item())


def wait_for_rank_1_while_it(acts):
    print(f"before the failure: {dist.get_rank()}")
    if dist.get_rank() == 1:
        acts()
    dist.all_reduce(torch.zeros(1))


def raise_an_error():
    raise KeyError("no such layer")


class Slow(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> int:
        time.sleep(1000)
        return i


def start_a_worker() -> list[int]:
    """This rank's process and that of a DataLoader's worker, which would not notice that the rank is gone."""
    sys.kept = iter(DataLoader(Slow(), num_workers=1))
    return [os.getpid(), *(worker.pid for worker in sys.kept._workers)]


def is_running(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True).stdout
    return state.strip() not in ("", "Z")


def are_gone(pids: list[int], within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, pids))


# ---- results


@pytest.mark.parametrize("n", [1, 2, 3])
def test_each_rank_of_the_job_gives_its_result_in_rank_order(ranks, n):
    expected = [Report(rank, sum(10 + 2 * other for other in range(n))) for rank in range(n)]
    assert ranks(n).run(report, 10, step=2) == expected


def test_run_is_a_pool_used_once():
    before = set(multiprocessing.active_children())
    assert run(report, 2, 10, step=2) == [Report(0, 22), Report(1, 22)]
    assert set(multiprocessing.active_children()) == before


def test_lambdas_closures_and_local_classes_travel_both_ways(ranks):
    offset = 40

    class Local:
        def __init__(self, value):
            self.value = value

    results = ranks(2).run(lambda local: Local(local.value + offset + dist.get_rank()), Local(2))
    assert [type(result) for result in results] == [Local, Local]
    assert [result.value for result in results] == [42, 43]


def test_tensors_come_back_whole_and_keep_sharing_memory(ranks):
    def weights():
        tensor = torch.arange(6.0) + dist.get_rank()
        return tensor, tensor[2:4], torch.nn.Parameter(tensor), (2 * tensor).requires_grad_()

    for rank, (tensor, view, parameter, leaf) in enumerate(ranks(2).run(weights)):
        assert torch.equal(tensor, torch.arange(6.0) + rank)
        tensor[2] = -1
        assert view[0] == -1
        assert isinstance(parameter, torch.nn.Parameter) and leaf.requires_grad


def test_a_result_that_cannot_be_copied_is_an_error_that_says_so():
    with pytest.raises(RankError, match=r"^rank 0\b.*TypeError.*pickle"):
        run(threading.Lock, 1)


# ---- what a function finds on its rank


def test_the_cores_are_shared_out_unless_fewer_are_asked_for_and_warnings_are_silent(monkeypatch, capfd):
    def threads():
        warnings.warn("not shown", stacklevel=1)
        return torch.get_num_threads()

    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run(threads, 1) == [1]
    monkeypatch.setenv("OMP_NUM_THREADS", "1000")
    assert run(threads, 2) == [max(1, cores // 2)] * 2
    assert capfd.readouterr() == ("", "")


def test_a_rank_has_the_environment_of_its_start(monkeypatch):
    run(int, 1)
    monkeypatch.setenv("ZERO_MINI_TEST", "set after the forkserver started")
    assert run(os.getenv, 1, "ZERO_MINI_TEST") == ["set after the forkserver started"]


def test_a_rank_may_load_data_in_other_processes_with_classes_that_no_module_has(ranks):
    class Tens(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return 10 * i

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([7, 8])

    def load():
        hello = {"worker_init_fn": lambda worker: print(f"worker {worker}"), "collate_fn": lambda items: items}
        twice = DataLoader(Tens(), 2, num_workers=2, persistent_workers=True, **hello)
        return [list(twice), list(twice), [item.item() for item in DataLoader(Stream(), num_workers=1)]]

    assert ranks(2).run(load) == [[[[0, 10], [20, 30]]] * 2 + [[7, 8]]] * 2


def test_a_worker_does_not_free_the_process_groups_of_its_rank():
    class Collecting(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, i):
            return gc.collect() * 0

    def load():
        gc.disable()  # so that the worker is the first to collect
        cycle = [dist.new_group([0])]
        cycle.append(cycle)
        dist.destroy_process_group(cycle[0])
        del cycle
        return [item.item() for item in DataLoader(Collecting(), num_workers=1)]

    assert run(load, 1, timeout_s=20) == [[0]]


def test_unseeded_ranks_draw_numbers_of_their_own_in_each_job():
    def draw():
        unseeded = torch.rand(()).item(), random.random(), np.random.random()
        torch.manual_seed(0)
        return unseeded, torch.rand(()).item()

    unseeded, seeded = zip(*run(draw, 2), *run(draw, 1))
    assert [len(set(drawn)) for drawn in zip(*unseeded)] == [3, 3, 3]
    assert len(set(seeded)) == 1


def test_process_groups_made_in_a_call_are_gone_after_it(ranks):
    def open_files_after(groups):
        for _ in range(groups):
            cycle = [dist.new_group([0, 1])]  # a model is in such a one, with its hooks
            cycle.append(cycle)
        return len(os.listdir("/dev/fd"))

    before = ranks(2).run(open_files_after, 0)
    assert min(ranks(2).run(open_files_after, 5)) >= max(before) + 5
    assert ranks(2).run(open_files_after, 0) == before
    assert ranks(2).run(report, 1)[0].total == 3


def test_what_a_call_imported_is_not_scanned_for_garbage_after_every_later_one():
    """torch.compile imports 150,000 objects, whose scan takes longer than most calls."""

    def imports() -> int:
        sys.modules["a_large_one"] = [[] for _ in range(10_000)]
        return len(gc.get_objects())

    with Ranks(1) as pool:
        assert min(pool.run(imports)) > 10_000 > max(pool.run(lambda: len(gc.get_objects())))


# ---- output


def test_output_is_printed_in_rank_order_whichever_rank_is_faster(ranks, capsys):
    def speak():
        time.sleep(0.1 * (1 - dist.get_rank()))
        print("one\ntwo")
        print("an error line", file=sys.stderr)
        os.write(1, b"past Python's files\n")

    ranks(2).run(speak)
    lines = ["one", "two", "an error line", "past Python's files"]
    expected = [f"[rank {rank}] {line}" for rank in (0, 1) for line in lines]
    assert capsys.readouterr().out.splitlines() == expected


def test_output_of_a_single_rank_looks_as_if_it_ran_here(ranks, capsys):
    ranks(1).run(print, "one\n\ntwo")
    ranks(1).run(print, "10 %\r50 %\r100 %", end="")  # a progress bar
    assert capsys.readouterr().out == "one\n\ntwo\n100 %\n"


# ---- failures


@pytest.mark.parametrize(
    "act, cause",
    [
        (raise_an_error, "KeyError: 'no such layer'"),
        (lambda: sys.exit(3), "sys.exit(3)"),
        (lambda: os._exit(3), "status 3"),
        (lambda: os._exit(0), "status 0"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "SIGSEGV"),
    ],
    ids=["exception", "sys.exit", "os._exit(3)", "os._exit(0)", "SIGKILL", "SIGSEGV"],
)
def test_the_root_cause_comes_first_and_its_victims_last(act, cause, capsys):
    with pytest.raises(RankError) as caught:
        run(wait_for_rank_1_while_it, 3, act)
    first, *_, last = str(caught.value).splitlines()
    assert tells(first, "rank 1", cause) and tells(last, "ranks 0, 2")
    assert caught.value.rank == 1
    assert capsys.readouterr().out.splitlines() == [f"[rank {rank}] before the failure: {rank}" for rank in range(3)]


def test_the_traceback_shows_the_lines_of_the_function():
    with pytest.raises(RankError) as caught:
        run(raise_an_error, 1)
    assert re.search(rf'File "{re.escape(__file__)}", line \d+, in raise_an_error\n +raise KeyError', str(caught.value))


def test_a_failed_assert_explains_itself():
    def check():
        assert dist.get_rank() == 7

    with pytest.raises(RankError, match=naming("rank 0", "AssertionError: assert 0 == 7")):
        run(check, 1)


def test_an_error_that_all_ranks_share_is_told_once():
    with pytest.raises(RankError) as caught:
        run(raise_an_error, 2)
    assert tells(str(caught.value).splitlines()[0], "ranks 0, 1", "KeyError: 'no such layer'")
    assert str(caught.value).count("Traceback") == 1 and caught.value.rank == 0


def test_the_other_ranks_get_a_short_time_to_report_not_the_whole_time_out():
    def fail_or_sleep():
        raise_an_error() if dist.get_rank() == 0 else time.sleep(1000)

    begin = time.monotonic()
    with pytest.raises(RankError, match=r"^rank 0\b.*KeyError(.|\n)*\brank 1\b.*$"):
        run(fail_or_sleep, 2)
    assert time.monotonic() - begin < 20


def test_a_deadlock_is_named_with_the_line_each_rank_is_at():
    def barrier_of_rank_0_only():
        if dist.get_rank() == 0:
            dist.barrier()

    with pytest.raises(RankError) as caught:
        run(barrier_of_rank_0_only, 2, timeout_s=0.5)
    assert tells(str(caught.value).splitlines()[0], "rank 0", "0.5 s", "rank 1")
    assert re.search(r"in barrier_of_rank_0_only\n +dist\.barrier\(\)", str(caught.value))


def test_a_pool_keeps_its_processes_and_replaces_them_after_a_failure():
    with Ranks(2) as pool:
        first = pool.run(os.getpid)
        workers = [pid for _, pid in pool.run(start_a_worker)]
        assert pool.run(os.getpid) == first
        with pytest.raises(RankError):
            pool.run(raise_an_error)
        assert are_gone(first + workers)
        second = pool.run(os.getpid)
        assert not set(first) & set(second)
        second += [pid for _, pid in pool.run(start_a_worker)]
        assert pool.run(report, 1)[0].total == 3
    assert are_gone(second)


def test_a_rank_killed_between_two_calls_is_an_error_of_the_second():
    with Ranks(2) as pool:
        (killed, worker), _ = pool.run(start_a_worker)
        os.kill(killed, signal.SIGKILL)
        assert are_gone([killed])
        with pytest.raises(RankError, match=r"^rank 0\b.*SIGKILL"):
            pool.run(report, 1)
        assert are_gone([worker])
        assert pool.run(report, 1)[0].total == 3


# ---- nothing is left running


def test_ctrl_c_ends_all_ranks():
    with Ranks(2) as pool:
        pids = sum(pool.run(start_a_worker), [])
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            pool.run(time.sleep, 1000)
        assert are_gone(pids)
        assert pool.run(report, 1)[0].total == 3


def test_a_rank_leaves_ctrl_c_to_its_parent():
    assert run(lambda: os.kill(os.getpid(), signal.SIGINT), 1) == [None]


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "without close()"])
def test_a_script_runs_once_and_its_ranks_and_their_workers_end_when_it_does(tmp_path, killed):
    """It comes from a file, or from stdin."""
    script = SCRIPT.replace("SECONDS", "1000" if killed else "0")
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, tmp_path / "script.py" if killed else "-"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=FINDS_ZERO_MINI, text=True, **pipes) as parent:
        if not killed:
            parent.stdin.write(script)
        parent.stdin.close()
        assert [parent.stdout.readline() for _ in range(2)] == ["the script begins\n", "[3, 3]\n"]
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 4
        if killed:
            assert all(map(is_running, pids))
            parent.kill()
        assert are_gone(pids)
        assert (parent.stdout.read(), parent.stderr.read()) == ("", "")


# ---- refusals


def test_a_job_without_ranks_is_refused():
    with pytest.raises(ValueError, match=naming("world_size", 0, 1)):
        run(report, 0, 1)


def test_more_nccl_ranks_than_gpus_are_refused():
    gpus = torch.cuda.device_count()
    with pytest.raises(ValueError, match=naming(gpus + 1, gpus, 'backend="gloo"')):
        Ranks(gpus + 1, backend="nccl")


def test_a_function_that_reads_config_travels(ranks):
    import torch.distributed.config  # noqa: F401  (torch.distributed has attributes of the names in the function)

    def width(model):
        return dist.get_rank(), model.config.d

    assert ranks(2).run(width, GPT(GPTConfig(L=1, d=8, heads=1, T=4))) == [(0, 8), (1, 8)]


def test_a_function_that_names_operators_travels(ranks):
    assert ranks(2).run(lambda: ATTENTION) == [ATTENTION, ATTENTION]


def test_groups_of_a_few_ranks_may_be_made_again_in_the_next_call():
    def in_pairs() -> int:
        pair, _ = dist.new_subgroups(2)
        if dist.get_rank() == 2:
            time.sleep(0.2)  # the others would read its address of the call before, if it were still there
        comms = [Comm(pair) for _ in range(3)]
        return sum(comm.host.gather(comm.rank)[1] for comm in comms)

    with Ranks(4, device="cpu") as ranks:
        assert [ranks.run(in_pairs) for _ in range(3)] == [[3] * 4] * 3
