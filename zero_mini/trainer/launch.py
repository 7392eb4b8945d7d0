"""How ranks start and end. Which rank is this, and do all ranks have the same options?

torchrun gives each process its place in environment variables (RANK, WORLD_SIZE, MASTER_ADDR and so on); a process
without them is a job of one rank.

A collective hangs if a rank is missing or calls it with other sizes. So before the first one there is a roll call,
through the key-value store by which ranks find each other; each wait there has a time-out:

    rank 0   writes "rank 0", waits for all the others, judges, writes "verdict"
    rank 1   writes "rank 1", waits for                             "verdict"

Under its name a rank writes its options, and its problem if it has one. If the verdict is that they cannot start,
rank 0 prints the reason and all exit. A training that ends early gives one line too: `refusal_for` says which errors
are reasons, and `leave` prints.

Left out: elastic jobs, whose number of ranks changes.
"""

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from zero_mini.checkpoint.sharded import CheckpointError
from zero_mini.trainer.options import Options
from zero_mini.wire.lost_ranks import LostRank


class Refusal(Exception):
    """A reason not to train, other than a bug. It is raised on every rank, and only rank 0 prints it."""

    status = 2  # exit status of the process


class OwnRefusal(Refusal):
    """A reason that may exist on this rank alone, so this rank prints it."""


@dataclass(frozen=True)
class Place:
    """The place of this process in the job."""

    rank: int
    world_size: int
    local_rank: int  # among the processes of this machine
    local_world_size: int


def find_place(environ: Mapping[str, str]) -> Place:
    """Read this process's place from `environ`; OwnRefusal if its variables are incomplete or wrong.

    >>> find_place({})
    Place(rank=0, world_size=1, local_rank=0, local_world_size=1)
    >>> find_place({"RANK": "2", "WORLD_SIZE": "2"})
    Traceback (most recent call last):
    zero_mini.trainer.launch.OwnRefusal: RANK is 2 and WORLD_SIZE is 2, but ranks count from 0 to 1; torchrun sets both
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if not given:
        return Place(0, 1, 0, 1)
    if len(given) == 1:
        raise OwnRefusal(
            f"{given[0]} is set without its partner: set RANK and WORLD_SIZE, or neither; torchrun sets both"
        )
    try:
        rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_rank = int(environ.get("LOCAL_RANK", rank))
        local_world_size = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError as error:
        raise OwnRefusal(f"RANK, WORLD_SIZE and their LOCAL_ partners must be whole numbers: {error}") from error
    if not 0 <= rank < world_size:
        last = max(world_size - 1, 0)
        raise OwnRefusal(
            f"RANK is {rank} and WORLD_SIZE is {world_size}, but ranks count from 0 to {last}; torchrun sets both"
        )
    return Place(rank, world_size, local_rank, local_world_size)


def open_store(place: Place, environ: Mapping[str, str], time_out: timedelta) -> dist.Store:
    """The store that all ranks share: torchrun's, or rank 0's; OwnRefusal if it cannot be reached or opened."""
    if place.world_size == 1:
        return dist.HashStore()  # no other ranks, so no port is needed
    try:
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise OwnRefusal(
            f"{place.world_size} ranks need MASTER_ADDR and MASTER_PORT ({error}); torchrun sets both"
        ) from error
    # torchrun may serve the store itself. If it restarts the ranks, they must not read the entries of the dead ones:
    # hence the prefix below.
    opens = place.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(host, port, is_master=opens, timeout=time_out, wait_for_workers=False)
    except (dist.DistError, RuntimeError) as error:
        if opens:
            reason = "is taken" if "EADDRINUSE" in str(error) else f"cannot be opened ({first_line(error)})"
            raise OwnRefusal(f"port {port} {reason}; choose another MASTER_PORT, or torchrun --standalone") from error
        raise OwnRefusal(
            f"rank {place.rank} of {place.world_size} found no rank 0 at {host}:{port} within "
            f"{time_out.total_seconds():g} s; start all ranks, or let torchrun --standalone do it"
        ) from error
    return dist.PrefixStore(f"start {environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def roll_call(store: dist.Store, place: Place, arguments: dict, problem: str | None, time_out: timedelta) -> None:
    """Refusal, on every rank, unless all are there with the same `arguments` and none has a `problem`."""
    store.set(f"rank {place.rank}", json.dumps([arguments, problem]))
    verdict = judge_all(store, place, time_out) if place.rank == 0 else wait_for_verdict(store, place, time_out)
    if verdict:
        raise Refusal(verdict)


def judge_all(store: dist.Store, place: Place, time_out: timedelta) -> str | None:
    """Rank 0 waits for every rank's entry, then publishes why they cannot start, or that they can."""
    names = [f"rank {rank}" for rank in range(place.world_size)]
    try:
        store.wait(names, time_out)
        verdict = judge([json.loads(store.get(name)) for name in names])
    except dist.DistStoreError:
        missing = [name for name in names if not store.check([name])]
        verdict = (
            f"{len(names) - len(missing)} of {len(names)} ranks arrived within {time_out.total_seconds():g} s; "
            f"missing: {', '.join(missing)}; start them too, or let torchrun --standalone start all"
        )
    store.set("verdict", json.dumps(verdict))
    return verdict


def wait_for_verdict(store: dist.Store, place: Place, time_out: timedelta) -> str | None:
    """The verdict of rank 0; OwnRefusal if none comes."""
    try:
        store.wait(["verdict"], 2 * time_out)  # twice, because rank 0 itself waits one time-out for missing ranks
        return json.loads(store.get("verdict"))
    except dist.DistStoreError as error:
        raise OwnRefusal(f"rank {place.rank} waited for rank 0 in vain; start all ranks") from error
    except dist.DistNetworkError:
        sys.exit(2)  # rank 0 served the store; it has printed the reason and exited


def judge(words: list[tuple[dict, str | None]]) -> str | None:
    """Why ranks that wrote these `words`, (arguments, problem), cannot start; None if they can.

    >>> judge([({"lr": 0.001}, None), ({"lr": 0.01}, None)])
    'ranks disagree on --lr: rank 0 has 0.001, rank 1 has 0.01'
    >>> judge([({}, None), ({}, "it.txt does not exist")])
    'rank 1: it.txt does not exist'
    """
    first, _ = words[0]
    for rank, (arguments, _) in enumerate(words):
        for name in first.keys() & arguments.keys():  # a rank that could not read its arguments has none
            if first[name] != arguments[name]:
                flag = name.replace("_", "-")
                return f"ranks disagree on --{flag}: rank 0 has {first[name]}, rank {rank} has {arguments[name]}"
    for rank, (_, problem) in enumerate(words):
        if problem:
            return f"rank {rank}: {problem}" if rank else problem
    return None


def refusal_for(error: Exception, options: Options, place: Place) -> Refusal | None:
    """Return a Refusal with the reason in one line, or None if `error` is a bug: then its traceback is needed.

    The Refusal is an OwnRefusal if another rank died or is late, or memory is short.
    """
    line = first_line(error)
    if isinstance(error, CheckpointError):
        return Refusal(line)
    if isinstance(error, ValueError) and line.startswith("offload"):
        return Refusal(f"--{line}")
    if not isinstance(error, RuntimeError):
        return None
    why = line.partition(". ")[0]
    if "step was not taken" in str(error):
        return Refusal(line)
    if "gradients overflowed" in why:
        return Refusal(f"{why} (--lr {options.lr:g}, --precision {options.precision})")
    if isinstance(error, torch.OutOfMemoryError):
        return OwnRefusal(f"rank {place.rank}: {why}; lower --micro-batch, or raise --stage")
    if isinstance(error, LostRank):
        return OwnRefusal(line)
    if isinstance(error, dist.DistError) or "gloo" in why:  # gloo has no exception of its own
        late = f"another rank has died, or is more than {options.time_out:g} s late"
        return OwnRefusal(f"rank {place.rank}: {late} ({why})")
    return None


def leave(refusal: Refusal, place: Place, store: dist.Store | None, environ: Mapping[str, str]) -> NoReturn:
    """Exit with the refusal's status; print the reason in one line if this rank is the one to print it.

    torchrun prints a report after a rank has failed, and reads the reason from a file that it names: the same line is
    written there, so it ends the report.
    """
    own = isinstance(refusal, OwnRefusal)
    line = f"train_gpt.py: error: {refusal}"
    if own or place.rank == 0:
        print(line, file=sys.stderr, flush=True)
    if environ.get("TORCHELASTIC_ERROR_FILE"):
        reason = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": reason}))
    if not own:
        # torchrun ends the others as soon as one rank has exited: rank 0 must have printed by then. And rank 0, which
        # may serve the store, must not exit before the others have read "said".
        answers = [f"heard {rank}" for rank in range(1, place.world_size)]
        with contextlib.suppress(dist.DistError):
            if place.rank == 0:
                store.set("said", "")
                until = time.monotonic() + 2
                while time.monotonic() < until and not store.check(answers):  # wait() would print torch's warnings
                    time.sleep(0.02)
            else:
                store.wait(["said"], timedelta(seconds=10))
                store.set(f"heard {place.rank}", "")
    sys.exit(refusal.status)


def first_line(error: BaseException) -> str:
    """The first line of an error's message; torch appends C++ traces."""
    return str(error).strip().partition("\n")[0]
