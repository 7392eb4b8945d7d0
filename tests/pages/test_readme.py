"""What the README says was measured is what the recorded runs say."""

import json
import re
from pathlib import Path

import tables
import test_faults
from models import RARE, ZOO

ROOT = Path(__file__).parents[2]


def recorded(name: str) -> dict:
    return json.loads((ROOT / "zero_mini" / "measured" / f"{name}.json").read_text())


def test_the_readmes_numbers_are_those_of_the_recorded_runs():
    readme = (ROOT / "README.md").read_text()
    for N, memory, parity, outcome in (
        (2, "memory", "parity", "equal to the bit"),
        (4, "memory_4", "parity_4", "no further apart than two sums over 4 ranks may be"),
    ):
        machine, stages = recorded(memory)["machine"], recorded(memory)[memory]["stages"].values()
        held = " | ".join(str(round(sum(run["held_bytes"].values()) / 1e6)) for run in stages)
        peaks = " | ".join(str(round(run["peak_bytes"] / 1e6)) for run in stages)
        assert f"by walking them, N = {N} | {held} |" in readme
        assert f"by the allocator, N = {N} | {peaks} |" in readme
        assert machine == recorded(parity)["machine"] and machine["cards"] == N
        assert f"On {N} x {machine['card'].removeprefix('NVIDIA ')}" in readme
        cases = recorded(parity)[parity]
        assert set(cases.values()) == {outcome} and f"{len(cases)} cases" in readme
    assert f"torch {machine['torch']}, NCCL {machine['nccl']}" in readme
    orders = recorded("summation_4")
    assert orders["machine"] == machine and min(orders["summation_4"]["unlike torch DDP"].values()) > 0


def test_the_readme_counts_the_cells_that_passed_on_gpus():
    lessons = recorded("lessons")["lessons"]["cells"]
    passed, failed = (sum(found[result] for found in lessons.values()) for result in ("passed", "failed"))
    assert failed == 0
    words = f"all {passed} cells of lessons 00 to {max(lessons)[:2]} print"
    assert words in " ".join((ROOT / "README.md").read_text().split())


def speed_rows() -> list[str]:
    """The README's table of the 1.5B model."""
    entry = recorded("speed")["works"]["1.5B"]
    rows = []
    for system, row in entry["systems"].items():
        score = entry["scores"][system]
        ratio = "" if system == "plain" else f"{score['x_ddp']:.2f}"
        cells = [system, f"{score['ms']:.1f}", f"{score['tokens_s']:,.0f}", ratio, f"{row['peak_bytes'] / 2**30:.1f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def test_the_readmes_speeds_are_those_of_the_recorded_runs():
    readme, works = (ROOT / "README.md").read_text(), recorded("speed")["works"]
    assert "\n".join(speed_rows()) in readme
    rows = {row.split("|")[1].strip(): row for row in speed_rows()}
    ours, theirs = ([cell.strip() for cell in row.split("|")] for row in (rows["zero-3"], rows["ddp"]))
    assert f"{ours[5]} GiB and {ours[3]} tokens/s each at stage 3; torch DDP, {theirs[5]} and {theirs[3]}." in readme
    scores = works["1.5B"]["scores"]
    wide, deepest = ([f"{scores[name][p]:.0f}" for p in ("p10_ms", "p90_ms")] for name in ("fsdp2", "deepspeed-3"))
    assert f"fsdp2's spread from {' to '.join(wide)} ms and deepspeed-3's from {' to '.join(deepest)}" in readme
    steady = scores.keys() - {"fsdp2", "deepspeed-3"}
    assert max((scores[name]["p90_ms"] - scores[name]["p10_ms"]) / scores[name]["ms"] for name in steady) < 1 / 9
    zero, ddp = (works["1.5B"]["systems"][name]["timeline"]["busy_ms"] for name in ("zero-0", "ddp"))
    more = sum(ddp[kind] - zero[kind] for kind in ("copy", "other"))
    gap = scores["ddp"]["ms"] - scores["zero-0"]["ms"]
    assert f"Of the {gap:.0f} ms from zero-0 to ddp {more:.0f} are copies" in " ".join(readme.split())
    machine, work = works["1.5B"]["machine"], works["1.5B"]["work"]
    assert f"On {machine['cards']} x {machine['card'].removeprefix('NVIDIA ')} (torch {machine['torch']}" in readme
    assert (work["sequence_length"], work["batch"], work["precision"]) == (1024, 8, "bf16")
    assert f"{works['1.5B compiled batch 16']['scores']['zero-3']['mfu']:.1%}".replace("%", " %") in readme


def test_the_tables_of_failures_are_drawn_from_what_the_tests_recorded():
    assert (ROOT / "tests" / "FAILURES.md").read_text() == tables.draw()


def test_the_command_that_records_names_the_files_that_write_rows():
    command = tables.RECORD
    while braces := re.search(r"(\S*)\{([^}]*)\}(\S*)", command):  # as the shell does
        before, names, after = braces.groups()
        command = command.replace(braces[0], " ".join(before + name + after for name in names.split(",")))
    named = {ROOT / word for word in command.split() if word.endswith(".py")}
    # compare and compare_fp32 of conftest.py write rows; a file with fixtures of these names does not.
    row = re.compile(r"^def test_\w+\([^)]*\b(row|compare|compare_fp32)\b", re.M)
    own = re.compile(r"^def compare\(request", re.M)
    sources = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    assert named == {path for path, text in sources.items() if row.search(text) and not own.search(text)}


def test_the_table_of_claims_names_every_test_file_once_and_nothing_else():
    named = re.findall(r"`(\w+/test_\w+\.py)`", (ROOT / "tests" / "README.md").read_text())
    there = [str(path.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(named) == sorted(there)


def test_the_tables_name_tests_and_models_that_exist():
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    known = {row["what"] for row in tables.recorded("models")}
    for line, tests in (tables.AUTOGRAD | tables.NUMBERS).items():
        for test in tests:
            assert test in known or f"def {test}(" in sources, f"{line}: {test}"
    assert {f"the model '{name}'" for name in ZOO | RARE} <= known


def test_every_fault_has_a_row():
    rows = {row["what"] for row in tables.recorded("faults")}
    assert {f"kill -9 in {moment}" for moment in test_faults.MOMENTS} <= rows
    assert {f"a rank {what}" for what in test_faults.WAYS} <= rows


def test_the_readmes_offload_is_that_of_the_recorded_runs():
    work = recorded("speed")["works"]["1.5B offload"]
    rows = [
        f"| {name} | {work['scores'][name]['ms']:.0f} | {row['peak_bytes'] / 2**30:.1f} |"
        for name, row in work["systems"].items()
    ]
    assert "\n".join(rows) in (ROOT / "README.md").read_text()
    readme = " ".join((ROOT / "README.md").read_text().split())
    rows = recorded("offload")["offload"]["rows"]
    none, host = (rows[place][0]["peak_bytes"] / 1e9 for place in ("none", "host"))
    assert f"falls from {none:.1f} to {host:.1f} GB" in readme
    assert f"takes {rows['disk'][0]['step_ms'] / 1e3:.1f} s" in readme
    one, eight = (rows["host"][i]["step_ms"] / rows["none"][i]["step_ms"] for i in (0, 1))
    assert f"takes {eight:.1f} times as long as without offload, with one {one:.1f} times" in readme
    for card in ("h100", "h200"):
        record = recorded(f"offload_largest_{card}")
        without, host = (record[f"offload_largest_{card}"][place] for place in ("none", "host"))
        machine = record["machine"]["card"].removeprefix("NVIDIA ")
        machine += f", host of {host['host_available_bytes'] / 1e9:.0f} GB"
        sizes = " | ".join(f"{row['psi'] / 1e9:.1f} billion" for row in (without, host))
        peaks = f"{host['peak_bytes'] / 1e9:.1f} and {host['host_peak_bytes'] / 1e9:.0f}"
        assert f"| {machine} | {sizes} | {peaks} | {host['tokens_per_s']:.0f} |" in readme


def test_the_readmes_bytes_of_activations_are_those_of_the_recorded_run():
    readme, record = " ".join((ROOT / "README.md").read_text().split()), recorded("activations")
    run, card = record["activations"], record["machine"]["card"].removeprefix("NVIDIA ")
    assert record["machine"]["cards"] == 1 and {row["stage"] for row in run["rows"]} == {0}
    rows = {row["setting"]: row for row in run["rows"]}
    all_kept, again, host = (rows[name] for name in ("all kept", "every block", "every block, on the host"))
    kept = [f"{row['kept_bytes'] / 1e9:.2f} GB" for row in (all_kept, again, host)]
    ms = [f"{row['step_ms']:.0f}" for row in (all_kept, again, host)]
    assert f"({run['model']}, batch {run['batch']}, stage 0, one {card}: forward leaves" in readme
    assert f"forward leaves {kept[0]}, {kept[1]} and {kept[2]} for backward" in readme
    assert f"a step takes {ms[0]}, {ms[1]} and {ms[2]} ms" in readme


def test_every_file_of_the_package_has_its_place_in_the_reading_order():
    files = {path.name for path in (ROOT / "zero_mini").glob("*.py")} - {"__init__.py"}
    for page in (ROOT / "README.md", ROOT / "zero_mini" / "__init__.py"):
        assert files <= set(re.findall(r"\w+\.py", page.read_text())), page
