"""What the README says was measured is what the recorded runs say."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]


def recorded(name: str) -> dict:
    return json.loads((ROOT / "zero_mini" / "measured" / f"{name}.json").read_text())


def test_the_readmes_numbers_are_those_of_the_recorded_runs():
    readme = (ROOT / "README.md").read_text()
    memory, parity = recorded("memory"), recorded("parity")
    stages = memory["memory"]["stages"].values()
    held = " | ".join(str(round(sum(run["held_bytes"].values()) / 1e6)) for run in stages)
    peaks = " | ".join(str(round(run["peak_bytes"] / 1e6)) for run in stages)
    assert f"MB, 1e6 bytes) | {held} |" in readme
    assert f"by the allocator (MB) | {peaks} |" in readme
    machine = memory["machine"]
    assert machine == parity["machine"]
    assert f"On {machine['cards']} x {machine['card'].removeprefix('NVIDIA ')}" in readme
    assert f"torch {machine['torch']}, NCCL {machine['nccl']}" in readme
    assert set(parity["parity"].values()) == {"equal to the bit"} and f"{len(parity['parity'])} cases" in readme
