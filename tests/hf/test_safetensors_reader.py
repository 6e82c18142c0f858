import json
import math
import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from fourfold.hf.safetensors_reader import CheckpointFiles


def piece(*bounds: tuple[int, int]) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in bounds)


def saved(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, path)
    return path


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "fp32": torch.randn(40, 700, generator=generator),
        "bf16": torch.randn(30, 20, 60, generator=generator).bfloat16(),
        "four": torch.randn(3, 4, 5, 6, generator=generator),
        "row": torch.randn(1000, generator=generator).half(),
        "whole": torch.randint(-9, 9, (7, 3), generator=generator),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
    }


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor]) -> Path:
    return saved(tmp_path_factory.mktemp("single") / "model.safetensors", tensors)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor]) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        file = f"model-{number}.safetensors"
        saved(folder / file, {name: tensor})
        weight_map[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@st.composite
def bounds_in(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[slice, ...]:
    pairs = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    whole = [draw(st.booleans()) for _ in shape]
    return piece(*((0, n) if w else (lo, hi) for w, n, (lo, hi) in zip(whole, shape, pairs, strict=True)))


@pytest.mark.parametrize("layout", ["file", "folder", "sharded"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_slice_equals_that_of_the_tensor(
    layout: str, single: Path, sharded: Path, tensors: dict[str, Tensor], data: st.DataObject
) -> None:
    path = {"file": single, "folder": single.parent, "sharded": sharded}[layout]
    name = data.draw(st.sampled_from(sorted(tensors)))
    index = data.draw(bounds_in(tuple(tensors[name].shape)))
    dtype = data.draw(st.sampled_from([tensors[name].dtype, torch.float32, torch.bfloat16]))
    transposed = data.draw(st.booleans())
    expected = tensors[name][index].to(dtype)
    out = torch.full(expected.shape[::-1], 99, dtype=dtype).permute(tuple(reversed(range(expected.ndim))))
    out = out if transposed else out.contiguous()
    files = CheckpointFiles(path)
    assert files.names() == set(tensors)
    assert files.shape(name) == tuple(tensors[name].shape)
    assert files.dtype(name) == tensors[name].dtype
    files.read_into(name, out, index)
    assert torch.equal(out, expected)


def anonymous_mb() -> float:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"^Anonymous:\s+(\d+)", rollup, re.M)[1]) / 1024  # type: ignore[index]


@pytest.mark.parametrize("index", [piece((1000, 1100), (0, 4096)), piece((0, 4096), (512, 576))])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_a_slice_along_any_dim_takes_no_memory_besides_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: tuple[slice, ...], out_dtype: torch.dtype
) -> None:
    tensor = torch.randn(4096, 4096)
    path = saved(tmp_path / "large.safetensors", {"w": tensor})
    out = torch.zeros(tensor[index].shape, dtype=out_dtype)
    grown_mb: list[float] = []
    copy_ = torch.Tensor.copy_

    def copied(target: Tensor, source: Tensor) -> Tensor:
        result = copy_(target, source)
        grown_mb.append(anonymous_mb() - before_mb)  # while the slice is still there
        return result

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    files = CheckpointFiles(path)
    before_mb = anonymous_mb()
    files.read_into("w", out, index)
    assert len(grown_mb) == 1
    assert grown_mb[0] < tensor.nbytes / 2**20 / 8
    assert torch.equal(out, tensor[index].to(out_dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint16])
def test_tensors_that_begin_at_any_byte_are_cast_to_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4)
    name = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}.get(dtype)
    name = name or {torch.int8: "I8", torch.uint16: "U16"}[dtype]
    raw = tensor.to(dtype).view(torch.uint8).numpy().tobytes()
    header = {"a": entry("U8", [1], 0, 1), "w": entry(name, [3, 4], 1, 1 + len(raw))}
    path = with_header(tmp_path / "odd.safetensors", header, b"\1" + raw)
    out = torch.empty(2, 2)
    files = CheckpointFiles(path)
    files.read_into("w", out, piece((1, 3), (1, 3)))
    assert torch.equal(out, tensor[1:3, 1:3])


def test_a_parameter_that_requires_grad_can_be_read_into(single: Path, tensors: dict[str, Tensor]) -> None:
    out = torch.nn.Parameter(torch.empty(1000, dtype=torch.half))
    files = CheckpointFiles(single)
    files.read_into("row", out, piece((0, 1000)))
    assert torch.equal(out, tensors["row"])


@pytest.mark.parametrize(
    "index", [piece((0, 41), (0, 700)), piece((0, 40)), piece((5, 4), (0, 700)), piece((-1, 3), (0, 4))]
)
def test_an_index_outside_the_tensor_is_rejected(single: Path, index: tuple[slice, ...]) -> None:
    files = CheckpointFiles(single)
    with pytest.raises(ValueError, match=r"model\.safetensors: index"):
        files.read_into("fp32", torch.empty(0), index)


def test_a_target_of_another_shape_is_rejected(single: Path) -> None:
    files = CheckpointFiles(single)
    with pytest.raises(ValueError, match="does not fit"):
        files.read_into("fp32", torch.empty(3, 700), piece((0, 2), (0, 700)))


def test_unknown_names_are_errors(single: Path, sharded: Path) -> None:
    for path in (single, sharded):
        files = CheckpointFiles(path)
        with pytest.raises(ValueError, match="holds no tensor lm_head"):
            files.shape("lm_head")


def test_pickle_weights_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    for path in (tmp_path, tmp_path / "pytorch_model.bin", tmp_path / "absent"):
        with pytest.raises(ValueError, match="safetensors"):
            CheckpointFiles(path)


def with_header(path: Path, header: object, data: bytes = bytes(64), *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: object, start: object, stop: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "JSON"),
        (b"[1, 2]", "invalid type: sequence"),
        (b'{"w": ', "JSON"),
        (b"\xff\xfe", "UTF-8"),
        (b"[" * 100_000, "JSON"),
        (b'{"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "w": {}}', "JSON"),
        ({"w": 3}, "invalid type: integer `3`"),
        ({"w": {"dtype": "F32", "shape": [2]}}, "missing field `data_offsets`"),
        ({"w": entry("F32", [-1], 0, 4)}, "integer `-1`"),
        ({"w": entry("F32", [True], 0, 4)}, "boolean `true`"),
        ({"w": entry("F32", [1.0], 0, 4)}, "floating point `1.0`"),
        ({"w": entry("F32", [1], -4, 0)}, "integer `-4`"),
        ({"w": entry("F32", [1] * 64 + [16], 0, 64)}, "w has 65 dims, more than 64"),
        ({"w": entry("F32", [20], 0, 80)}, "file not fully covered"),
        ({"w": entry("F32", [0], 8, 4)}, "invalid offset for tensor `w`"),
        ({"w": entry("F32", [3], 0, 8)}, "invalid shape, data type, or offset"),
        ({"w": entry("F32", [2**62, 2**62], 0, 8)}, "overflow"),
        ({"v": entry("F32", [4], 0, 16), "w": entry("F32", [4], 12, 28)}, "invalid offset for tensor `w`"),
        (
            {"u": entry("U8", [0], 13, 13), "v": entry("F32", [4], 0, 16), "w": entry("F32", [4], 14, 30)},
            "invalid offset",
        ),
    ],
)
def test_a_corrupt_header_is_rejected(tmp_path: Path, header: object, message: str) -> None:
    path = with_header(tmp_path / "bad.safetensors", header)
    with pytest.raises(ValueError, match=rf"bad\.safetensors: (.|\n)*{message}"):
        CheckpointFiles(path)


@pytest.mark.parametrize("length", [10**6, 2**63, 2**64 - 1, 100_000_001])
def test_a_header_longer_than_the_file_is_rejected(tmp_path: Path, length: int) -> None:
    path = with_header(tmp_path / "bad.safetensors", {}, length=length)
    with pytest.raises(ValueError, match=r"bad\.safetensors: .*(header too large|invalid header length)"):
        CheckpointFiles(path)


def test_a_file_too_short_for_a_header_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"1234567")
    with pytest.raises(ValueError, match="header too small"):
        CheckpointFiles(tmp_path / "bad.safetensors")


def test_a_file_truncated_after_opening_is_rejected(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.safetensors", {"w": torch.ones(1000)})
    files = CheckpointFiles(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 400)
    with pytest.raises(ValueError, match="file not fully covered"):
        files.read_into("w", torch.empty(1000), piece((0, 1000)))


def test_unsupported_dtypes_are_named_and_do_not_hide_other_tensors(tmp_path: Path) -> None:
    tensors = {
        "w": torch.ones(3),
        "eighth": torch.ones(4).to(torch.float8_e4m3fn),
        "mask": torch.ones(2, dtype=torch.bool),
    }
    files = CheckpointFiles(saved(tmp_path / "model.safetensors", tensors))
    out = torch.empty(3)
    files.read_into("w", out, piece((0, 3)))
    assert torch.equal(out, tensors["w"])
    for name, dtype in (("eighth", "F8_E4M3"), ("mask", "BOOL")):
        with pytest.raises(ValueError, match=f"{name} has dtype {dtype}"):
            files.read_into(name, torch.empty(files.shape(name)), piece((0, math.prod(files.shape(name)))))


@pytest.mark.parametrize(
    "file",
    [
        "../up.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        "model.bin",
        "",
        3,
        None,
    ],
)
def test_an_index_that_leaves_its_folder_is_rejected(tmp_path: Path, file: object) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(ValueError, match="plain name"):
        CheckpointFiles(tmp_path)


def test_an_index_that_disagrees_with_its_files_is_rejected(tmp_path: Path) -> None:
    saved(tmp_path / "a.safetensors", {"v": torch.ones(1)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "x": "absent.safetensors"}}))
    files = CheckpointFiles(index)
    with pytest.raises(ValueError, match=r"a\.safetensors holds w, but it does not"):
        files.shape("w")
    with pytest.raises(ValueError, match=r"absent\.safetensors: cannot be opened"):
        files.shape("x")
    index.write_text("{}")
    with pytest.raises(ValueError, match="no weight_map"):
        CheckpointFiles(index)
