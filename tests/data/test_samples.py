"""Samples: all tokens of all documents, with their boundaries, and the loss of a model on them."""

import functools
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.data.loader import Loader
from fourfold.data.mixture import open_mixture
from fourfold.data.samples import Samples
from fourfold.train.loop.packing import check_documents_stay_apart
from tests import prepared
from tests.models import VOCABULARY, build

Shape = tuple[int, int, int, int]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    length=st.integers(2, 30),
    shard_tokens=st.integers(5, 90),
)
def test_samples_are_the_concatenated_documents(tmp_path_factory, lengths, length, shard_tokens) -> None:
    documents = [[(7 * d + p) % 131 for p in range(n)] for d, n in enumerate(lengths)]
    folder = prepared.write(tmp_path_factory.mktemp("data"), documents, shard_tokens=shard_tokens)
    samples = Samples(folder, "train", length)

    row = [(token, number) for number, document in enumerate(documents) for token in document]
    assert len(samples) == len(row) // length
    for i in range(len(samples)):
        window = row[i * length : (i + 1) * length]
        sample = samples[i]
        assert sample.input_ids.tolist() == [token for token, _ in window]
        for at, (token, number) in enumerate(window):
            begins = at == 0 or window[at - 1][1] != number
            assert sample.position_ids[at] == (0 if begins else sample.position_ids[at - 1] + 1)
            assert sample.labels[at] == (-100 if begins else token)


def test_a_large_vocabulary_keeps_its_ids(tmp_path: Path) -> None:
    folder = prepared.write(tmp_path, [[70_000, 1, 65_535, 65_536]], vocab_size=70_001)
    assert Samples(folder, "train", 4)[0].input_ids.tolist() == [70_000, 1, 65_535, 65_536]


def test_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 131, 600)
    samples = Samples(prepared.write(tmp_path, tokens[:, None], shard_tokens=2), "train", 150)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 200, before[1]))
    try:
        assert np.concatenate([samples[i].input_ids for i in range(4)]).tolist() == tokens.tolist()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_missing_or_truncated_file_is_named(tmp_path: Path) -> None:
    folder = prepared.write(tmp_path, [[1, 2, 3, 4]])
    shard = folder / "train" / "000000-000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"000000-000.bin has 6 bytes, not 8"):
        Samples(folder, "train", 2)
    shard.unlink()
    with pytest.raises(ValueError, match=r"000000-000.bin is missing"):
        Samples(folder, "train", 2)


def test_sources_of_two_tokenizers_do_not_mix(tmp_path: Path) -> None:
    folders = [prepared.write(tmp_path / str(v), [[1] * 9], vocab_size=v) for v in (131, 132)]
    with pytest.raises(ValueError, match=r"of 131 tokens, .* of 132; prepare both"):
        open_mixture([(folder, 1.0) for folder in folders], length=4, seed=0)


def test_too_little_text_is_an_error_with_both_numbers(tmp_path: Path) -> None:
    folder = prepared.write(tmp_path, [[1] * 9])
    with pytest.raises(ValueError, match=r"has 9 tokens, less than one sample of 10"):
        open_mixture([(folder, 1.0)], length=10, seed=0)
    with pytest.raises(ValueError, match="validation"):
        open_mixture([(folder, 1.0)], length=4, seed=0, split="validation")


# -- what a model makes of them ---------------------------------------------------------------------------------------

LENGTHS = (5, 9, 1, 14, 2, 1, 3, 13)  # two rows of 24: the fourth document is cut at 9


@functools.cache
def documents() -> list[list[int]]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(2, VOCABULARY, (n,), generator=drawn).tolist() for n in LENGTHS]


def one_by_one(kind: str) -> float:
    """The mean over all predictions of each document (or of its part in a row) on its own."""
    model = build(kind)
    total, count = 0.0, 0
    cut = [*documents()[:3], documents()[3][:9], documents()[3][9:], *documents()[4:]]
    for document in cut:
        if len(document) > 1:
            ids = torch.tensor([document])
            total += model(input_ids=ids, labels=ids).loss.item() * (len(document) - 1)
            count += len(document) - 1
    return total / count


def packed(folder: Path, kind: str, shape: Shape, **options: object) -> float:
    model, grid = build(kind), Grid.create(shape)
    ff.parallelize(model, grid, **options)
    mixture = open_mixture([(folder, 1.0)], length=24, seed=0)
    batch = Loader(mixture, grid, global_batch=2).read(0)
    check_documents_stay_apart(model, grid, rows=len(batch.inputs["labels"]), vocab_size=VOCABULARY)
    assert model.training
    return model(**batch.inputs).loss.item()


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        ("llama", (1, 1, 1, 1), {}),
        ("llama", (1, 2, 2, 2), {"weights": "streamed"}),
        ("llama", (2, 1, 1, 2), {"weights": "fsdp2"}),
        ("qwen3", (1, 1, 2, 2), {"overlap": ff.Overlap(interleave=True), "weights": "streamed"}),
        ("gpt2", (2, 1, 1, 2), {}),
        ("llama of 6 heads", (1, 1, 2, 2), {"weights": "streamed"}),  # a row on each y rank
    ],
)
def test_the_loss_of_packed_documents_equals_that_of_separate_documents(
    pool: RankPool, tmp_path: Path, kind: str, shape: Shape, options: dict[str, object]
) -> None:
    folder = prepared.write(tmp_path, documents())
    alone = one_by_one(kind)
    for loss in pool.run(packed, int(np.prod(shape)), folder, kind, shape, **options):
        assert loss == pytest.approx(alone, rel=2e-6)


@pytest.mark.parametrize("fault", ["positions go on", "a cache is kept"])
def test_attention_across_documents_is_detected(tmp_path: Path, fault: str) -> None:
    """The comparison above can fail; a cache does it silently in transformers, which `parallelize` prevents."""
    samples = Samples(prepared.write(tmp_path, documents()), "train", 24)
    rows = [torch.from_numpy(np.stack(row)) for row in zip(samples[0], samples[1], strict=True)]
    inputs = dict(zip(("input_ids", "labels", "position_ids"), rows, strict=True))
    if fault == "positions go on":
        inputs["position_ids"] = torch.arange(24).expand(2, 24)
    loss = build("llama")(**inputs, use_cache=fault == "a cache is kept").loss.item()
    assert loss != pytest.approx(one_by_one("llama"), rel=1e-4)


def refuse(kind: str) -> None:
    model, grid = build(kind), Grid.create((1, 1, 1, 1))
    model.config.use_cache = False
    check_documents_stay_apart(model, grid, rows=2, vocab_size=VOCABULARY)
    model.config.use_cache = True
    with pytest.raises(ValueError, match=r"attend to each other .* 2 rows at a time.*use_cache=False"):
        check_documents_stay_apart(model, grid, rows=2, vocab_size=VOCABULARY)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_with_attention_across_documents_is_rejected(pool: RankPool, kind: str) -> None:
    pool.run(refuse, 1, kind)
