"""Models built on meta: random init does not depend on the grid, loaded weights are those of the checkpoint."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.config.schema import EngineSection, ModelSection
from fourfold.train.loop.model import build_model
from tests.models import VOCABULARY, batch, build, construct, local_parameters, part

Shape = tuple[int, int, int, int]
Piece = tuple[str, tuple[slice, ...], Tensor]


def on_meta(kind: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return construct(kind, **changes)


# -- random init --------------------------------------------------------------------------------------------------------------


def initialized_shards(shape: Shape, kind: str, seed: int) -> list[Piece]:
    """This rank's shards, each with the Hugging Face tensor and the index that it comes from."""
    model, grid = on_meta(kind), Grid.create(shape)
    report = ff.parallelize(model, grid, seed=seed)
    ids, labels = batch(8)
    rows = grid.local_rows(len(ids))
    loss = model(input_ids=ids[rows], labels=labels[rows]).loss
    loss.backward()
    assert abs(loss.item() - math.log(VOCABULARY)) < 0.5  # small random weights predict uniformly
    pieces = []
    for name, local in local_parameters(model).items():
        layout = report.layouts[name]
        boxes = layout.boxes(layout.shard(grid))
        pieces += [(layout.hf_name, index, local[part].clone()) for part, index in boxes]
    return pieces


def assemble(pieces: list[Piece], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    full = {name: torch.full(shape, math.nan) for name, shape in shapes.items()}
    for name, index, local in pieces:
        there = full[name][index]
        assert torch.equal(torch.where(there.isnan(), local, there), local), f"replicas of {name} differ"
        there.copy_(local)
    for name, tensor in full.items():
        assert not tensor.isnan().any(), f"{name} is not complete"
    return full


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "gpt2",
        "qwen3_moe",
        *(pytest.param(k, marks=pytest.mark.nightly) for k in ("gemma2", "qwen3_5")),
    ],
)
def test_random_init_does_not_depend_on_the_grid(pool: RankPool, kind: str) -> None:
    shapes = {name: tuple(p.shape) for name, p in on_meta(kind).named_parameters()}

    def initialize(shape: Shape, seed: int = 5) -> dict[str, Tensor]:
        ranks = pool.run(initialized_shards, math.prod(shape), shape, kind, seed)
        return assemble([piece for pieces in ranks for piece in pieces], shapes)

    alone = initialize((1, 1, 1, 1))
    for shape in ((1, 2, 2, 2), (2, 1, 1, 4)):
        for name, tensor in initialize(shape).items():
            assert torch.equal(tensor, alone[name]), f"{name} differs on {shape}"
    for name, tensor in initialize((1, 1, 1, 1), seed=6).items():
        constant = bool((alone[name] == alone[name].flatten()[0]).all())  # norms and biases
        assert constant == torch.equal(tensor, alone[name]), name

    # The model's own constructor draws other values from the same distributions.
    torch.manual_seed(0)
    for name, tensor in construct(kind).named_parameters():
        tolerance = 4 * tensor.std().item() / math.sqrt(tensor.numel())
        assert abs(alone[name].mean() - tensor.mean()) <= 2 * tolerance, name
        assert abs(alone[name].std() - tensor.std()) <= 2 * tolerance, name


# -- loaded -------------------------------------------------------------------------------------------------------------


def loaded_loss(shape: Shape, kind: str, changes: dict[str, Any], folder: Path) -> float:
    model, grid = on_meta(kind, **changes), Grid.create(shape)
    ff.parallelize(model, grid, checkpoint=folder)
    ids, labels = batch(4)
    rows = grid.local_rows(len(ids))
    loss = model(input_ids=ids[rows], labels=labels[rows]).loss
    loss.backward()
    return loss.item()


CHECKPOINTS = [
    pytest.param("llama", {}, marks=pytest.mark.nightly),
    ("gpt2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3_5", {}),
]


@pytest.mark.parametrize(("kind", "changes"), CHECKPOINTS)
def test_a_loaded_model_has_the_loss_of_the_stock_one(
    pool: RankPool, tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    stock = build(kind, **changes)
    ids, labels = batch(4)
    expected = stock(input_ids=ids, labels=labels).loss.item()
    stock.save_pretrained(tmp_path / "one file")
    stock.save_pretrained(tmp_path / "several files", max_shard_size="20KB")
    assert len(list((tmp_path / "several files").glob("*.safetensors"))) > 1
    folders = [tmp_path / "one file", tmp_path / "several files"]
    if kind == "gpt2":  # as OpenAI's own checkpoint: that of the base model
        stock.transformer.save_pretrained(tmp_path / "bare")
        assert "wte.weight" in load_file(tmp_path / "bare" / "model.safetensors")
        folders.append(tmp_path / "bare")
    for folder in folders:
        for shape in ((1, 1, 2, 2), (2, 2, 1, 1), (1, 2, 1, 2)):
            for loss in pool.run(loaded_loss, 4, shape, kind, changes, folder):
                assert loss == pytest.approx(expected, rel=1e-6)


def loaded_values(shape: Shape, folder: Path, expected: dict[str, Tensor]) -> tuple[int, list[str]]:
    """The number of shards on this rank, and the names of those with wrong values."""
    section, grid = ModelSection(pretrained=folder), Grid.create(shape)
    model, report = build_model(section, EngineSection().without_auto(), grid, seed=0, length=16)
    found = local_parameters(model)
    return len(found), [n for n, t in found.items() if not torch.equal(t, part(expected, report, grid, n))]


def activations_for(shape: Shape, folder: Path, length: int) -> str:
    section, grid = ModelSection(pretrained=folder), Grid.create(shape)
    return build_model(section, EngineSection().without_auto(), grid, seed=0, length=length)[1].activations


def test_activations_are_replicated_if_tokens_do_not_divide(pool: RankPool, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    for length, expected in ((16, "sequence-parallel"), (15, "replicated")):
        assert set(pool.run(activations_for, 2, (1, 1, 1, 2), tmp_path, length)) == {expected}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_master_weights_are_the_stored_values_in_fp32(
    pool: RankPool, tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    """As published models are: bfloat16 in several files, with a config.json that says so."""
    stock = build(kind).to(dtype)
    stock.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert AutoConfig.from_pretrained(tmp_path).dtype == dtype
    expected = {name: tensor.detach().float() for name, tensor in stock.named_parameters()}
    for count, wrong in pool.run(loaded_values, 4, (1, 2, 1, 2), tmp_path, expected):
        assert count >= len(expected)
        assert wrong == []


def keep_and_load(shape: Shape, folder: Path) -> tuple[float, float]:
    """A model with real weights keeps them; a checkpoint replaces them."""
    grid = Grid.create(shape)
    ids, labels = batch(4)
    rows = grid.local_rows(len(ids))
    found = []
    for checkpoint in (None, folder):
        model = build("llama")
        ff.parallelize(model, grid, checkpoint=checkpoint)
        found.append(model(input_ids=ids[rows], labels=labels[rows]).loss.item())
    return found[0], found[1]


def test_real_weights_are_kept_unless_a_checkpoint_is_given(pool: RankPool, tmp_path: Path) -> None:
    other = build("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    other.save_pretrained(tmp_path)
    ids, labels = batch(4)
    expected = [model(input_ids=ids, labels=labels).loss.item() for model in (build("llama"), other)]
    for losses in pool.run(keep_and_load, 4, (1, 2, 1, 2), tmp_path):
        assert losses == pytest.approx(expected, rel=1e-5)


def message_of_loading(folder: Path) -> str:
    with pytest.raises(ValueError, match="model") as caught:
        ff.parallelize(on_meta("llama"), Grid.create((1, 1, 1, 2)), checkpoint=folder)
    return str(caught.value)


def test_errors_name_the_tensor_of_a_wrong_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in build("llama").state_dict().items()}
    name = "model.layers.1.mlp.up_proj.weight"

    missing = {key: tensor for key, tensor in tensors.items() if key != name}
    save_file(missing, tmp_path / "model.safetensors")
    for message in pool.run(message_of_loading, 2, tmp_path):
        assert name in message

    save_file(tensors | {name: tensors[name][:48].clone()}, tmp_path / "model.safetensors")
    for message in pool.run(message_of_loading, 2, tmp_path):
        assert name in message
        assert "(48, 32)" in message
        assert "(64, 32)" in message


# -- state dict ---------------------------------------------------------------------------------------------------------


def state(shape: Shape, kind: str) -> dict[str, tuple[tuple[int, ...], tuple[str, ...], bool]]:
    model, grid = build(kind), Grid.create(shape)
    expected = build(kind).state_dict()
    ff.parallelize(model, grid)
    found = {}
    for name, tensor in model.state_dict().items():
        assert isinstance(tensor, DTensor), name
        same = torch.equal(tensor.full_tensor(), expected[name])
        found[name] = (tuple(tensor.shape), tensor.device_mesh.mesh_dim_names, same)
    return found


@pytest.mark.parametrize(("kind", "shape"), [("llama", (1, 1, 2, 2)), ("qwen3", (1, 2, 1, 2))])
def test_state_dict_has_the_names_and_shapes_of_hugging_face(pool: RankPool, kind: str, shape: Shape) -> None:
    expected = {
        name: (tuple(tensor.shape), ("data", "z", "y", "x"), True)
        for name, tensor in build(kind).state_dict().items()
    }
    assert expected["lm_head.weight"][0] == (VOCABULARY, 32)
    for found in pool.run(state, 4, shape, kind):
        assert found == expected
