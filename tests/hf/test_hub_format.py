"""Checkpoints that transformers converts: every tensor from its slices of the files, and the files of save_pretrained back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

import fourfold as ff
from benchmarks.ranks import RankError, RankPool
from benchmarks.tiny_models import UnsupportedFamily, families, find_family, tiny_model
from fourfold import Grid
from fourfold.checkpoint import Checkpoints, TrainState
from fourfold.export import export
from fourfold.export.live import write_model
from fourfold.hf.hub_format import ModelFiles, in_hub_format, stock_model, stock_model_of
from fourfold.hf.lazy_tensor import Box, LazyTensor
from fourfold.hf.parameter_layout import chunk
from fourfold.hf.safetensors_reader import CheckpointFiles
from tests.models import build, part

# Experts merged, gate and up concatenated; of text and vision in one list, and a router transposed; projections chunked and permuted.
IN_SHORT = ("qwen3_moe", "ernie4_5_vl_moe", "step3p7")


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def different_slices(model: nn.Module, files: ModelFiles) -> list[str]:
    """Parameters of which a slice, whole or a third along a dim, is not that of the stock model."""
    wrong = []
    for name, tensor in model.named_parameters():
        if name not in files.names() or files.shape(name) != tuple(tensor.shape):
            wrong.append(f"{name}: not in the checkpoint with the shape {tuple(tensor.shape)}")
            continue
        for dim in range(tensor.ndim):
            for parts in (1, 3):
                for which in range(parts):
                    index = [slice(0, size) for size in tensor.shape]
                    index[dim] = chunk(tensor.shape[dim], parts, which)
                    out = torch.full(tensor[tuple(index)].shape, torch.nan)
                    files.read_into(name, out, tuple(index))
                    if not torch.equal(out, tensor[tuple(index)]):
                        wrong.append(f"{name}[{index}]")
    return wrong


def lazy(name: str, real: Tensor) -> LazyTensor:
    def read(out: Tensor, box: Box) -> None:
        out.copy_(real[box])

    return LazyTensor.of(real.shape, real.dtype, read, frozenset((name,)))


def converted_back(model: Any) -> dict[str, Tensor]:
    state = model.state_dict()
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers()) if name in state]
    hub = in_hub_format(stock_model(model), {n: lazy(n, state[n]) for n in names if state[n].numel()})  # type: ignore[arg-type]
    found = {}
    for name, tensor in hub.items():
        found[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        tensor.read_into(found[name], tuple(slice(0, size) for size in tensor.shape))
    return found


def is_converted(name: str) -> bool:
    try:
        model = tiny_model(find_family(name))
    except UnsupportedFamily:
        return False
    return bool(conversion_mapping.get_model_conversion_mapping(model, add_legacy=False))


def compare(name: str, folder: Path) -> list[str]:
    model = tiny_model(find_family(name))
    model.save_pretrained(folder)
    wrong = different_slices(model, ModelFiles(CheckpointFiles(folder), model))
    expected, found = stored_tensors(folder), converted_back(model)
    wrong += sorted({*expected} ^ {*found})
    for key in expected.keys() & found.keys():
        if expected[key].dtype != found[key].dtype or not torch.equal(expected[key], found[key]):
            wrong.append(f"saved {key}")
    return wrong


@pytest.mark.parametrize("name", IN_SHORT)
def test_a_familys_checkpoint_is_read_by_slices_and_written_back(name: str, tmp_path: Path) -> None:
    assert is_converted(name)
    assert compare(name, tmp_path) == []


def test_experts_that_are_stored_transposed(tmp_path: Path) -> None:
    """As in the published files of Qwen3-VL-MoE; what transformers writes itself is not."""
    model = tiny_model(find_family("qwen3_vl_moe"))
    model.save_pretrained(tmp_path)
    tensors = stored_tensors(tmp_path)
    turned = [name for name in tensors if name.endswith("experts.down_proj")]  # gate_up_proj is square here
    assert turned
    tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in turned}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())
    assert different_slices(model, ModelFiles(CheckpointFiles(tmp_path), model)) == []


def test_files_with_the_names_of_the_model_are_read_too(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in stored_tensors(tmp_path)
    assert different_slices(model, ModelFiles(CheckpointFiles(tmp_path), model)) == []


@pytest.mark.nightly
def test_every_family_that_transformers_converts(tmp_path: Path) -> None:
    converted = [f.name for f in families() if is_converted(f.name)]
    assert set(IN_SHORT) < set(converted)
    wrong = {name: compare(name, tmp_path / name) for name in converted if name not in IN_SHORT}
    assert {name: found for name, found in wrong.items() if found} == {}


# -- on ranks ------------------------------------------------------------------------------------------------------------


def load_and_save(folder: Path, run: Path, live: Path) -> list[str]:
    """Parameters that are not bit-equal to the stock model's, on this rank; it also saves a checkpoint, and the running model."""
    whole = dict(build("qwen3_moe").named_parameters())
    with torch.device("meta"):
        model = type(build("qwen3_moe"))(build("qwen3_moe").config)
    read: list[int] = []
    read_into = CheckpointFiles.read_into

    def counted(files: CheckpointFiles, name: str, out: Tensor, index: tuple[slice, ...]) -> None:
        read.append(out.numel())
        read_into(files, name, out, index)

    with patch.object(CheckpointFiles, "read_into", counted):
        report = ff.parallelize(model, Grid.create((1, 2, 1, 1)), weights="fsdp2", checkpoint=folder)
    local = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[operator]
    # Each number of this rank's shards once, and no expert tensor at once.
    assert sum(read) == local, (sum(read), local)
    wrong = [
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter.to_local(), part(whole, report, report.grid, name))  # type: ignore[operator]
    ]
    optimizer = ff.sharded_optimizer(torch.optim.AdamW)(model.parameters())
    with Checkpoints(run) as checkpoints:
        checkpoints.save(TrainState(model, optimizer, report))
    write_model(model, report, live)
    return wrong


def test_a_mixture_of_experts_goes_in_and_out_bit_by_bit(pool: RankPool, tmp_path: Path) -> None:
    saved, run, exported, live = (tmp_path / name for name in ("saved", "run", "exported", "live"))
    model = build("qwen3_moe")
    model.save_pretrained(saved)
    assert pool.run(load_and_save, 2, saved, run, live) == [[], []]
    export(run, exported)
    expected = stored_tensors(saved)
    assert "model.layers.0.mlp.experts.1.up_proj.weight" in expected
    for folder in (exported, live):
        found = stored_tensors(folder)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        again, loading = type(model).from_pretrained(folder, output_loading_info=True)
        assert not any(loading.values())
        state = model.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
    assert (exported / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()


# -- what is refused -------------------------------------------------------------------------------------------------------


class Doubled(ConversionOps):
    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
        return {target_patterns[0]: next(iter(input_dict.values()))[0] * 2}

    @property
    def reverse_op(self) -> ConversionOps:
        return Doubled()


@pytest.fixture
def doubled() -> Iterator[None]:
    before = conversion_mapping.get_checkpoint_conversion_mapping("llama")
    rule = WeightConverter("mlp.gate_proj.weight", "mlp.gate_proj.weight", [Doubled()])
    conversion_mapping.register_checkpoint_conversion_mapping("llama", [rule], overwrite=True)
    yield
    conversion_mapping.register_checkpoint_conversion_mapping("llama", before, overwrite=True)  # type: ignore[arg-type]


@pytest.mark.usefixtures("doubled")
def test_a_rule_that_is_not_understood_is_refused_by_name(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path, save_original_format=False)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate_proj\.weight .* rule Doubled, .*mul"):
        ModelFiles(CheckpointFiles(tmp_path), model)
    with pytest.raises(ValueError, match="converts its weights by mul"):
        in_hub_format(model, {n: lazy(n, p.detach()) for n, p in model.named_parameters()})


def load_alone(folder: Path) -> None:
    ff.parallelize(build("qwen3_moe"), Grid.create((1, 1, 1, 1)), checkpoint=folder)


def test_a_missing_expert_is_refused_with_both_shapes(pool: RankPool, tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    tensors = stored_tensors(tmp_path)
    del tensors["model.layers.0.mlp.experts.1.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        RankError, match=r"down_proj has shape \(3, 32, 16\) in .*, but \(4, 32, 16\) in the model"
    ):
        pool.run(load_alone, 1, tmp_path)


def test_a_class_that_transformers_does_not_have_keeps_its_names() -> None:
    assert stock_model_of({"architectures": ["OwnModel"], "model_type": "own"}) is None
    assert stock_model_of({}) is None
