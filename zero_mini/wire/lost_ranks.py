"""Which rank is missing? Each rank logs its launches, so that the error of a failed collective can name it.

The error of a failed collective names a broken connection, not the rank that broke it: that rank may be late, may
have died, or may have launched something else. So every rank keeps a page of its own in the key-value store through
which ranks found each other, and adds a line before each launch:

    rank 0   step 12: all_gather of root, all_gather of blocks.0, all_gather of blocks.1     waits for rank 1 and 2
    rank 1   step 12: all_gather of root                                                     is late, or dead
    rank 2   step 12: all_gather of root, all_gather of blocks.0, all_gather of blocks.2     launched something else

A rank whose collective fails reads all pages, also those of dead ranks. Sending a line to the store does not block.

Left out: NCCL, whose failures never reach `work.wait()`: torch's watchdog ends the process, and torch's flight
recorder has similar pages.
"""

import contextlib
import time
from datetime import timedelta

import torch.distributed as dist

PATIENCE_S = 2.0  # a collective waits so long before its rank reads the pages of the others
LISTEN_S = 0.5  # wait after a failure for other ranks to fail as well; the rest are late, dead, or far off in a ring
LINES = 10_000  # of a page: an evaluation without steps may go on for ever

Position = tuple[int, int]  # (step, number of the collective in it, from 1)


class LostRank(RuntimeError):
    """A collective that could not complete, because not every rank took part in it."""


class Whereabouts:
    """Writes this rank's pages, of which the store keeps the last two, and reads those of all ranks.

    store: shared by these ranks, with a prefix of their own.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        self.store, self.rank, self.world_size = store, rank, world_size
        self.pages = 0
        self.begin_page(step=0, number=0)

    def note(self, line: str, here: Position) -> None:
        """This rank is about to launch the collective at `here`."""
        step, number = here
        if number % LINES == 0:
            self.begin_page(step, number - 1)
        with contextlib.suppress(dist.DistError):  # the store dies with the rank that serves it; training may go on
            self.store.append(f"page {self.rank} {self.pages % 2}", f"{line}\n")

    def begin_page(self, step: int, number: int) -> None:
        """Start a new page: the next lines are of that step, after collective `number`."""
        self.pages += 1
        with contextlib.suppress(dist.DistError):
            self.store.set(f"page {self.rank} {self.pages % 2}", f"{step} {number}\n")

    def first_difference(self) -> str | None:
        """In words, the first position at which ranks launched different collectives; None if pages show none."""
        try:
            return self.find_difference([self.read(rank) for rank in range(self.world_size)])
        except dist.DistError:
            return None  # the store is gone, and so is the rank that served it: the collective will fail by itself

    def find_difference(self, pages: list[dict[Position, str]]) -> str | None:
        for position in sorted(set().union(*pages)):
            lines = {rank: page[position] for rank, page in enumerate(pages) if position in page}
            if message := difference(position, lines):
                return message
        return None

    def account(self, here: Position) -> str:
        """In words, after this rank failed in the collective at `here`: which rank is missing, and its last launch."""
        try:
            self.store.set(f"failed {self.rank}", "")
            others = [rank for rank in range(self.world_size) if rank != self.rank]
            deadline = time.monotonic() + LISTEN_S
            while (silent := [r for r in others if not self.has(f"failed {r}")]) and time.monotonic() < deadline:
                time.sleep(0.02)
            return self.judge([self.read(rank) for rank in range(self.world_size)], here, silent)
        except dist.DistError:
            return "the key-value store is gone, and with it all ranks' pages; rank 0 may have kept it, and died"

    def judge(self, pages: list[dict[Position, str]], here: Position, silent: list[int]) -> str:
        """In words, what the pages of all ranks show; the ranks in `silent` have not failed yet."""
        if message := self.find_difference(pages):
            return message
        behind = [rank for rank, page in enumerate(pages) if max(page, default=(0, 0)) < here]
        reports = []
        # A rank that failed as well is a victim too, so silent ranks are the first suspects.
        for rank in [rank for rank in silent if rank in behind] or silent or behind:
            (step, number), line = max(pages[rank].items(), default=((0, 0), "nothing"))
            state = "did not come so far" if rank in behind else "came so far, and says nothing more"
            reports.append(f"rank {rank} {state}: the last it launched is {line}, number {number} of step {step}")
        return "; ".join(reports) or "every rank came so far, and every one lost a connection"

    def read(self, rank: int) -> dict[Position, str]:
        """{(step, number): line} of a rank's last two pages."""
        page = {}
        for key in (f"page {rank} 0", f"page {rank} 1"):
            if self.has(key):
                head, *lines = self.store.get(key).decode().splitlines()
                step, number = map(int, head.split())
                page |= {(step, number + index): line for index, line in enumerate(lines, start=1)}
        return page

    def has(self, key: str) -> bool:
        return self.store.check([key])  # get() would block until it exists


def open_pages(group: dist.ProcessGroup, name: str) -> Whereabouts | None:
    """This rank's pages, under a name of the group's own; None with NCCL."""
    if dist.get_backend(group) != "gloo":
        return None
    store = dist.PrefixStore(f"zero_mini {name}", dist.distributed_c10d._get_default_store())
    return Whereabouts(store, dist.get_rank(group), dist.get_world_size(group))


def difference(position: Position, lines: dict[int, str]) -> str | None:
    """In words, the difference if ranks launched different collectives at `position`. lines: rank -> its launch.

    >>> print(difference((1, 2), {0: "all_gather of a", 1: "all_gather of a"}))
    None
    >>> difference((1, 2), {0: "all_gather of a", 1: "all_gather of b"}).partition(";")[0]
    'ranks ran different modules: number 2 of step 1 is all_gather of a on rank 0 but all_gather of b on rank 1'
    >>> difference((1, 2), {0: "all_gather of a in model.state_dict()", 1: "all_gather of a"}).partition("; ")[2]
    'call model.state_dict() on every rank'
    """
    (first, one), *others = lines.items()
    for rank, other in others:
        if other != one:
            step, number = position
            purposes = {line.partition(" in ")[2] for line in (one, other)} - {"", "a step"}
            remedy = (
                f"call {min(purposes)} on every rank" if purposes else "every rank must run the same units in order"
            )
            return (
                f"ranks ran different modules: number {number} of step {step} is {one} on rank {first} "
                f"but {other} on rank {rank}; {remedy}"
            )
    return None


def lost_rank(what: str, here: Position, whereabouts: Whereabouts | None, error: RuntimeError) -> LostRank:
    """The error of a collective that did not complete at `here`: which rank is missing, and torch's reason."""
    reason = str(error).partition("\n")[0].partition(". ")[0].rpartition("] ")[2]  # no C++ file, no advice
    account = "another rank is late, has died or launched something else"
    return LostRank(f"{what} did not complete: {whereabouts.account(here) if whereabouts else account} ({reason})")


def wait(work: dist.Work, what: str, position: Position, whereabouts: Whereabouts | None) -> None:
    """Return when the work is done. LostRank if it cannot complete; soon, if another rank launched something else."""
    patience = timedelta(seconds=PATIENCE_S)
    try:
        while whereabouts is not None:
            try:
                work.wait(patience)
                return
            except RuntimeError as error:
                is_late = not work.is_completed() and "Operation timed out" in str(error)
                if not is_late:
                    raise
            if message := whereabouts.first_difference():
                raise LostRank(message)
        work.wait()
    except RuntimeError as error:
        if isinstance(error, LostRank):
            raise
        step, number = position
        place = f"{what}, number {number} of step {step} on rank {dist.get_rank()},"
        raise lost_rank(place, position, whereabouts, error) from error
