"""The text of every lesson: English that is part of every Python, or any text of yours, as bytes.

One byte is one token, so the vocabulary is 256 and nothing is downloaded. By default the text is Python's own
language reference (`pydoc_data.topics`, about 0.46 MB); it differs a little from one Python release to the next.

How ranks share the text:

    sequence i     x = tokens[i T : i T + T],  y = tokens[i T + 1 : i T + T + 1]
    an epoch       a permutation of the n sequences, drawn from the seed, a new one each epoch
    global step s  the next G sequences of it; an incomplete rest is dropped
    rank r of N    the r-th G / N of these, cut into micro-batches of B:

    permutation   | step 0, G sequences             | step 1 ...
    N = 1         | r0 B | r0 B | r0 B | r0 B       |
    N = 2         | r0 B | r0 B | r1 B | r1 B       |        k = G / (N B) micro-batches
    N = 4         | r0 B | r1 B | r2 B | r3 B       |

Ranks never share a sequence, their union is the global batch, and step s sees the same G sequences for every N.
So losses of different N can be compared.

Left out: tokenizers, text that does not fit in memory, shuffling across files.
"""

import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

SUFFIXES = (".md", ".py", ".rst", ".txt")  # of text files inside a folder

Batch = tuple[Tensor, Tensor]  # x and y, each (B, T) int64


def encode(text: str) -> Tensor:
    """The UTF-8 bytes of a text, one token each, uint8.

    >>> encode("ZeRO").tolist()
    [90, 101, 82, 79]
    """
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def decode(tokens: Tensor) -> str:
    """The text of a 1-D tensor of tokens; invalid UTF-8 (a cut character, a token above 255) becomes U+FFFD.

    >>> decode(encode("caf\u00e9")), decode(torch.tensor([72, 105, 50000])) == "Hi\ufffd"
    ('caf\u00e9', True)
    """
    # 0xFF never occurs in UTF-8, so it replaces tokens that are no bytes.
    return bytes(min(token, 0xFF) for token in tokens.tolist()).decode(errors="replace")


def load(path: str | Path | None = None, T: int = 1, vocab: int = 256) -> Tensor:
    """A text as a 1-D uint8 tensor: Python's reference, a file, or the text files of a folder in sorted order.

    A folder is searched recursively for `SUFFIXES`, except hidden folders and site-packages; files in it that are
    not text are left out with a warning. Raises ValueError if the path is missing, empty or not UTF-8 text, has
    fewer than T + 1 bytes (one sequence), or holds a byte that is no token of `vocab`.
    """
    name = "Python's reference" if path is None else str(path)
    if path is None:
        data = "\n\n".join(topics[topic] for topic in sorted(topics)).encode()
    elif Path(path).is_dir():
        data = _read_folder(Path(path))
    else:
        data = _read_file(Path(path))
    if not data:
        raise ValueError(f"{name} is empty: it has 0 bytes, one sequence needs {T + 1}")
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    count_sequences(tokens, T, name)
    too_high = (tokens >= vocab).nonzero() if vocab < 256 else ()
    if len(too_high):
        offset = int(too_high[0])
        raise ValueError(f"{name} holds token {tokens[offset]}, vocabulary is {vocab} (offset {offset}); use vocab=256")
    return tokens


def _read_file(path: Path) -> bytes:
    if not path.is_file():
        what = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise ValueError(f"{path} {what}; give a text file, a folder of them, or no path for Python's reference")
    try:
        data = path.read_bytes()
        data.decode()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise ValueError(f"{path} is not UTF-8 text: byte 0x{byte:02x} at offset {error.start}; convert it") from error
    if b"\0" in data:
        raise ValueError(f"{path} is not text: NUL byte at offset {data.index(0)}; give a text file")
    return data


def _read_folder(folder: Path) -> bytes:
    texts, problems = [], []
    # Sorted by parts, so that every rank and every file system gives the same order.
    for path in sorted(folder.rglob("*"), key=lambda path: path.parts):
        parents = path.relative_to(folder).parts[:-1]
        hidden = any(parent.startswith(".") or parent == "site-packages" for parent in parents)
        if path.suffix in SUFFIXES and path.is_file() and not hidden:
            try:
                texts.append(_read_file(path))
            except ValueError as error:
                problems.append(str(error))
    if problems:
        warnings.warn(f"{folder}: files left out: {len(problems)}, the first: {problems[0]}", stacklevel=3)
    if not texts:
        raise ValueError(f"{folder} holds no text: looked for {' '.join(SUFFIXES)}; give a folder that has some")
    return b"\n\n".join(texts)


def split(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Training text and validation text: the last tenth is held out.

    >>> [part.tolist() for part in split(torch.arange(11))]
    [[0, 1, 2, 3, 4, 5, 6, 7, 8], [9, 10]]
    """
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:]


def count_sequences(tokens: Tensor, T: int, name: str = "the text") -> int:
    """How many sequences of T tokens and their T targets a text holds; ValueError if none.

    >>> count_sequences(torch.arange(9), T=4)  # 0 1 2 3 (4), 4 5 6 7 (8): a target may open the next sequence
    2
    """
    if T < 1:
        raise ValueError(f"T must be a whole number > 0 (got {T})")
    if len(tokens) <= T:
        raise ValueError(
            f"{name} has {len(tokens)} tokens, one sequence needs {T + 1}; give more text, or a smaller T "
            "(--sequence-length)"
        )
    return (len(tokens) - 1) // T


def batches(
    tokens: Tensor,
    T: int,
    global_batch: int,
    rank: int,
    world_size: int,
    micro_batch: int,
    seed: int,
    start_step: int = 0,
) -> Iterator[list[Batch]]:
    """Endless training data of one rank: for each global step the list of its micro-batches (x, y).

    `global_batch` G and `micro_batch` B count sequences. With `start_step` it yields the batches of an uninterrupted
    run after that step. Raises ValueError, at the call, if G is not a multiple of N B or exceeds the text.

    >>> data = torch.arange(17)
    >>> [next(batches(data, 2, 4, rank, 2, 1, seed=0))[0][0].tolist() for rank in (0, 1)]
    [[[8, 9]], [[14, 15]]]
    """
    n = count_sequences(tokens, T)
    if min(global_batch, micro_batch) < 1:
        raise ValueError(f"batches must be whole numbers > 0 (got {global_batch} and micro-batch {micro_batch})")
    whole = world_size * micro_batch
    if global_batch % whole:
        below = global_batch - global_batch % whole
        nearest = ", ".join(str(size) for size in (below, below + whole) if size)
        raise ValueError(
            f"global batch {global_batch} is not a multiple of {world_size} ranks x micro-batch {micro_batch}"
            f" = {whole}; nearest: {nearest} (--global-batch)"
        )
    _at_least(n, global_batch, T, f"a global batch of {global_batch}", "the global batch (--global-batch)")

    def global_batches() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(n, generator=generator)
            yield from order.split(global_batch)[: n // global_batch]

    k = global_batch // whole
    return (_for_rank(tokens, T, chosen, rank, world_size, k) for chosen in islice(global_batches(), start_step, None))


def validation_batches(
    tokens: Tensor, T: int, sequences: int, rank: int, world_size: int, micro_batch: int
) -> list[Batch]:
    """This rank's share of `sequences` evenly spaced sequences, which are the same for every N.

    Ranks get equally many micro-batches (stage 3 gathers in each), but if the division has a remainder some hold a
    sequence more than others, up to 2 B. So weigh: sum(loss * len(x)) over all batches and ranks / `sequences`.

    >>> [[len(x) for x, y in validation_batches(torch.arange(99), 2, 11, rank, 2, 2)] for rank in (0, 1)]
    [[3, 3], [3, 2]]
    """
    n = count_sequences(tokens, T, "the validation text")
    if min(sequences, micro_batch) < 1:
        raise ValueError(f"batches must be whole numbers > 0 (got {sequences} and micro-batch {micro_batch})")
    _at_least(sequences, world_size, T, f"{world_size} ranks", "the number of ranks")
    _at_least(n, sequences, T, f"a validation of {sequences} sequences", "the number of validation sequences")
    chosen = torch.arange(sequences) * n // sequences
    return _for_rank(tokens, T, chosen, rank, world_size, max(1, sequences // (world_size * micro_batch)))


def _at_least(have: int, need: int, T: int, what: str, remedy: str) -> None:
    if have < need:
        sequences = f"{have} sequence{'s' * (have != 1)}"
        raise ValueError(
            f"{sequences} of {T} tokens for {what}; give more text, lower {remedy}, or a smaller T (--sequence-length)"
        )


def _for_rank(tokens: Tensor, T: int, chosen: Tensor, rank: int, world_size: int, micro_batches: int) -> list[Batch]:
    """The tokens of this rank's share of the chosen sequences, cut into micro-batches."""
    shares = chosen.tensor_split(world_size)[rank].tensor_split(micro_batches)
    windows = [tokens[indices[:, None] * T + torch.arange(T + 1)].long() for indices in shares]  # (B, T + 1)
    return [(window[:, :-1], window[:, 1:]) for window in windows]
