"""Reads slices of the tensors of a Hugging Face safetensors checkpoint, through the safetensors library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fourfold.hf.parameter_layout import checked_bounds
from fourfold.untrusted_input import open_file, plain_name, read_json

MAX_DIMS = 64  # the limit of PyTorch

DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}


_Entry = tuple[str, tuple[int, ...]]  # dtype and shape of a tensor, as the header of its file has them


class CheckpointFiles:
    """The tensors of `model.safetensors`, of a sharded `model.safetensors.index.json`, or of one `.safetensors` file.

    `path` is the file or index found. The library validates a file's header and maps the file; each read maps it anew,
    so that the pages of one tensor at most count as this process's memory.
    """

    def __init__(self, folder_or_file: str | os.PathLike[str]) -> None:
        self._tables: dict[Path, dict[str, _Entry]] = {}
        self.path = _locate(Path(folder_or_file))
        self._file_of: dict[str, Path]
        if self.path.name.endswith(".json"):
            self._file_of = _read_weight_map(self.path)
        else:
            self._file_of = dict.fromkeys(self._table(self.path), self.path)

    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name)[1][1]

    def dtype(self, name: str) -> torch.dtype:
        path, (dtype, _) = self._find(name)
        if dtype not in DTYPES:
            raise ValueError(
                f"{path}: {name} has dtype {dtype}, which is not supported; "
                f"convert it to one of {', '.join(DTYPES)}"
            )
        return DTYPES[dtype]

    def read_into(self, name: str, out: Tensor, index: tuple[slice, ...]) -> None:
        """Fill `out`, of any device, dtype and strides, with the slice `index` of tensor `name`."""
        path, (_, shape) = self._find(name)
        self.dtype(name)
        checked_bounds(index, shape, out, name, f"{path}: ")
        if out.numel():
            with _opened(path) as file:
                # A view of the mapped file: nothing but `out` is allocated for a CPU tensor, whatever the slice.
                out.detach().copy_(file.get_slice(name)[index])

    def _find(self, name: str) -> tuple[Path, _Entry]:
        if name not in self._file_of:
            raise ValueError(f"{self.path}: holds no tensor {name}")
        path = self._file_of[name]
        table = self._table(path)
        if name not in table:
            raise ValueError(f"{self.path}: says that {path.name} holds {name}, but it does not")
        return path, table[name]

    def _table(self, path: Path) -> dict[str, _Entry]:
        if path not in self._tables:
            with _opened(path) as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                table = {n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
            for name, (_, shape) in table.items():
                if len(shape) > MAX_DIMS:
                    raise ValueError(f"{path}: {name} has {len(shape)} dims, more than {MAX_DIMS}")
            self._tables[path] = table
        return self._tables[path]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        os.close(open_file(path))  # a pipe or a device of that name would never end
        with safe_open(path, "pt") as file:
            yield file
    except OSError as error:
        raise ValueError(f"{path}: cannot be opened ({error.strerror or error})") from error
    except SafetensorError as error:
        raise ValueError(f"{path}: is not a valid safetensors file ({error})") from error


def _locate(path: Path) -> Path:
    if path.is_file() and path.name.endswith((".safetensors", ".safetensors.index.json")):
        return path
    if not path.is_dir():
        raise ValueError(
            f"{path}: is neither a folder nor a .safetensors file nor a .safetensors.index.json file"
        )
    for name in ("model.safetensors", "model.safetensors.index.json"):  # the order of transformers
        if (path / name).is_file():
            return path / name
    raise ValueError(
        f"{path}: has neither model.safetensors nor model.safetensors.index.json; "
        "weights in pickle files are never loaded, save them with save_pretrained"
    )


def _read_weight_map(path: Path) -> dict[str, Path]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path}: has no weight_map")
    for name, file in weight_map.items():
        try:
            if not plain_name(file).endswith(".safetensors"):
                raise ValueError(f"{file!r:.80} is not the plain name of a .safetensors file")
        except ValueError as error:
            raise ValueError(f"{path}: {name} is in a file that cannot be read: {error}") from error
    return {name: path.parent / file for name, file in weight_map.items()}
