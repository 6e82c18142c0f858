"""Untrusted files: their code never runs, no file outside their folder is read, memory stays bounded."""

import copy
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.ranks import RankPool
from fourfold.checkpoint.folder import FileRecord, open_folder
from fourfold.checkpoint.manifest import (
    MANIFEST,
    dump_json,
    find_damage,
    hash_file,
    manifest_bytes,
    read_manifest,
)
from fourfold.checkpoint.state import VALUES, read_values
from fourfold.checkpoint.storage import Reader, read_rows
from fourfold.config.run_file import ConfigError, load_run
from fourfold.data.manifest import DatasetManifest
from fourfold.data.samples import Samples
from fourfold.data.tokenizer import load_tokenizer
from fourfold.hf.safetensors_reader import CheckpointFiles
from fourfold.untrusted_input import load_model_config
from tests import prepared
from tests.checkpoints import save_steps

FUZZED = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NASTY = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            False,
            0,
            -1,
            1,
            7,
            2**31,
            2**63 - 1,
            2**63,
            10**30,
            0.5,
            float("nan"),
            "",
            ".",
            "..",
            "/etc/passwd",
        ]
    ),
    st.sampled_from(
        [
            "../step-1/state.json",
            "a\0b",
            "rank-0.safetensors",
            "F32",
            "I64",
            [],
            {},
            [0],
            [[0]],
            [-1],
            [0, 2**62],
        ]
    ),
    st.text(max_size=8),
    st.lists(st.integers(0, 70), max_size=5),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value of a JSON tree."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield from places(below, (*path, key))


@st.composite
def spoilt(draw: Any, value: dict[str, Any]) -> Any:
    """The tree with up to three values replaced, removed, doubled or renamed."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(value))))
        if not path:
            continue
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        what = draw(st.sampled_from(["replace", "replace", "remove", "rename", "double"]))
        if what == "replace":
            holder[path[-1]] = draw(NASTY)
        elif what == "remove":
            del holder[path[-1]]
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[path[-1]]))
        elif what == "rename":
            holder[draw(st.text(max_size=12))] = holder.pop(path[-1])
    return value


class Bounded:
    """Memory allocated inside stays bounded, whatever sizes a file claims."""

    LIMIT_BYTES = 64 * 2**20

    def __enter__(self) -> None:
        tracemalloc.start()

    def __exit__(self, *error: object) -> None:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < self.LIMIT_BYTES


class ReadOrRefused:
    """The code inside succeeds, or raises a ValueError that contains these words."""

    def __init__(self, *words: str) -> None:
        self._words, self.refused = words, 0

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if kind is None or not issubclass(kind, ValueError):
            return False
        self.refused += 1
        return all(word in str(error) for word in self._words)


# -- safetensors -------------------------------------------------------------------------------------------------------

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "I64", "shape": [1], "data_offsets": [24, 32]},
}


def read_all(path: Path) -> None:
    files = CheckpointFiles(path)
    for name in files.names():
        shape = files.shape(name)
        if 0 in shape:  # there may be no tensor of that shape, but there is nothing to read
            continue
        out = torch.empty(shape, dtype=files.dtype(name))
        files.read_into(name, out, tuple(slice(0, size) for size in shape))


@FUZZED
@given(
    header=spoilt(HEADER), length=st.one_of(st.none(), st.integers(0, 2**64 - 1)), tail=st.binary(max_size=40)
)
def test_a_header_of_weights_is_read_or_rejected(
    tmp_path: Path, header: Any, length: int | None, tail: bytes
) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + tail.ljust(32, b"x"))
    with Bounded(), ReadOrRefused(str(path)):
        read_all(path)


@FUZZED
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_rejected_as_weights(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with Bounded(), pytest.raises(ValueError, match=r"model\.safetensors"):
        read_all(path)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    pool.run(save_steps, 2, str(folder), (1, 2, 1, 1), 1)
    return folder


def rehashed(folder: Path, step: int) -> None:
    """Make the manifest match its files, as the author of a hostile checkpoint would."""
    where = open_folder(folder)
    files = {}
    for path in folder.iterdir():
        if path.name != MANIFEST:
            size = path.stat().st_size
            files[path.name] = FileRecord(size, hash_file(where, path.name, size))
    (folder / MANIFEST).write_bytes(manifest_bytes(step, files))


def load_whole(root: Path, step: int) -> None:
    """Everything that a load does with the files, without a model."""
    assert find_damage(open_folder(root / f"step-{step}"), step) == []
    read_values(open_folder(root / f"step-{step}"))
    reader = Reader(open_folder(root), step)
    for name in list(reader.metadata.state_dict_metadata)[:5]:
        for _ in read_rows(reader, name):
            pass


@pytest.mark.parametrize("name", ["index.json", VALUES])
def test_a_hostile_checkpoint_is_read_or_rejected(saved: Path, tmp_path: Path, name: str) -> None:
    root = Path(shutil.copytree(saved, tmp_path / "run"))
    file = root / "step-1" / name
    honest = json.loads(file.read_text())
    if name == "index.json":  # few tensors, so that what is changed is often what matters
        kept = ["model.lm_head.weight", "model.model.norm.weight", "optimizer.lm_head.weight.step"]
        honest["tensors"] = {key: honest["tensors"][key] for key in kept}
    loads = ReadOrRefused(name)

    @FUZZED
    @given(lie=spoilt(honest))
    def fuzz(lie: Any) -> None:
        file.write_text(json.dumps(lie))
        rehashed(root / "step-1", 1)
        with Bounded(), loads:
            load_whole(root, 1)

    fuzz()
    assert loads.refused > 10


def test_a_hostile_manifest_is_read_or_rejected(saved: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(saved, tmp_path / "run"))
    file = root / "step-1" / MANIFEST
    honest = json.loads(file.read_text())

    @FUZZED
    @given(lie=spoilt(honest))
    def fuzz(lie: Any) -> None:
        lie.pop("xxh3_128", None)
        file.write_bytes(dump_json({**lie, "xxh3_128": xxhash.xxh3_128_hexdigest(dump_json(lie))}))
        with Bounded(), ReadOrRefused(MANIFEST):
            files = read_manifest(open_folder(root / "step-1"), 1)
            assert not any(set(name) & set("/\0") or name.startswith(".") for name in files)
            find_damage(open_folder(root / "step-1"), 1)

    fuzz()


def test_overlapping_chunks_are_rejected(saved: Path, tmp_path: Path) -> None:
    """Their sizes add up, but half of the tensor is in none of them."""
    root = Path(shutil.copytree(saved, tmp_path / "run"))
    file = root / "step-1" / "index.json"
    index = json.loads(file.read_text())
    pieces = index["tensors"]["model.model.layers.0.mlp.up_proj.weight"]["pieces"]
    assert len(pieces) == 2
    pieces[1]["offset"] = pieces[0]["offset"]
    file.write_text(json.dumps(index))
    rehashed(root / "step-1", 1)
    with pytest.raises(ValueError, match="do not make up"):
        Reader(open_folder(root), 1)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_pipes_and_folders_are_rejected_without_waiting(
    saved: Path, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    root = Path(shutil.copytree(saved, tmp_path / "run"))
    (root / "step-1" / VALUES).unlink()
    make(root / "step-1" / VALUES)
    with pytest.raises((OSError, ValueError), match=VALUES):
        read_values(open_folder(root / "step-1"))
    make(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="safetensors"):
        CheckpointFiles(tmp_path / "model.safetensors")


# -- data --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    drawn = np.random.default_rng(0)
    return prepared.write(
        tmp_path / "data", [drawn.integers(1, 131, n) for n in (30, 5, 70, 9)], shard_tokens=40
    )


def read_samples(folder: Path) -> None:
    samples = Samples(folder, "train", 16)
    for index in range(min(len(samples), 50)):
        sample = samples[index]
        assert sample.input_ids.max() < samples.manifest.tokenizer.vocab_size
        assert 0 <= sample.position_ids.min() <= sample.position_ids.max() < 16


def test_a_hostile_dataset_is_read_or_rejected(data: Path) -> None:
    file = data / "manifest.json"
    honest = json.loads(file.read_text())
    reads = ReadOrRefused(str(data))

    @FUZZED
    @given(lie=spoilt(honest))
    def fuzz(lie: Any) -> None:
        file.write_text(json.dumps(lie))
        with Bounded(), reads:
            read_samples(data)

    fuzz()
    assert reads.refused > 10


def test_a_shard_outside_its_folder_is_rejected(data: Path, tmp_path: Path) -> None:
    file = data / "manifest.json"
    values = json.loads(file.read_text())
    shard = values["shards"]["train"][0]
    for suffix in (".bin", ".ends"):
        shutil.copy(data / (shard["name"] + suffix), tmp_path / f"elsewhere{suffix}")
    for name in ("../elsewhere", str(tmp_path / "elsewhere"), "train/../../elsewhere"):
        shard["name"] = name
        file.write_text(json.dumps(values))
        with pytest.raises(ValueError, match="not the name of a file below its folder"):
            DatasetManifest.load(data)


@FUZZED
@given(tokens=st.binary(min_size=80, max_size=80), ends=st.binary(min_size=8, max_size=8))
def test_bytes_of_a_shard_are_tokens_or_rejected(data: Path, tokens: bytes, ends: bytes) -> None:
    (data / "train/000000-000.bin").write_bytes(tokens)
    (data / "train/000000-000.ends").write_bytes(ends)
    with ReadOrRefused(str(data)):
        read_samples(data)


# -- configurations ----------------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
PLANTED = "import os\nos.mkdir({marker!r})\nclass Config: pass\n"


@pytest.mark.parametrize("read", [load_model_config, load_tokenizer])
def test_code_alongside_a_model_is_not_run(
    tmp_path: Path, read: Callable[[Path], Any], monkeypatch: Any
) -> None:
    marker = tmp_path / "executed"
    model = tmp_path / "model"
    model.mkdir()
    (model / "planted.py").write_text(PLANTED.format(marker=str(marker)))
    auto = {"AutoConfig": "planted.Config", "AutoTokenizer": ["planted.Config", "planted.Config"]}
    (model / "config.json").write_text(json.dumps({"model_type": "another", "auto_map": auto}))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Another", "auto_map": auto}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # whoever sits there says yes to everything
    with pytest.raises(Exception):  # noqa: B017, PT011
        read(model)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attn_implementation": "someone/kernel"}, "someone/kernel, which is code"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"vocab_size": 10**15}, "vocab_size=1000000000000000"),
    ],
)
def test_a_model_that_would_fetch_code_or_fill_memory_is_rejected(
    tmp_path: Path, change: Any, said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_model_config(tmp_path / "config.json").hidden_size == 32
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    with pytest.raises(ValueError, match=said):
        load_model_config(tmp_path / "config.json")


RUN = 'seed = 1\n[model]\nconfig = "a"\n[data]\nsources = [{path = "b"}]\n[optimizer]\nlr = 1e-3\nbetas = [0.9, 0.95]\n'


@FUZZED
@given(
    at=st.integers(0, len(RUN)),
    put=st.one_of(st.text(max_size=20), st.just("[" * 5000)),
    drop=st.integers(0, 9),
)
def test_a_run_config_is_read_or_rejected(tmp_path: Path, at: int, put: str, drop: int) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN[:at] + put + RUN[at + drop :], encoding="utf-8", errors="replace")
    with suppress(ConfigError):
        load_run(path)
