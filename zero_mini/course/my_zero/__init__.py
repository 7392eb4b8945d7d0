"""The file that the student writes through lessons 01 to 04: my_zero.py, beside the notebooks.

    begin(2)                 # lesson 02 begins: my_zero.py has DDP, the student's own or else the one of solution.py
    keep(Zero1)              # puts a class or function of a cell into my_zero.py, in place of an older one

Left out: imports of a cell (add them to the file), and undo (the previous version is my_zero.py.before).
"""

import ast
import contextlib
import fcntl
import inspect
import itertools
import linecache
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

from zero_mini.course.judge.trial import NAMES

FILE = "my_zero.py"


def begin(lesson: int, path: str = FILE) -> types.ModuleType:
    """The student's file as it stands when a lesson (1 to 4) begins, as a module; it is written if it is not there.

    Lesson n needs the classes of the lessons before it. If one is missing, the file of solution.py with just these
    classes is written, and the student's own moves to my_zero.py.own. SyntaxError if the file is not Python.
    """
    file, needed = Path(path), NAMES[: lesson - 1]
    with locked(file):
        text = file.read_text() if file.exists() else ""
        ast.parse(text, str(file))
        written = definitions(text)
        missing = [name for name in needed if name not in written or is_stub(written[name])]
        if not written or missing:
            if written:
                print(f"{path}: {', '.join(missing)} is missing, so your own file is {set_aside(file).name} now")
            write(file, without(Path(__file__).with_name("solution.py").read_text(), set(NAMES) - set(needed)))
            print(f"{path}: written, with {', '.join(needed) or 'functions, and no stage yet'}")
        else:
            print(f"{path}: your own, with {', '.join(name for name in NAMES if name in written) or 'no stage yet'}")
        return as_module(file)


def keep(*items: type | types.FunctionType, path: str = FILE) -> None:
    """Put these classes and functions, as they stand in their cells, into the file."""
    file = Path(path)
    with locked(file):
        text = file.read_text()
        for item in items:
            source, found = source_of(item), definitions(text).get(item.__name__)
            lines = text.splitlines(keepends=True)
            if found:
                lines[found.lineno - 1 : found.end_lineno] = [source]
                text = "".join(lines)
            else:
                text = text.rstrip("\n") + "\n\n\n" + source
        write(file, text)


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """One lesson at a time: each reads the folder's file and writes it again."""
    folder = os.open(file.absolute().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def definitions(text: str) -> dict[str, ast.stmt]:
    """Name -> top-level class or function; empty if the text is not Python."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return {}
    return {node.name: node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


def source_of(item: type | types.FunctionType) -> str:
    """Of a class or function of a cell. (inspect.getsource finds a class by its module's file, and cells have none.)"""
    functions = (
        [item] if inspect.isfunction(item) else [each for each in vars(item).values() if inspect.isfunction(each)]
    )
    text = "".join(linecache.getlines(functions[0].__code__.co_filename))
    node = definitions(text)[item.__name__]
    return "".join(text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]).rstrip("\n") + "\n"


def is_stub(node: ast.stmt) -> bool:
    return "NotImplementedError" in ast.dump(node)


def without(text: str, names: set[str]) -> str:
    """The text without these top-level definitions."""
    lines = text.splitlines(keepends=True)
    for name, node in reversed(definitions(text).items()):
        if name in names:
            del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines).rstrip("\n") + "\n"


def set_aside(file: Path) -> Path:
    """A copy of the file under a name that is not taken yet, and that nothing overwrites."""
    names = itertools.chain([f"{file.name}.own"], (f"{file.name}.own{n}" for n in itertools.count(2)))
    copy = next(path for path in map(file.with_name, names) if not path.exists())
    copy.write_text(file.read_text())
    return copy


def write(file: Path, text: str) -> None:
    """At once or not at all; the previous version stays beside it."""
    if file.exists() and file.read_text() != text:
        file.with_name(f"{file.name}.before").write_text(file.read_text())
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(file)


def as_module(file: Path) -> types.ModuleType:
    """The file as module `my_zero`, so that a cell can go on with its classes."""
    module = types.ModuleType("my_zero")
    module.__file__ = str(file)
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
    sys.modules["my_zero"] = module
    return module
