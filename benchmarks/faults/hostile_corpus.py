"""The hostile files: each is created in its place, read, and restored.

They are pickles that would execute code, headers that claim too many bytes, names that lead out of the folder, code next to
a model, and values replaced, removed, renamed and duplicated at random positions.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from benchmarks.faults.saves import trained
from fourfold.checkpoint import Checkpoints
from fourfold.checkpoint.folder import FileRecord, open_folder
from fourfold.checkpoint.manifest import MANIFEST, dump_json, find_damage, hash_file, manifest_bytes
from fourfold.checkpoint.state import VALUES, read_values
from fourfold.checkpoint.storage import Reader, read_rows
from fourfold.config.run_file import load_run
from fourfold.data.samples import Samples
from fourfold.data.tokenizer import load_tokenizer
from fourfold.hf.safetensors_reader import CheckpointFiles
from fourfold.untrusted_input import load_model_config

PLANTED = "import os\nos.mkdir({marker!r})\nclass Config: pass\n"
HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "I64", "shape": [1], "data_offsets": [24, 32]},
}
NASTY: list[Any] = [
    *(None, True, 0, -1, 7, 2**31, 2**63 - 1, 2**63, 10**30, 0.5, float("nan")),
    *(
        "",
        ".",
        "..",
        "/etc/passwd",
        "../outside/state.json",
        "../../outside/shard",
        "a\0b",
        "F32",
        "x" * 10_000,
    ),
    *([], {}, [0], [[0]], [-1], [0, 2**62], [10**9] * 60, {"a": {"a": {}}}),
]
Case = tuple[str, Callable[[], None]]  # its name and its reader


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


class Corpus:
    """The files are in ``inside``; files that must not be opened are in ``outside``, next to it."""

    def __init__(self, file: Path, folder: Path) -> None:
        self.inside, self.outside, self.marker = folder / "inside", folder / "outside", folder / "executed"
        self.inside.mkdir(parents=True)
        self.outside.mkdir()
        self._checkpoint, self._data = self.inside / "checkpoints", self.inside / "data"
        self._weights, self._model = self.inside / "model.safetensors", self.inside / "model"
        self._toml = self.inside / "run.toml"
        self._text = file.read_text()
        with Checkpoints(self._checkpoint) as checkpoints:
            checkpoints.save(trained(file, dist.get_world_size(), 1))
        shutil.copytree(file.parent / "data", self._data)
        self._model.mkdir()
        self._llama = json.loads((file.parent / "config.json").read_text())
        self._saved = self.inside / "saved"
        shutil.copytree(self._checkpoint / "step-1", self._saved)
        self._data_manifest = json.loads((self._data / "manifest.json").read_text())
        self._restore()
        # A reader that follows a name out of its folder finds a valid file.
        shutil.copy(self._saved / VALUES, self.outside / VALUES)
        shutil.copy(self._weights, self.outside / "model.safetensors")
        shard = self._data / self._data_manifest["shards"]["train"][0]["name"]
        for suffix in (".bin", ".ends"):
            shutil.copy(shard.with_name(shard.name + suffix), self.outside / f"shard{suffix}")

    def _restore(self) -> None:
        shutil.rmtree(self._checkpoint / "step-1", ignore_errors=True)
        shutil.copytree(self._saved, self._checkpoint / "step-1")
        self._write_weights(HEADER)
        (self._data / "manifest.json").write_text(json.dumps(self._data_manifest))
        shutil.rmtree(self._model)
        self._model.mkdir()
        (self._model / "config.json").write_text(json.dumps(self._llama))
        self._toml.write_text(self._text)

    def _write_weights(self, header: Any, length: int | None = None) -> None:
        text = json.dumps(header).encode()
        size = len(text) if length is None else length
        self._weights.write_bytes(size.to_bytes(8, "little") + text + bytes(32))

    # -- readers ------------------------------------------------------------------------------------------------------

    def readers(self) -> list[Callable[[], None]]:
        return [self.read_checkpoint, self.read_weights, self.read_data, self.read_model, self.read_run]

    def read_checkpoint(self) -> None:
        """Everything that a load does with the files, without a model."""
        root = open_folder(self._checkpoint)
        if damage := find_damage(root.child("step-1"), 1):
            raise ValueError(damage[0])
        read_values(root.child("step-1"))
        reader = Reader(root, 1)
        for name in list(reader.metadata.state_dict_metadata)[:8]:
            for _ in read_rows(reader, name):
                pass

    def read_weights(self) -> None:
        files = CheckpointFiles(self._weights)
        for name in files.names():
            shape = files.shape(name)
            if 0 not in shape:
                out = torch.empty(shape, dtype=files.dtype(name))
                files.read_into(name, out, tuple(slice(0, size) for size in shape))

    def read_sharded(self) -> None:
        files = CheckpointFiles(self._model)
        for name in files.names():
            files.shape(name)

    def read_data(self) -> None:
        samples = Samples(self._data, "train", 16)
        for index in range(min(len(samples), 20)):
            samples[index]

    def read_model(self) -> None:
        load_model_config(self._model)

    def read_tokenizer(self) -> None:
        load_tokenizer(self._model)

    def read_run(self) -> None:
        load_run(self._toml)

    # -- hostile files ------------------------------------------------------------------------------------------------

    def cases(self, fuzzed: int, broken: bool) -> Iterator[Case]:
        makers = [
            self._pickles(broken),
            self._claims(broken),
            self._names(),
            self._code(),
            self._fuzz(fuzzed),
        ]
        for maker in makers:
            for name, read in maker:
                yield name, read
                self._restore()

    def _pickles(self, broken: bool) -> Iterator[Case]:
        step = self._checkpoint / "step-1"
        files = sorted(path.name for path in self._saved.iterdir())
        for name in [*files, ".metadata", "evil.pkl", "rank-7.safetensors", "__0_0.distcp"]:
            for is_listed in (False, True):
                (step / name).write_bytes(pickle.dumps(Bomb(self.marker)))
                if is_listed:
                    self._rehash()
                yield f"pickle as {name}", self.read_checkpoint
        if broken:
            (step / ".metadata").write_bytes(pickle.dumps(Bomb(self.marker)))
            stock = torch.distributed.checkpoint.FileSystemReader(step)
            yield "pickle as .metadata, read by DCP", lambda: stock.read_metadata() and None
        self._weights.write_bytes(pickle.dumps(Bomb(self.marker)))
        yield "pickle as weights", self.read_weights

    def _claims(self, broken: bool) -> Iterator[Case]:
        """Headers that claim more bytes than the file has."""
        for length in (0, 1, 2**31, 2**40, 2**63, 2**64 - 1):
            self._write_weights(HEADER, length)
            if broken:  # as much as the header claims, limited to 256 MiB
                yield f"header of {length}", lambda length=length: bytearray(min(length, 2**28)) and None  # type: ignore[misc]
            else:
                yield f"header of {length}", self.read_weights
        for shape in ([2**40], [2**31, 2**31], [10**9] * 70, [0, 2**62]):
            self._write_weights(HEADER | {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 24]}})
            yield f"weights of shape {shape}", self.read_weights
        self._weights.write_bytes((10**6).to_bytes(8, "little") + b"[" * 10**6)
        yield "header of brackets", self.read_weights
        for config in ({"num_hidden_layers": 10**9}, {"vocab_size": 10**15}, {"hidden_size": 2**62}):
            (self._model / "config.json").write_text(json.dumps(self._llama | config))
            yield f"model with {config}", self.read_model
        self._toml.write_text("a = " + "[" * 100_000)
        yield "run of brackets", self.read_run
        os.truncate(self._toml, 2**34)  # sparse: uses no disk space
        yield "run of 16 GiB", self.read_run
        for file in (self._checkpoint / "step-1" / "state.json", self._data / "manifest.json"):
            os.truncate(file, 2**34)
            yield (
                f"{file.name} of 16 GiB",
                self.read_checkpoint if file.parent.name == "step-1" else self.read_data,
            )

    def _names(self) -> Iterator[Case]:
        """Names that lead out of the folder."""
        index = self._checkpoint / "step-1" / "index.json"
        for name in (
            f"../../../outside/{VALUES}",
            str(self.outside / VALUES),
            "/etc/passwd",
            "..",
            "a/../../b",
        ):
            values = json.loads(index.read_text())
            next(iter(values["tensors"].values()))["pieces"][0]["file"] = name
            index.write_text(json.dumps(values))
            self._rehash()
            yield f"index to {name}", self.read_checkpoint
            self._rehash({name: FileRecord(10, "0" * 32)})
            yield f"manifest with {name}", self.read_checkpoint
        for name in ("../outside/shard", str(self.outside / "shard"), "train/../../outside/shard"):
            values = copy.deepcopy(self._data_manifest)
            values["shards"]["train"][0]["name"] = name
            (self._data / "manifest.json").write_text(json.dumps(values))
            yield f"shard at {name}", self.read_data
        for name in ("../../outside/model.safetensors", str(self.outside / "model.safetensors")):
            (self._model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
            yield f"weights at {name}", self.read_sharded
        (self._checkpoint / "step-1" / VALUES).unlink()
        os.mkfifo(self._checkpoint / "step-1" / VALUES)
        yield "a pipe", self.read_checkpoint

    def _code(self) -> Iterator[Case]:
        """Code next to a model."""
        for read in (self.read_model, self.read_tokenizer):
            (self._model / "planted.py").write_text(PLANTED.format(marker=str(self.marker)))
            auto = {"AutoConfig": "planted.Config", "AutoTokenizer": ["planted.Config", "planted.Config"]}
            config = {"model_type": "another", "tokenizer_class": "Another", "auto_map": auto}
            for name in ("config.json", "tokenizer_config.json"):
                (self._model / name).write_text(json.dumps(config))
            yield "code beside a model", read
        (self._model / "config.json").write_text(
            json.dumps(self._llama | {"attn_implementation": "someone/kernel"})
        )
        yield "attention from the hub", self.read_model

    def _fuzz(self, count: int) -> Iterator[Case]:
        """Values replaced, removed, renamed and duplicated, in files with valid hashes."""
        step = self._checkpoint / "step-1"
        for seed in range(count):
            choose = random.Random(seed)
            kind = choose.choice(["index.json", VALUES, MANIFEST, "header", "data", "shard", "run"])
            if kind in ("index.json", VALUES):
                (step / kind).write_text(json.dumps(spoil(json.loads((step / kind).read_text()), choose)))
                self._rehash()
                yield f"{kind} {seed}", self.read_checkpoint
            elif kind == MANIFEST:
                lie = spoil(json.loads((step / kind).read_text()), choose)
                lie.pop("xxh3_128", None)
                lie["xxh3_128"] = xxhash.xxh3_128_hexdigest(dump_json(lie))
                (step / kind).write_bytes(dump_json(lie))
                yield f"{kind} {seed}", self.read_checkpoint
            elif kind == "header":
                length = choose.randrange(2**64) if choose.random() < 0.2 else None
                self._write_weights(spoil(HEADER, choose), length)
                yield f"{kind} {seed}", self.read_weights
            elif kind == "data":
                lie = spoil(self._data_manifest, choose)
                (self._data / "manifest.json").write_text(json.dumps(lie))
                yield f"{kind} {seed}", self.read_data
            elif kind == "shard":
                name = self._data_manifest["shards"]["train"][0]["name"]
                file = self._data / (name + choose.choice([".bin", ".ends"]))
                honest = file.read_bytes()
                at = choose.randrange(len(honest))
                file.write_bytes(honest[:at] + choose.randbytes(8) + honest[at + choose.choice([0, 8]) :])
                yield f"{kind} {seed}", self.read_data
                file.write_bytes(honest)
            else:
                at, drop = choose.randrange(len(self._text)), choose.randrange(9)
                put = choose.choice(
                    ["[" * 5000, "\0", "=", "'", '"""', "[a]", "1e999", choose.randbytes(9).hex()]
                )
                self._toml.write_text(self._text[:at] + put + self._text[at + drop :])
                yield f"{kind} {seed}", self.read_run

    def _rehash(self, more: dict[str, FileRecord] | None = None) -> None:
        """Update the manifest, as the author of a hostile checkpoint would."""
        folder = self._checkpoint / "step-1"
        files = {
            path.name: FileRecord(
                path.stat().st_size, hash_file(open_folder(folder), path.name, path.stat().st_size)
            )
            for path in folder.iterdir()
            if path.name != MANIFEST
        }
        (folder / MANIFEST).write_bytes(manifest_bytes(1, files | (more or {})))


def spoil(value: dict[str, Any], choose: random.Random) -> Any:
    value = copy.deepcopy(value)
    for _ in range(choose.randint(1, 3)):
        path = choose.choice(list(_places(value)))
        if not path:
            continue
        holder: Any = value
        for key in path[:-1]:
            holder = holder[key]
        what = choose.choice(["replace", "replace", "remove", "rename", "double"])
        if what == "replace":
            holder[path[-1]] = copy.deepcopy(choose.choice(NASTY))
        elif what == "remove":
            del holder[path[-1]]
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[path[-1]]))
        else:
            holder[choose.choice(["", "../a", "x"])] = holder.pop(path[-1])
    return value


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield from _places(below, (*path, key))
