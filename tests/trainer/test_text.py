from itertools import islice
from pathlib import Path

import pytest
import torch
from says import naming

from zero_mini.trainer.text import batches, count_sequences, decode, encode, load, split, validation_batches

T = 4
TEXT = torch.arange(T * 50 + 1)  # 50 sequences, and sequence i starts with token i T


def consumed(rank: int, world_size: int, steps: int = 9, micro_batch: int = 1, **start) -> list[list[int]]:
    """For each global step, the sequences that a rank reads, by number."""
    data = batches(TEXT, T, 12, rank, world_size, micro_batch, seed=3, **start)
    return [[int(first) // T for x, _ in step for first in x[:, 0]] for step in islice(data, steps)]


def test_the_default_text_is_english_and_comes_back_whole():
    text = decode(load())
    assert len(text) > 200_000 and 'The "for" statement' in text
    assert torch.equal(encode(text), load())


def test_split_loses_no_token_and_shares_none():
    train, validation = split(torch.arange(1003))
    assert torch.equal(torch.cat([train, validation]), torch.arange(1003))
    assert len(validation) == 101


def test_targets_are_the_tokens_one_later():
    for micro_batches in islice(batches(TEXT, T, 12, 1, 2, 3, seed=0), 5):
        assert [x.shape for x, _ in micro_batches] == [(3, T)] * 2
        assert all(torch.equal(y, x + 1) and x.dtype == y.dtype == torch.int64 for x, y in micro_batches)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_ranks_together_read_the_same_global_batches_in_the_same_order_whatever_their_number(world_size: int):
    by_rank = [consumed(rank, world_size) for rank in range(world_size)]
    together = [sum(step, []) for step in zip(*by_rank, strict=True)]
    assert together == consumed(0, 1, micro_batch=12)
    assert all(len(set(step)) == 12 for step in together)


def test_an_epoch_reads_no_sequence_twice_and_the_next_one_is_shuffled_anew():
    steps = consumed(0, 1)
    first, second = sum(steps[:4], []), sum(steps[4:8], [])  # 50 sequences hold 4 global batches of 12
    assert len(set(first)) == len(set(second)) == 48
    assert first != second


def test_a_run_continued_at_a_step_reads_what_the_uninterrupted_one_would_have():
    assert consumed(1, 2, steps=3, start_step=6) == consumed(1, 2)[6:]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("micro_batch", [1, 4, 100])
def test_validation_reads_the_same_sequences_once_whatever_the_number_of_ranks(world_size: int, micro_batch: int):
    shares = [validation_batches(TEXT, T, 17, rank, world_size, micro_batch) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1  # under stage 3 every forward is a collective
    assert all(len(x) > 0 and torch.equal(y, x + 1) for share in shares for x, y in share)
    read = [int(first) // T for share in shares for x, _ in share for first in x[:, 0]]
    assert read == [i * 50 // 17 for i in range(17)]


def test_a_folder_is_read_in_sorted_order_without_hidden_files(tmp_path: Path):
    for name, text in [("c/a.md", "3"), ("b.py", "2"), ("a/z.txt", "1"), ("a/.git/c.txt", "no"), ("d.bin", "no")]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert decode(load(tmp_path)) == "1\n\n2\n\n3"


def test_a_folder_says_what_it_left_out(tmp_path: Path):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.warns(UserWarning, match="latin.txt.*UTF-8"):
        assert decode(load(tmp_path)) == "good"


@pytest.mark.parametrize(
    "content, things",
    [
        (None, []),
        (b"", []),
        (b"PK\0\1", ["NUL", 2]),
        (b"caf\xe9 au lait", ["UTF-8", "0xe9", 3]),
        (b"seventeen letters", [17, 257]),
    ],
)
def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path, content: bytes | None, things: list):
    if content is not None:
        (tmp_path / "data.txt").write_bytes(content)
    with pytest.raises(ValueError, match=naming(tmp_path / "data.txt", *things)):
        load(tmp_path / "data.txt", T=256)


def test_a_folder_without_text_and_a_device_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=naming(tmp_path, ".md", ".py")):
        load(tmp_path)
    with pytest.raises(ValueError, match=naming("/dev/zero")):
        load("/dev/zero")


def test_a_byte_beyond_the_vocabulary_is_named_with_its_place(tmp_path: Path):
    (tmp_path / "data.txt").write_text("naive, na\u00efve")
    with pytest.raises(ValueError, match=naming(195, 128, 9)):
        load(tmp_path / "data.txt", vocab=128)


@pytest.mark.parametrize(
    "global_batch, world_size, micro_batch, numbers",
    [
        (33, 2, 4, [33, 2, 4, 8, 32, 40]),  # the last two are the nearest that would do
        (3, 2, 4, [8]),
        (60, 2, 1, [50, 4, 60]),
        (0, 1, 1, [0]),
    ],
)
def test_a_batch_that_cannot_be_shared_out_is_refused_at_the_call(global_batch, world_size, micro_batch, numbers):
    with pytest.raises(ValueError, match=naming(*numbers)):
        batches(TEXT, T, global_batch, 0, world_size, micro_batch, seed=0)


def test_fewer_sequences_than_ranks_or_than_one_are_refused():
    with pytest.raises(ValueError, match=naming(1, 4, 2)):
        validation_batches(TEXT, T, 1, 0, 2, 1)
    with pytest.raises(ValueError, match=naming(4, 5)):
        count_sequences(TEXT[:4], T)
