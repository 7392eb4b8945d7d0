"""Numbers in the README and in docs/ are those of the recorded runs; code, paths and commands there are right.

Numbers are looked for in rows of tables, on any of these pages, and sentences may say what they like.
"""

import ast
import io
import json
import math
import re
import tokenize
from pathlib import Path
from statistics import median

import pytest
import tables
import test_faults
from models import RARE, ZOO

from zero_mini.comparison.works import BASELINE
from zero_mini.simulate.paper import TABLE_1

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(path.read_text() for path in PAGES)
ROWS = {tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in TEXT.splitlines() if line.startswith("|")}


def recorded(name: str) -> dict:
    return json.loads((ROOT / "zero_mini" / "measured" / f"{name}.json").read_text())


def card(machine: dict) -> str:
    return machine["card"].removeprefix("NVIDIA ")


def missing(*cells: object) -> list[str]:
    """These cells, if no row of a table has them side by side."""
    wanted = tuple(map(str, cells))
    found = any(row[i : i + len(wanted)] == wanted for row in ROWS for i in range(len(row)))
    return [] if found else list(wanted)


# --- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "N, memory, parity, outcome",
    [
        (2, "memory", "parity", "equal to the bit"),
        (4, "memory_4", "parity_4", "no further apart than two sums over 4 ranks may be"),
    ],
)
def test_memory_and_parity_are_those_of_the_recorded_runs(N, memory, parity, outcome):
    machine, stages = recorded(memory)["machine"], recorded(memory)[memory]["stages"].values()
    assert not missing(*(round(sum(run["held_bytes"].values()) / 1e6) for run in stages))
    assert not missing(*(round(run["peak_bytes"] / 1e6) for run in stages))
    assert machine == recorded(parity)["machine"] and machine["cards"] == N
    cases = recorded(parity)[parity]
    assert set(cases.values()) == {outcome}
    assert not missing(f"{N} x {card(machine)}", len(cases))
    assert f"torch {machine['torch']} and NCCL {machine['nccl']}" in TEXT


def test_on_4_ranks_sums_in_another_order_were_seen():
    orders = recorded("summation_4")
    assert orders["machine"] == recorded("memory_4")["machine"]
    assert min(orders["summation_4"]["unlike torch DDP"].values()) > 0


def test_the_number_of_cells_that_passed_on_gpus():
    lessons = recorded("lessons")["lessons"]["cells"]
    passed, failed = (sum(found[result] for found in lessons.values()) for result in ("passed", "failed"))
    assert failed == 0 and re.search(rf"\b{passed} cells\b", TEXT)


WORKS = recorded("speed")["works"]


def speed_row(work: str, system: str) -> list[str]:
    score, row = WORKS[work]["scores"][system], WORKS[work]["systems"][system]
    ratio = "" if system == "plain" or score["x_ddp"] is None else f"{score['x_ddp']:.2f}"
    return [system, f"{score['ms']:.1f}", f"{score['tokens_s']:,.0f}", ratio, f"{row['peak_bytes'] / 2**30:.1f}"]


def detailed_row(system: str, score: dict, row: dict) -> list[str]:
    """A line of a table with MFU, and the baseline or else the memory that the allocator has reserved."""
    cells = [system, f"{score['ms']:.1f}", f"{score['tokens_s']:,.0f}", f"{score['mfu']:.1%}".replace("%", " %")]
    peak, reserved = (f"{row[name] / 2**30:.1f}" for name in ("peak_bytes", "reserved_bytes"))
    if score["over_baseline"]:
        return [*cells, f"{score['over_baseline']:.3f}", f"{score['x_ddp']:.2f}", peak]
    return [*cells, peak, reserved]


STAGES = [f"zero-{stage}" for stage in range(4)]
RUNS = {name: entry for name, entry in WORKS.items() if name != "1.5B offload"}
RUNS |= {f"{name}, rank 0 of {entry['rank_of']}": entry for name, entry in recorded("alone")["works"].items()}


@pytest.mark.parametrize("title", RUNS)
def test_speeds_are_those_of_the_recorded_runs(title):
    entry = RUNS[title]
    section = TEXT.partition(f"# {title}\n")[2].partition("\n##")[0]
    detailed = title == "CS336 board" or BASELINE in entry["systems"] or "rank_of" in entry
    good = {system: score for system, score in entry["scores"].items() if "reason" not in score}
    for system, score in good.items():
        cells = detailed_row(system, score, entry["systems"][system]) if detailed else speed_row(title, system)
        assert f"| {' | '.join(cells)} | {score['p10_ms']:.1f} to {score['p90_ms']:.1f} |" in section
    machine, about = entry["machine"], entry["work"]
    assert about["precision"] == "bf16" and about["sequence_length"] == (32_768 if "board" in title else 1024)
    if "rank_of" in entry:
        assert (machine["cards"], card(machine)) == (1, "H200")
    else:
        assert f"{machine['cards']} x {card(machine)}" in section and f"batch {about['batch']}" in section + title


def test_the_summary_of_speeds_is_that_of_the_recorded_runs():
    scores = [(name, WORKS[name]["scores"]) for name in WORKS if name not in ("ablations", "1.5B offload")]
    over_ddp = [of[stage].get("x_ddp") for _, of in scores for stage in STAGES if stage in of]
    over_baseline = [of[stage].get("over_baseline") for _, of in scores for stage in STAGES[1:] if stage in of]
    over_fsdp2 = {name: of["zero-3"]["tokens_s"] / of["fsdp2"]["tokens_s"] for name, of in scores}
    waiting = ("1.5B", "1.5B on H200", "350M batch 8", "1.5B compiled")  # there FSDP2 waits for its host
    for ratios in (
        [ratio for ratio in over_ddp if ratio],
        [ratio for ratio in over_baseline if ratio],
        [over_fsdp2[name] for name in waiting],
        [ratio for name, ratio in over_fsdp2.items() if name not in waiting],
    ):
        assert not missing(f"{min(ratios):.2f}", f"{max(ratios):.2f}")


def test_other_runs_are_those_of_the_record():
    for run in recorded("speed_other_runs")["runs"]:
        systems = run["systems"]
        for part in (("zero-0", "zero-1", "zero-2", "zero-3"), ("zero-3", "fsdp2"), ("plain", BASELINE)):
            if set(part) <= set(systems):
                assert not missing(*(f"{median(systems[name]['step_ms']):.1f}" for name in part))


def test_speeds_on_the_front_page_are_those_of_the_recorded_run():
    readme = (ROOT / "README.md").read_text()
    for system in ("ddp", "fsdp2", "fsdp2-keep", "zero-1", "zero-2", "zero-3", "plain"):
        assert f"| {' | '.join(speed_row('1.5B', system))} |" in readme
    machine = WORKS["1.5B"]["machine"]
    assert f"{machine['cards']} x {card(machine)}" in readme
    fastest = max(WORKS["1.5B"]["scores"][name]["tokens_s"] for name in ("ddp", "fsdp2", "fsdp2-keep"))
    assert min(WORKS["1.5B"]["scores"][f"zero-{stage}"]["tokens_s"] for stage in (1, 2, 3)) > fastest


def test_where_the_time_of_ddp_goes_is_that_of_the_recorded_profile():
    zero, ddp = (WORKS["1.5B"]["systems"][name]["timeline"]["busy_ms"] for name in ("zero-0", "ddp"))
    for kind in zero:
        assert not missing(*(f"{ms:.1f}" for ms in (zero[kind], ddp[kind], ddp[kind] - zero[kind])))
    more = sum(ddp[kind] - zero[kind] for kind in ("copy", "other"))
    gap = WORKS["1.5B"]["scores"]["ddp"]["ms"] - WORKS["1.5B"]["scores"]["zero-0"]["ms"]
    assert f"{gap:.0f} ms" in TEXT and f"{more:.0f} ms" in TEXT
    assert f"{WORKS['1.5B compiled batch 16']['scores']['zero-3']['mfu']:.1%}".replace("%", " %") in TEXT


def test_offload_is_that_of_the_recorded_runs():
    work = WORKS["1.5B offload"]
    for name, row in work["systems"].items():
        assert not missing(name, f"{work['scores'][name]['ms']:.0f}", f"{row['peak_bytes'] / 2**30:.1f}")
    rows = recorded("offload")["offload"]["rows"]
    for place in ("none", "host", "disk"):
        first = rows[place][0]
        peaks = f"{first['peak_bytes'] / 1e9:.1f} and {first['host_peak_bytes'] / 1e9:.1f}"
        assert not missing(peaks, f"{first['step_ms'] / 1e3:.1f}")
    for without, host in zip(rows["none"], rows["host"]):
        assert not missing(host["micro_batches"], f"{host['step_ms'] / without['step_ms']:.1f}")
    for name in ("h100", "h200"):
        record = recorded(f"offload_largest_{name}")
        without, host = (record[f"offload_largest_{name}"][place] for place in ("none", "host"))
        sizes = [f"{row['psi'] / 1e9:.1f} billion" for row in (without, host)]
        peaks = f"{host['peak_bytes'] / 1e9:.1f} and {host['host_peak_bytes'] / 1e9:.0f}"
        assert not missing(*sizes, peaks, f"{host['tokens_per_s']:.0f}")
        assert f"{card(record['machine'])}, host of {host['host_available_bytes'] / 1e9:.0f} GB" in TEXT


def test_bytes_of_activations_are_those_of_the_recorded_run():
    record = recorded("activations")
    run = record["activations"]
    assert record["machine"]["cards"] == 1 and {row["stage"] for row in run["rows"]} == {0}
    assert (run["model"], run["batch"], card(record["machine"])) == ("1.5B", 8, "H200")
    rows = {row["setting"]: row for row in run["rows"]}
    for name in ("all kept", "every block", "every block, on the host"):
        assert not missing(f"{rows[name]['kept_bytes'] / 1e9:.2f}", f"{rows[name]['step_ms']:.0f}")


def test_the_papers_numbers_are_those_of_the_recorded_simulations():
    for name, digits in (("figure1", 2), ("figure1_350M_cpu", 3)):
        for run in recorded(name)["simulated"]:
            peaks = [run["moments"][moment]["peak_bytes"] for moment in ("build", "step 2")]
            cells = [f"{nbytes / 1e9:.{digits}f}" for nbytes in (run["paper_bytes"], run["states_bytes"], *peaks)]
            assert run["outcome"] == "ran" and not missing(run["stage"], *cells)
            assert run["states_bytes"] == pytest.approx(run["built_bytes"], rel=0.01)
    (title,) = recorded("title")["simulated"]
    peaks = [moment["peak_bytes"] for moment in title["moments"].values()]
    states = [f"{title[name] / 1e9:.2f}" for name in ("paper_bytes", "states_bytes")]
    assert not missing(f"{title['psi'] / 1e9:,.0f}B", *states, *(f"{peak / 1e9:.1f}" for peak in peaks[::2]))
    assert title["states_bytes"] == pytest.approx(title["built_bytes"], rel=0.01) and max(peaks) < 80e9
    assert sum(moment["seconds"] for moment in title["moments"].values()) < 600


def test_the_papers_tables_are_those_of_the_recorded_simulations():
    for run in recorded("table1")["simulated"]:
        printed = TABLE_1[run["model"]][run["world_size"]][run["stage"] - 1]
        ours = run["states_bytes"] / 1e9 if run["stage"] < 3 else run["states_bytes"] / 1e9 * 16 / 14
        assert run["outcome"] == "ran" and ours == pytest.approx(printed, rel=0.03)
        cell = f"{printed:g}: {run['states_bytes'] / 1e9:.2f}"
        assert any(row[:2] == (run["model"], str(run["world_size"])) and cell in row for row in ROWS), cell
    for run in recorded("table2")["simulated"]:
        L, d = run["config"]["L"], run["config"]["d"]
        peak = run["moments"]["step 2"]["peak_bytes"] / 1e9
        sizes = [f"{run[name] / 1e9:.1f}B" for name in ("theory_numel", "psi")]
        assert not missing(run["stage"], *sizes, f"{L}, {d}", f"{peak:.1f}")
        assert run["outcome"] == "ran" and peak < 32 and "out of memory" in run["tried"][str(L + 1)]


def test_the_losses_of_the_trap_are_those_of_the_recorded_runs():
    true, false = recorded("trap")["simulated"]
    for run, what in ((true, "their own values"), (false, "a copy of this rank's slice")):
        assert not missing(what, f"{run['losses'][0]:.3f}", f"{run['moments']['step 1']['peak_bytes'] / 1e6:.0f}")
    uniform = math.log(50304)
    assert false["own_slice"] and abs(false["losses"][0] - uniform) < abs(true["losses"][0] - uniform)


def test_lines_of_the_stage_files_to_the_nearest_ten():
    for name in ("ddp", "zero1", "zero2", "zero3"):
        lines = len((ROOT / "zero_mini" / f"{name}.py").read_text().splitlines())
        assert re.search(rf"\(zero_mini/{name}\.py\), {round(lines, -1)} \|", TEXT), f"{name}.py: {round(lines, -1)}"


# --- code, paths, commands --------------------------------------------------------------------


def code_of(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.M | re.S)


def plain_lines(code: str) -> list[str]:
    """The lines of code, without comments, indentation and empty lines.

    >>> plain_lines("if a:  # b\\n    # c\\n    d = '#'\\n")
    ['if a:', "d = '#'"]
    """
    lines = code.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return [line.strip() for line in lines if line.strip()]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_code_on_a_page_is_python(path):
    for code in code_of(path):
        ast.parse(code)


def test_the_front_page_begins_with_code_and_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.index("```python") < 15 and len(lines) <= 137


def test_the_front_page_quotes_by_hand_as_it_is():
    """A line `...` stands for lines that are left out."""
    (quote,) = [code for code in code_of(ROOT / "README.md") if "blocks" in code]
    source = plain_lines((ROOT / "zero_mini" / "by_hand.py").read_text())
    at = 0
    for part in "\n".join(plain_lines(quote)).split("\n...\n"):
        part = part.splitlines()
        places = [i for i in range(at, len(source)) if source[i : i + len(part)] == part]
        assert places, part
        at = places[0] + len(part)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_paths_on_a_page_exist(path):
    pattern = r"(?<![\w/.-])(?:zero_mini|tests|slides|notebooks)/[\w./-]*\w\.(?:py|md|json|png|ipynb)\b"
    for name in re.findall(pattern, path.read_text()):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("script", ["zero_mini/train_gpt.py", "zero_mini/comparison/benchmark.py"])
def test_options_in_commands_exist(script, capsys):
    from zero_mini.comparison import benchmark
    from zero_mini.trainer import options

    with pytest.raises(SystemExit):
        {"train_gpt.py": options, "benchmark.py": benchmark}[Path(script).name].parse(["--help"])
    known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    text = TEXT.replace("\\\n", " ")
    used = {flag for line in re.findall(rf"{script}([^`\n]*)", text) for flag in re.findall(r"--[\w-]+", line)}
    assert used and used <= known


def test_works_of_the_benchmark_that_pages_name_exist():
    from zero_mini.comparison.works import WORKS as known

    named = re.findall(r'--work (?:"([^"]+)"|([\w.]+))', TEXT)
    names = {a or b for a, b in named} - {"NAME"}
    assert names and names <= set(known)


# --- tables of the tests ----------------------------------------------------------------------


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


def test_every_file_of_the_book_is_in_the_reading_order():
    files = {path.name for path in (ROOT / "zero_mini").glob("*.py")} - {"__init__.py"}
    folders = {path.parent.name for path in (ROOT / "zero_mini").glob("*/__init__.py")}
    for page in (ROOT / "README.md", ROOT / "zero_mini" / "__init__.py"):
        assert files <= set(re.findall(r"\w+\.py", page.read_text())), page
        assert folders <= set(re.findall(r"\w+", page.read_text())), page
