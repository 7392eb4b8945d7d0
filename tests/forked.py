"""A script as `python script.py` or torchrun runs it, in a process that is forked from one that has imported torch.

An interpreter of its own spends seconds in that import. What only such a one shows, for example what it says when it
ends and its output is closed, is not seen here.
"""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

import torch

from zero_mini.course.ranks import _main_hidden

CONTEXT = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
if sys.platform == "linux":
    CONTEXT.set_forkserver_preload(["torch.distributed", "torch._dynamo", "cloudpickle"])  # there is one server: Ranks'


class Forked:
    """The process; `out` and `err` are files in `folder`."""

    def __init__(self, folder: Path, script: str | Path, *argv: object, **environ: object):
        name = f"of-rank-{environ.get('RANK', 0)}"
        self.out, self.err = folder / f"out-{name}", folder / f"err-{name}"
        kept = os.environ | {key: str(value) for key, value in environ.items()}
        arguments = (str(script), [str(arg) for arg in argv], dict(kept), self.out, self.err)
        self.process = CONTEXT.Process(target=play, args=arguments, daemon=True)
        with _main_hidden():
            self.process.start()

    def finish(self) -> tuple[int, str, str]:
        """(exit status, stdout, stderr)"""
        self.process.join(120)
        self.process.kill()
        self.process.join()
        return self.process.exitcode, self.out.read_text(), self.err.read_text()


def job_of_two(folder: Path, port: int, script: str | Path, *argvs: list) -> list[Forked]:
    """Two ranks, each with its own arguments, with the variables that torchrun sets."""
    address = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    folder.mkdir(exist_ok=True)
    return [Forked(folder, script, *argv, RANK=rank, LOCAL_RANK=rank, **address) for rank, argv in enumerate(argvs)]


def play(script: str, argv: list[str], environ: dict[str, str], out: Path, err: Path) -> None:
    os.environ.clear()
    os.environ.update(environ)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    encoding = environ.get("PYTHONIOENCODING")
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, encoding=encoding, closefd=False) for number in (1, 2))
    torch.set_num_threads(1)
    sys.argv = [script, *argv]
    runpy.run_path(script, run_name="__main__")
