"""A checkpoint on the disk: files with checksums, in a folder that appears by one rename.

    FOLDER/step-20.tmp/rank-0.pt, rank-1.pt    written, fsynced
    FOLDER/step-20.tmp/manifest.json           their sizes and sha256, and its own; fsynced, and so is the folder
    FOLDER/step-20                             one rename; fsynced
    FOLDER/step-10                             dropped: renamed to .tmp, so no checkpoint any more, then deleted

This file uses no collectives: one rank calls `commit` and `prune` after all have called `write`.

torch.load alone returns wrong numbers for most flipped bits. torch.distributed.checkpoint does not detect them either:
it keeps no hashes, its metadata is a pickle, and a save that fails half-way leaves something that loads.
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
    """A file that hashes the bytes it is given, not those that the disk stores."""

    def __init__(self, path: Path):
        super().__init__(io.FileIO(path, "x"))
        self.digest, self.problem = hashlib.sha256(), None

    def write(self, data) -> int:
        self.digest.update(data)
        try:
            return super().write(data)
        except OSError as error:
            self.problem = error  # torch.save replaces it by an error of its own
            raise


def write(path: Path, content: dict) -> dict:
    """Write a new file, which is on the disk when this returns: its name, size and hash. OSError from the system."""
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
    """All ranks' files are on the disk: write the manifest, and give the folder its name."""
    for entry in manifest["files"]:
        if not (unfinished / entry["name"]).is_file():
            raise ValueError(f"rank 0 does not see {unfinished / entry['name']}: choose a folder that all ranks share")
    with (unfinished / MANIFEST).open("xb") as file:
        file.write(seal(json.dumps(manifest, indent=1).encode().removesuffix(b"\n}")))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(unfinished)
    if final.exists():  # it is damaged: the run would have resumed from a whole one
        shutil.rmtree(final)
    os.rename(unfinished, final)
    sync_folder(final.parent)


def prune(folder: Path, keep: int) -> None:
    """Delete checkpoints older than the last `keep` complete ones."""
    complete = 0
    for path in checkpoints(folder):
        if complete == keep:
            old = path.with_name(f"{path.name}.tmp")  # the rename is atomic: no half-deleted checkpoint is ever found
            os.rename(path, old)
            shutil.rmtree(old)
        elif problem_of(path, hashing=False) is None:
            complete += 1


# --- from the disk ----------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """Folders of checkpoints, the newest first, whole or damaged; unfinished ones (.tmp) are not listed."""
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
    """The manifest of a checkpoint, if all its files are as they were written. Each of N ranks hashes a share.

    ValueError names the first difference.
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
    for index, entry in enumerate(manifest["files"]):
        file = path / entry["name"]
        if not file.is_file():
            raise ValueError(f"{file} is missing; {REPAIR}")
        if (size := file.stat().st_size) != entry["bytes"]:
            raise ValueError(f"{file} has {size} bytes, the manifest says {entry['bytes']}; {REPAIR}")
        if hashing and index % world_size == rank and (digest := sha256(file)) != entry["sha256"]:
            raise ValueError(f"{file} has sha256 {digest:.8}..., the manifest says {entry['sha256']:.8}...; {REPAIR}")
    return manifest


def sha256(path: Path) -> str:
    """The hash of all bytes of a file."""
    digest, chunk = hashlib.sha256(), bytearray(CHUNK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(memoryview(chunk)[:count])
    return digest.hexdigest()


def seal(body: bytes) -> bytes:
    """JSON without its last brace -> the whole JSON with its own sha256 as last entry, which shows any changed bit."""
    return body + b',\n "sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


def sync_folder(folder: Path) -> None:
    """The folder's file names are on the disk when this returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
