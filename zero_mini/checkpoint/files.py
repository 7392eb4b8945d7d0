"""A checkpoint on the disk: files of which every bit is vouched for, in a folder that appears all at once.

    FOLDER/step-20.tmp/rank-0.pt, rank-1.pt    written, fsynced
    FOLDER/step-20.tmp/manifest.json           their sizes and sha256, and its own; fsynced, and so is the folder
    FOLDER/step-20                             one rename; fsynced
    FOLDER/step-10                             dropped: first it is renamed to .tmp, to be no checkpoint any more

Nothing here knows of ranks but their number: one rank calls `commit` and `prune`, when all have called `write`.

torch.load alone returns wrong numbers for most flipped bits. torch.distributed.checkpoint would not do either: it keeps
no hashes, its metadata is a pickle, and a save that fails half-way leaves something that loads.
"""

import hashlib
import io
import json
import os
import re
import shutil
from pathlib import Path

import torch

MANIFEST, FORMAT = "manifest.json", 1
CHUNK = 1 << 22  # bytes that are hashed at a time
REPAIR = "bring the whole folder back from a copy, or load another one"


# --- to the disk ------------------------------------------------------------------------------


class Hashed(io.BufferedWriter):
    """A file that is hashed as it is written: what was meant, not what arrived."""

    def __init__(self, path: Path):
        super().__init__(io.FileIO(path, "x"))
        self.digest, self.problem = hashlib.sha256(), None

    def write(self, data) -> int:
        self.digest.update(data)
        try:
            return super().write(data)
        except OSError as error:
            self.problem = error  # torch.save raises something else
            raise


def write(path: Path, content: dict) -> dict:
    """A new file that is on the disk when this returns: its name, size and hash. OSError, as the system says it."""
    file = Hashed(path)
    try:
        with file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
    except Exception:
        if file.problem is not None:
            raise file.problem from None
        raise
    if unreadable := torch.serialization.get_unsafe_globals_in_checkpoint(path):
        raise ValueError(
            f"extra holds {', '.join(unreadable)}, which a checkpoint cannot hold: give tensors, numbers, strings, "
            "None, and dicts, lists and tuples of them"
        )
    return {"name": path.name, "bytes": size, "sha256": file.digest.hexdigest()}


def commit(manifest: dict, unfinished: Path, final: Path) -> None:
    """All ranks' files are on the disk: vouch for them, and let the folder be found."""
    for told in manifest["files"]:
        if not (unfinished / told["name"]).is_file():
            raise ValueError(f"rank 0 does not see {unfinished / told['name']}: choose a folder that all ranks share")
    with (unfinished / MANIFEST).open("xb") as file:
        file.write(seal(json.dumps(manifest, indent=1).encode().removesuffix(b"\n}")))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(unfinished)
    if final.exists():  # damaged, or it would have been gone on from
        shutil.rmtree(final)
    os.rename(unfinished, final)
    sync_folder(final.parent)


def prune(folder: Path, keep: int) -> None:
    """Drop what is older than the last `keep` that are complete."""
    kept = 0
    for path in checkpoints(folder):
        if kept == keep:
            doomed = path.with_name(f"{path.name}.tmp")  # in one step no checkpoint any more
            os.rename(path, doomed)
            shutil.rmtree(doomed)
        elif problem_of(path, hashing=False) is None:
            kept += 1


# --- from the disk ----------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """The newest first, whole or not; no unfinished ones."""
    return sorted((path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)), key=step_of)[::-1]


def step_of(path: Path) -> int:
    """
    >>> step_of(Path("runs/a/step-20"))
    20
    """
    return int(path.name.removeprefix("step-"))


def problem_of(path: Path, hashing: bool = True) -> str | None:
    """Why a checkpoint cannot be loaded, or None."""
    try:
        examine(path, hashing=hashing)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def examine(path: Path, rank: int = 0, world_size: int = 1, hashing: bool = True) -> dict:
    """The manifest of a checkpoint whose files are all as they were written. Of N ranks each hashes a share.

    ValueError says what is not.
    """
    if not (path / MANIFEST).is_file():
        raise ValueError(f"{path} is no checkpoint: {MANIFEST} is missing; {REPAIR}")
    data = (path / MANIFEST).read_bytes()
    body = data[: -len(seal(b""))]
    if seal(body) != data:
        raise ValueError(f"{path / MANIFEST} is not as it was written: its own sha256 differs; {REPAIR}")
    manifest = json.loads(data)
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {manifest['format']}, this version of zero_mini reads {FORMAT}: "
            "load it with the version that wrote it"
        )
    for index, told in enumerate(manifest["files"]):
        file = path / told["name"]
        if not file.is_file():
            raise ValueError(f"{file} is missing; {REPAIR}")
        if (size := file.stat().st_size) != told["bytes"]:
            raise ValueError(f"{file} has {size} bytes, the manifest says {told['bytes']}; {REPAIR}")
        if hashing and index % world_size == rank and (digest := sha256(file)) != told["sha256"]:
            raise ValueError(f"{file} has sha256 {digest:.8}..., the manifest says {told['sha256']:.8}...; {REPAIR}")
    return manifest


def sha256(path: Path) -> str:
    """Of all bytes of a file."""
    digest, chunk = hashlib.sha256(), bytearray(CHUNK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(memoryview(chunk)[:count])
    return digest.hexdigest()


def seal(body: bytes) -> bytes:
    """JSON without its last brace -> all of it, its own sha256 being the last entry: no bit can change unnoticed."""
    return body + b',\n "sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


def sync_folder(folder: Path) -> None:
    """Names of files are on the disk when this returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
