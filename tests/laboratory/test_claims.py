"""What people say of ZeRO, each with a run; and the recorded table is drawn from the recorded numbers."""

import ast
import json
import re
from pathlib import Path

import pytest
import torch

from zero_mini.course.lesson import recorded
from zero_mini.laboratory import claims
from zero_mini.laboratory.__main__ import EXPERIMENTS, RECORD, main, table
from zero_mini.laboratory.rows import rows
from zero_mini.laboratory.verdict import compared, merge

ROOT = Path(__file__).parents[2]
LESSON = ROOT / "notebooks" / "12_what_zero_is_not.ipynb"
STAGES = [f"stage {stage}" for stage in range(4)]


def test_on_two_ranks_every_stage_is_torch_ddp_to_the_bit(ranks):
    found = merge(ranks(2).run(claims.accuracy_and_speed, steps=12, seeds=2))
    assert set(found["gaps"].values()) == {0.0} and (found["ulps"], found["differ"]) == (0, 0)
    assert len(set(found["held_out"].values())) == 1
    for seed in (0, 1):
        curves = [found["losses"][f"{name}, seed {seed}"] for name in ("torch DDP", *STAGES)]
        assert all(curve == curves[0] for curve in curves) and len(curves[0]) == 2
    assert found["losses"]["stage 0, seed 0"] != found["losses"]["stage 0, seed 1"]


def test_on_four_ranks_only_the_order_of_sums_differs(ranks):
    found = ranks(4).run(claims.accuracy_and_speed, steps=5, seeds=1)[0]
    assert 0 < found["ulps"] <= 4 - 1  # two orders of N numbers, half a unit for each of N - 1 additions
    assert 0 < found["differ"] < 1
    assert len(set(found["gaps"].values())) == 1 and 0 < found["gaps"]["stage 0"] < 1e-6


def test_units_in_the_last_place():
    sizes = torch.tensor([1.0, 3.0, 2.0**-126])
    neighbours = torch.nextafter(sizes, torch.tensor(torch.inf))
    assert claims.in_ulps(sizes - neighbours, sizes).tolist() == [1, 1, 1]


def test_stages_1_and_2_send_what_ddp_sends_and_stage_3_more(ranks):
    found = ranks(2).run(claims.traffic_and_time, steps=2)[0]
    assert [found[stage]["sent"] for stage in STAGES[:3]] == [2, 2, 2]
    assert 2.5 < found["stage 3"]["sent"] < 3 and min(row["step_ms"] for row in found.values()) > 0


def test_memory_by_ranks(ranks):
    for found in ranks(4).run(claims.memory_by_ranks):
        states = {
            key: sum(b for name, b in row.items() if name not in ("activations", "other")) for key, row in found.items()
        }
        plain, activations = states.pop("plain"), found["plain"]["activations"]
        assert {row["activations"] for row in found.values()} == {activations}
        for n, shares in {1: (1, 1, 1, 1), 2: (1, 12, 10, 8), 4: (1, 10, 7, 4)}.items():
            for stage, share in zip(STAGES, shares):
                row = states[f"{stage}, N = {n}"] - found[f"{stage}, N = {n}"]["communication"]
                assert row == pytest.approx(plain * (share if share == 1 else share / 16), rel=0.01)
            assert (found[f"stage 3, N = {n}"]["communication"] > 0) and not found[f"stage 2, N = {n}"]["communication"]
        assert states["stage 3, N = 1"] > plain  # two slots, and nothing is saved


def test_every_rank_computes_the_whole_model_on_its_own_part(ranks):
    for found in ranks(2).run(claims.work_of_a_rank):
        assert [found[stage] for stage in STAGES] == [found["plain"]] * 4
        whole = found["plain, all rows"]
        assert whole["flops"] == 2 * found["plain"]["flops"] and whole["weights"] == found["plain"]["weights"]
        # The weights, forward and twice in backward, but for the first layer's input, which an embedding needs too.
        assert found["plain"]["flops"] == 3 * 2 * 32 * found["plain"]["weights"]


def test_optimizers_that_look_at_whole_tensors_are_refused_and_would_be_wrong(ranks):
    found = ranks(2).run(claims.optimizers)[0]
    for name in ("SGD", "AdamW", "Adagrad", "RMSprop"):
        assert found[name] == {"refused": "", "gap": 0.0}
    assert "Adafactor" in found["Adafactor"]["refused"] and found["Adafactor"]["gap"] > 1e-3


def test_the_peak_of_stage_2_may_be_higher(ranks):
    for found in ranks(2).run(claims.peaks):
        assert found["many units, stage 2"] < found["many units, stage 1"]
        assert found["one unit, stage 2"] > found["one unit, stage 1"]


# --- the record -------------------------------------------------------------------------------


def test_the_recorded_table_is_drawn_from_the_recorded_numbers():
    record = recorded("myths")
    results = record["myths"]["results"]
    assert json.loads(json.dumps(rows(results))) == record["myths"]["rows"]
    assert list(results) == list(EXPERIMENTS)
    for row in record["myths"]["rows"]:
        assert re.match(r"(no|yes|it depends): ", row["verdict"]), row  # the numbers do not say otherwise
    assert len({row["claim"] for row in record["myths"]["rows"]}) == len(record["myths"]["rows"]) == 25


def test_every_recorded_claim_has_numbers_with_their_quantity_and_unit():
    for row in recorded("myths")["myths"]["rows"]:
        assert row["measured"], row["claim"]
        for bars in row["measured"]:
            assert set(bars) == {"quantity", "unit", "values"} and bars["values"], row["claim"]
            assert all(isinstance(value, int | float) for value in bars["values"].values()), row["claim"]


def test_a_prediction_is_compared_with_the_word_of_the_verdict():
    given = ("no", "NO ", "yes", "it depends", "?", "", "perhaps")
    said = [compared(prediction, "no: losses are equal") for prediction in given]
    assert said[0] == said[1] != said[2] == said[3] and said[4] == said[5] and len(set(said)) == 4
    assert compared("it depends", "it depends: on N") == said[0]
    assert compared("no", "not refuted by these numbers") == said[2]  # the numbers gave no verdict


def test_another_number_is_another_verdict():
    results = recorded("myths")["myths"]["results"]
    verdicts = {row["claim"]: row["verdict"] for row in rows(results)}
    changed = json.loads(json.dumps(results))
    changed["accuracy, N = 2"]["gaps"]["stage 2"] = 1e-3
    changed["servers, N = 4"]["link_bytes"]["ParameterServer"] = 1
    changed["traffic"]["stage 1"]["sent"] = 1.0
    changed["peaks"]["one unit, stage 2"] = 0
    others = {row["claim"] for row in rows(changed) if row["verdict"] != verdicts[row["claim"]]}
    assert others == {
        "ZeRO costs accuracy",
        "ZeRO is a parameter server",
        "ZeRO sends less",
        "the peak of stage 2 is always below that of stage 1",
    }


def test_the_lesson_asks_for_each_prediction_before_it_judges_the_claim_and_gives_none():
    cells = ["".join(c["source"]) for c in json.loads(LESSON.read_text())["cells"] if c["cell_type"] == "code"]
    asked, judged = {}, {}
    for place, source in enumerate(cells):
        if source.startswith("predictions"):
            given = {"predictions": {}}
            exec(source, given)
            assert set(given["predictions"].values()) == {"?"}, source
            asked |= dict.fromkeys(given["predictions"], place)
        for call in re.findall(r"^judge(\(.+?\))$", source, re.M):
            claim = ast.literal_eval(call)
            judged |= dict.fromkeys([claim] if isinstance(claim, str) else claim, place)
    claimed = {row["claim"] for row in recorded("myths")["myths"]["rows"]}
    assert set(asked) == set(judged) == claimed
    assert all(asked[claim] < judged[claim] for claim in claimed)


def test_the_page_of_facts_has_the_recorded_table():
    page = (ROOT / "docs" / "facts.md").read_text()
    assert table(recorded("myths")["myths"]["results"], to_read=False) in page
    papers = re.findall(r"\[([\d.]+)\]\(https://arxiv\.org/abs/([\d.]+)\)", page)
    assert papers and all(shown == linked and re.fullmatch(r"\d{4}\.\d{5}", shown) for shown, linked in papers)


def test_a_reader_s_own_run_leaves_the_committed_record_as_it_was(tmp_path, monkeypatch, capsys):
    before = RECORD.read_bytes()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zero_mini.laboratory.__main__.measure", lambda: recorded("myths")["myths"]["results"])
    main([])
    own = json.loads((tmp_path / "runs" / "myths.json").read_text())
    assert own["myths"] == recorded("myths")["myths"] and RECORD.read_bytes() == before
    assert "runs/myths.json" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_refused_before_the_experiments(monkeypatch, capsys):
    monkeypatch.setattr("zero_mini.laboratory.__main__.measure", lambda: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        main(["--out", "/dev/null/myths.json"])
    assert ended.value.code == 2 and "/dev/null/myths.json" in capsys.readouterr().err.splitlines()[-1]
