"""Preparation: the same output for any number of processes and interruptions, and no document lost."""

import gzip
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from benchmarks.ranks import RankPool
from fourfold import files
from fourfold.cli.main import main
from fourfold.data import prepare as preparing
from fourfold.data import shards
from fourfold.data.documents import Reading, documents
from fourfold.data.inputs import find_inputs, parts
from fourfold.data.manifest import DatasetManifest, split_of
from fourfold.data.prepare import Settings, prepare
from fourfold.data.samples import Samples
from fourfold.data.tokenizer import save_tokenizer, train_tokenizer
from tests import prepared

pyarrow = pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return prepared.corpus()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> str:
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    save_tokenizer(train_tokenizer(texts, 600), folder)
    return str(folder)


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> str:
    return str(prepared.as_jsonl(texts, tmp_path_factory.mktemp("text") / "text.jsonl"))


@pytest.fixture
def small(tokenizer: str) -> Settings:
    """Several parts, several shards a part."""
    return Settings(tokenizer=tokenizer, validation=0.2, part_bytes=50_000, shard_tokens=5_000)


def decoded(folder: Path, split: Any) -> list[str]:
    """The text of each document."""
    manifest = DatasetManifest.load(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    found, begun = [], []
    for shard in manifest.shards[split]:
        tokens = np.fromfile(folder / f"{shard.name}.bin", manifest.dtype)
        *whole, rest = np.split(tokens, np.fromfile(folder / f"{shard.name}.ends", shards.ENDS_DTYPE))
        for ids in whole:
            found.append([*begun, *ids.tolist()])
            begun = []
        begun += rest.tolist()
    assert not begun
    assert all(ids[-1] == manifest.tokenizer.eos_id for ids in found)
    return [tokenizer.decode(ids[:-1]) for ids in found]


def test_every_document_comes_back_in_its_split(
    tmp_path: Path, texts: list[str], jsonl: str, small: Settings
) -> None:
    manifest = prepare(tmp_path / "out", [jsonl], small)
    for split in ("train", "validation"):
        wanted = [text for text in texts if split_of(text, 0.2) == split]
        assert wanted
        assert decoded(tmp_path / "out", split) == wanted
        assert manifest.documents(split) == len(wanted)
    assert max(shard.tokens for shard in manifest.shards["train"]) == 5_000
    assert len(manifest.shards["train"]) > 10


def test_a_tokenizer_is_trained_on_the_inputs(tmp_path: Path, texts: list[str], jsonl: str) -> None:
    for name in ("a", "b"):
        prepare(tmp_path / name, [jsonl], Settings(train_vocab_size=400, validation=0))
    assert prepared.files(tmp_path / "a") == prepared.files(tmp_path / "b")
    assert DatasetManifest.load(tmp_path / "a").tokenizer.vocab_size == 400
    assert decoded(tmp_path / "a", "train") == texts


# -- kinds of input -------------------------------------------------------------------------------------------------


def write_parquet(texts: list[str], folder: Path) -> Path:
    from pyarrow import parquet

    path = folder / "text.parquet"
    parquet.write_table(pyarrow.table({"text": texts, "id": list(range(len(texts)))}), path, row_group_size=7)
    return path


def write_saved_dataset(texts: list[str], folder: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder / "saved", num_shards=2)
    return folder / "saved"


def write_jsonl(texts: list[str], folder: Path) -> Path:
    return prepared.as_jsonl(texts, folder / "text.jsonl")


def write_gzip(texts: list[str], folder: Path) -> Path:
    path = folder / "text.jsonl.gz"
    path.write_bytes(gzip.compress(write_jsonl(texts, folder).read_bytes()))
    return path


def write_folder(texts: list[str], folder: Path) -> Path:
    (folder / "below").mkdir()
    for number, text in enumerate(texts):
        (folder / "below" / f"{number:04d}.py").write_text(text)
    (folder / "below" / "picture.png").write_bytes(b"\x89PNG")
    return folder / "below"


def write_separated(texts: list[str], folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("<END>".join(texts))
    return path


@pytest.mark.parametrize(
    "write", [write_jsonl, write_gzip, write_parquet, write_saved_dataset, write_folder, write_separated]
)
def test_every_kind_of_input_gives_the_same_documents(
    tmp_path: Path, texts: list[str], write: Callable[[list[str], Path], Path]
) -> None:
    path = write(["", *texts[:30], ""], tmp_path)
    reading = Reading(separator="<END>" if write is write_separated else None)
    inputs = find_inputs([str(path)], text_suffixes=[".py"])
    for part_bytes in (None, 25_000, 1_000_000):
        work = parts(inputs, reading, part_bytes)
        assert [text for part in work for piece in part for text in documents(piece, reading)] == texts[:30]
        if part_bytes == 25_000:
            assert len(work) >= {write_gzip: 1, write_saved_dataset: 2}.get(write, 4)


@settings(max_examples=200)
@given(
    st.lists(st.text("ab\nü", max_size=6), max_size=12),
    st.sampled_from(["\n", "--", "\n\n", "<end>", "aba"]),
    st.integers(1, 40),
)
def test_splitting_a_text_file_loses_and_repeats_nothing(
    tmp_path_factory, pieces, separator, part_bytes
) -> None:
    path = tmp_path_factory.mktemp("cut") / "text.txt"
    path.write_text(separator.join(pieces))
    reading = Reading(separator=separator)
    work = parts(find_inputs([str(path)]), reading, part_bytes)
    found = [text for part in work for piece in part for text in documents(piece, reading)]
    assert found == [text for text in path.read_text().split(separator) if text]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a.jsonl has a line at byte 14 that is not JSON"),
        ("a.jsonl", b'{"body": "a", "id": 1}\n', r"no field 'text'; name one with --column, it has body, id"),
        ("a.jsonl", b'{"text": 3}\n', r"field 'text' holds int, not text"),
        ("a.jsonl", b"[1]\n", r"has list at byte 0, not an object"),
        ("a.txt", b"abc\xff", r"a.txt is not UTF-8 text at byte 3"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, small: Settings, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        prepare(tmp_path / "out", [str(tmp_path / name)], small)


def test_the_validation_split_does_not_depend_on_order(
    tmp_path: Path, texts: list[str], small: Settings
) -> None:
    held = []
    for seed in (0, 1):
        shuffled = random.Random(seed).sample(texts, len(texts))
        path = prepared.as_jsonl(shuffled, tmp_path / f"{seed}.jsonl")
        prepare(tmp_path / str(seed), [str(path)], small)
        held.append(decoded(tmp_path / str(seed), "validation"))
    assert held[0] != held[1]
    assert sorted(held[0]) == sorted(held[1])


@given(st.floats(0.05, 0.95))
@settings(max_examples=20)
def test_the_split_has_the_size_that_was_asked_for(part: float) -> None:
    held = sum(split_of(f"document {i}", part) == "validation" for i in range(4000))
    assert abs(held / 4000 - part) < 5 * (part * (1 - part) / 4000) ** 0.5  # five standard deviations


def test_half_a_character_in_json_is_replaced(tmp_path: Path, small: Settings) -> None:
    (tmp_path / "a.jsonl").write_text(r'{"text": "a\ud83d b \ud83d\ude00"}')
    prepare(tmp_path / "out", [str(tmp_path / "a.jsonl")], Settings(**vars(small) | {"validation": 0.0}))
    assert decoded(tmp_path / "out", "train") == ["a\ufffd b \U0001f600"]


# -- interruptions ----------------------------------------------------------------------------------------------------


def killed_at(function: str, call: int, arguments: tuple[Any, ...]) -> None:
    """Prepare, and be killed at the n-th call of a function that writes."""
    module = {"add": shards.ShardWriter, "write_atomically": preparing, "publish": files}[function]
    inner, calls = getattr(module, function), 0

    def counting(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*args)

    setattr(module, function, counting)
    prepare(*arguments)


@pytest.mark.parametrize(
    "deaths",
    [
        # In the middle of a shard; between a shard and its ends; before the note of a part; before the manifest.
        [("add", 1), ("add", 20), ("add", 21)],
        [("publish", 2), ("publish", 7), ("publish", 8)],
        # The first call of a new folder writes its plan.
        [("write_atomically", 2), ("write_atomically", 2), ("add", 3)],
    ],
)
def test_the_result_is_the_same_after_repeated_kills(
    tmp_path: Path, jsonl: str, small: Settings, deaths: list[tuple[str, int]]
) -> None:
    prepare(tmp_path / "whole", [jsonl], small)
    folder = tmp_path / "killed"
    for function, call in deaths:
        process = multiprocessing.get_context("fork").Process(
            target=killed_at, args=(function, call, (folder, [jsonl], small))
        )
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert not (folder / "manifest.json").exists()
        with pytest.raises(ValueError, match="was begun but not finished"):
            Samples(folder, "train", 16)
    prepare(folder, [jsonl], small)
    assert prepared.files(folder) == prepared.files(tmp_path / "whole")


def test_finished_parts_are_kept(tmp_path: Path, jsonl: str, small: Settings) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=killed_at, args=("write_atomically", 4, (tmp_path / "out", [jsonl], small))
    )
    process.start()
    process.join(60)
    kept = {path: path.stat().st_ino for note in (0, 1) for path in tmp_path.glob(f"out/train/{note:06d}-*")}
    assert len(kept) > 4
    prepare(tmp_path / "out", [jsonl], small)
    assert {path: path.stat().st_ino for path in kept} == kept


@pytest.fixture
def options(tmp_path: Path, tokenizer: str, texts: list[str]) -> list[str]:
    """The command's words for 20 parts; the number of processes comes after them."""
    jsonl = str(prepared.as_jsonl(texts * 3, tmp_path / "text.jsonl"))
    return f"{jsonl} --tokenizer {tokenizer} --part-mb 0.05 --validation 0.2 --processes".split()


def assert_same_as_one_process(pool: RankPool, folder: Path, options: list[str]) -> None:
    pool.run(os.getpid, 1)  # so that its server, which has imported what is slow to import, forks ours too
    assert main(["data", "prepare", str(folder / "parallel"), *options, "2"]) == 0
    assert main(["data", "prepare", str(folder / "serial"), *options, "1"]) == 0
    assert prepared.files(folder / "parallel") == prepared.files(folder / "serial")


def test_processes_do_not_change_the_bytes(pool: RankPool, tmp_path: Path, options: list[str]) -> None:
    assert_same_as_one_process(pool, tmp_path, options)


@pytest.mark.nightly
def test_processes_die_with_their_parent_and_change_no_byte(
    pool: RankPool, tmp_path: Path, options: list[str]
) -> None:
    folder = str(tmp_path / "parallel")
    command = [sys.executable, "-m", "fourfold.cli.main", "data", "prepare", folder, *options, "2"]
    python_path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": python_path}) as process:
        while not any(tmp_path.glob("parallel/parts/*.json")):
            assert process.poll() is None
            time.sleep(0.002)
        children = descendants(process.pid)
        process.kill()
    assert not (tmp_path / "parallel" / "manifest.json").exists()
    assert len(children) >= 2
    end_s = time.monotonic() + 20
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    assert_same_as_one_process(pool, tmp_path, options)


def descendants(pid: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [below for child in found for below in descendants(child)]


# -- nothing else is mixed in -----------------------------------------------------------------------------------------


def test_another_tokenizer_or_source_is_rejected(
    tmp_path: Path, texts: list[str], jsonl: str, tokenizer: str, small: Settings
) -> None:
    other = tmp_path / "other"
    save_tokenizer(train_tokenizer(texts, 500), other)
    out = tmp_path / "out"
    before = prepare(out, [jsonl], small)
    assert prepare(out, [jsonl], small) == before
    with pytest.raises(
        ValueError, match=r"its tokenizer fingerprint is \w+, this run has \w+; use another folder"
    ):
        prepare(out, [jsonl], Settings(**vars(small) | {"tokenizer": str(other)}))
    with pytest.raises(ValueError, match=r"validation is 0\.2, this run has 0\.3"):
        prepare(out, [jsonl], Settings(**vars(small) | {"validation": 0.3}))
    path = prepared.as_jsonl(texts[:3], tmp_path / "more.jsonl")
    with pytest.raises(ValueError, match=r"more\.jsonl is an input of this run only"):
        prepare(out, [jsonl, str(path)], small)
    assert prepare(out, [str(path)], small, overwrite=True).documents("train") < 4
    path.write_text(path.read_text() + json.dumps({"text": "more"}) + "\n")
    with pytest.raises(ValueError, match=r"more\.jsonl had \d+ bytes, it has \d+ now"):
        prepare(out, [str(path)], small)


def test_a_folder_with_other_files_is_not_changed(tmp_path: Path, jsonl: str, small: Settings) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "photo.jpg").write_bytes(b"dear")
    with pytest.raises(ValueError, match=r"other files in it, such as train"):
        prepare(tmp_path, [jsonl], small, overwrite=True)
    assert prepared.files(tmp_path) == {"train/photo.jpg": b"dear"}


def test_one_process_at_a_time_prepares_a_folder(tmp_path: Path, jsonl: str, small: Settings) -> None:
    with shards.locked(tmp_path), pytest.raises(ValueError, match="another process is preparing"):
        prepare(tmp_path, [jsonl], small)


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".bin", ".ends"])
def test_a_flipped_bit_is_found(
    tmp_path: Path, jsonl: str, small: Settings, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path / "out", [jsonl], small)
    assert main(["data", "info", str(tmp_path / "out"), "--verify", "--show", "1"]) == 0
    assert "verified" in capsys.readouterr().out
    shard = tmp_path / "out" / "train" / f"000001-000{suffix}"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert main(["data", "info", str(tmp_path / "out")]) == 0  # names and sizes are right
    assert main(["data", "info", str(tmp_path / "out"), "--verify"]) == 1
    assert f"000001-000{suffix}" in capsys.readouterr().out


def test_a_first_try_that_tokenised_nothing_leaves_no_settings(
    tmp_path: Path, jsonl: str, small: Settings
) -> None:
    with pytest.raises(ValueError, match="--column"):
        prepare(tmp_path / "out", [jsonl], replace(small, column="answer"))
    assert prepare(tmp_path / "out", [jsonl], small).tokens("train") > 0


def test_a_table_is_not_taken_as_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text\nfirst\nsecond\n")
    with pytest.raises(ValueError, match=r"rows.csv is a table.*JSON lines"):
        find_inputs([str(path)])
    assert find_inputs([str(path)], text_suffixes=[".csv"]) == {path: "text"}
