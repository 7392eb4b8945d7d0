"""Printing on any terminal or none: if a stream breaks, its text is lost and the run continues.

    a terminal that is not UTF-8    a character that it lacks becomes "?"
    a pipe whose reader has ended   from then on nothing is written to it (`| head`, a closed ssh)
    a full disk behind `tee`        the same
    a file or a pipe                lines of loss in place of a bar, no carriage returns

Left out: terminals narrower than 60 columns, where tables wrap.
"""

import contextlib
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TextIO


class Screen:
    """Replaces sys.stdout or sys.stderr."""

    def __init__(self, stream: TextIO | None):  # None: the process was started without it
        self.stream, self.is_open = stream, stream is not None
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")

    def write(self, text: str) -> int:
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def _try(self, method: str, *arguments) -> None:
        try:
            if self.is_open:
                getattr(self.stream, method)(*arguments)
        except (OSError, ValueError):  # ValueError: the stream is closed
            self.is_open = False
            with contextlib.suppress(OSError, ValueError):  # Python's flush at exit goes to devnull
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def isatty(self) -> bool:
        return self.is_open and self.stream.isatty()

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


@contextlib.contextmanager
def safe_streams() -> Iterator[None]:
    """Within, print() and tqdm write to `Screen`s."""
    with contextlib.redirect_stdout(Screen(sys.stdout)), contextlib.redirect_stderr(Screen(sys.stderr)):
        yield


def fill(text: str) -> str:
    """Wrap the text to the terminal, at 100 columns at most; an indented line is a command and is not wrapped.

    >>> print(fill("one two"))
    one two
    """
    width = max(40, min(100, shutil.get_terminal_size((80, 24)).columns))
    lines = text.split("\n")
    return "\n".join(
        line if line.startswith("    ") else textwrap.fill(line, width, break_on_hyphens=False) for line in lines
    )


def printable(text: str) -> str:
    """The text without control characters, which could move a terminal's cursor or change its colours.

    >>> printable("a\\x1b[31mb\\tc\\nd")
    'a\\ufffd[31mb c\\nd'
    """
    return "".join(c if c.isprintable() or c == "\n" else " " if c == "\t" else "\ufffd" for c in text)
