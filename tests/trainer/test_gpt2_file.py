"""Weights in GPT-2's own layout: they come back to the bit, and another implementation computes the same with them."""

import dataclasses
import json

import pytest
import torch
from says import naming, tells

from zero_mini import train_gpt
from zero_mini.trainer.gpt import GPT, GPTConfig
from zero_mini.trainer.gpt2_file import export_gpt2, import_gpt2

safetensors = pytest.importorskip("safetensors.torch")
CONFIG = GPTConfig(L=2, d=12, heads=3, vocab=31, T=8)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(CONFIG).eval()
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)  # biases too
    return model


def test_weights_come_back_to_the_bit_and_names_and_orientation_are_gpt_2_s(model, tmp_path):
    state = model.state_dict()
    export_gpt2(tmp_path, state, CONFIG)
    back = import_gpt2(tmp_path / "model.safetensors", CONFIG)
    assert list(back) == list(state)
    assert all(torch.equal(back[name], state[name]) and back[name].is_contiguous() for name in state)
    there = {name: tuple(value.shape) for name, value in safetensors.load_file(tmp_path / "model.safetensors").items()}
    assert len(there) == 2 + 12 * CONFIG.L + 2
    assert there["h.1.attn.c_attn.weight"] == (12, 36) and there["h.1.mlp.c_proj.weight"] == (48, 12)
    assert there["wte.weight"] == (31, 12)


def test_transformers_computes_the_same(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    export_gpt2(tmp_path / "ours", model.state_dict(), CONFIG)
    theirs, told = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    tokens = torch.randint(31, (2, 8))
    with torch.no_grad():
        assert torch.allclose(theirs.eval()(tokens).logits, model(tokens), atol=1e-5)
        theirs.save_pretrained(tmp_path / "theirs")
        back = import_gpt2(tmp_path / "theirs" / "model.safetensors", CONFIG)
        assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "changes, things",
    [
        ({"L": 3}, ["blocks.2.ln_1.weight", "(12,)"]),
        ({"L": 1}, ["L=2", "L=1"]),
        ({"d": 6}, ["wte.weight", "(31, 12)", "(31, 6)"]),
        ({"vocab": 32}, ["wte.weight", "(31, 12)", "(32, 12)"]),
        ({"heads": 4}, ["heads=3", "heads=4"]),
    ],
)
def test_another_shape_is_refused(model, tmp_path, changes, things):
    export_gpt2(tmp_path, model.state_dict(), CONFIG)
    with pytest.raises(ValueError) as refusal:
        import_gpt2(tmp_path / "model.safetensors", dataclasses.replace(CONFIG, **changes))
    assert tells(str(refusal.value), *things)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 a zip file, say", b"\x02" + bytes(7) + b"{}"])
def test_a_file_of_another_kind_is_refused(tmp_path, data):
    (tmp_path / "file.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=naming(tmp_path / "file.safetensors")):
        import_gpt2(tmp_path / "file.safetensors", CONFIG)


def test_the_trainer_exports_and_starts_from_such_a_file(alone, tmp_path):
    tiny = ["--L", "1", "--width", "32", "--heads", "2", "--global-batch", "8", "--sequence-length", "16"]
    tiny += ["--steps", "1", "--sample-length", "0"]
    train_gpt.main([*tiny, "--out", str(tmp_path / "one"), "--export-gpt2"])
    assert (tmp_path / "one" / "gpt2" / "config.json").is_file()
    begin = ["--init-from", str(tmp_path / "one" / "gpt2" / "model.safetensors")]
    train_gpt.main([*tiny, *begin, "--out", str(tmp_path / "two")])
    first, second = (
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("one", "two")
    )
    assert second[0]["validation_loss"] == first[-1]["validation_loss"]
