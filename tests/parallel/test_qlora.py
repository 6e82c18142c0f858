"""QLoRA on a grid: steps are those of adapters in one process on the dequantised weights, which are the same bits on every grid."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid, Lora, UnsupportedError
from fourfold.export.live import _whole, write_adapter, write_model
from fourfold.parallel.lora import WEIGHTS
from fourfold.weights.nf4 import dequantize, is_packed
from fourfold.weights.quantization import BYTES_PER_NUMBER
from tests.models import batch, build, construct
from tests.parallel.test_lora import LORA, Shape, local, on_grid
from tests.parallel.test_lora import write_adapter as write_random_adapter
from tests.weights.test_nf4 import rounded

KIND = "wide llama"
QLORA = Lora(LORA.rank, LORA.alpha, quantization="nf4")


def in_blocks(name: str) -> bool:
    return name.endswith("proj.weight")


def rounded_model(kind: str) -> nn.Module:
    """The stock model, with the numbers of NF4 in the linears of its blocks."""
    return round_blocks(build(kind))


@torch.no_grad()
def round_blocks(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if in_blocks(name):
            parameter.copy_(rounded(parameter))
    return model


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 1, 1, 1), {"weights": "fsdp2"}),
        ((1, 2, 1, 1), {"weights": "fsdp2"}),
        pytest.param((1, 1, 2, 2), {"weights": "streamed", "micro_batches": 2}, marks=pytest.mark.nightly),
        ((1, 2, 1, 2), {"weights": "fsdp2", "activation_checkpointing": "full"}),
        pytest.param(
            (1, 2, 2, 1),
            {"weights": "streamed", "activation_checkpointing": "selective"},
            marks=pytest.mark.nightly,
        ),
        ((2, 2, 1, 1), {"weights": "fsdp2", "micro_batches": 1, "accumulation": "sharded"}),
        ((1, 2, 2, 1), {"weights": "fsdp2", "activations": "replicated"}),
        ((1, 2, 1, 2), {"weights": "streamed", "overlap": ff.Overlap(interleave=True)}),
        ((1, 4, 1, 1), {"weights": "streamed", "activation_checkpointing": "full"}),
    ],
)
def test_steps_equal_those_of_one_process(
    pool: RankPool, tmp_path: Path, shape: Shape, options: dict[str, Any]
) -> None:
    folder = write_random_adapter(tmp_path / "adapter", KIND)
    pool.run(
        on_grid, math.prod(shape), KIND, shape, folder, frozen=rounded_model, quantization="nf4", **options
    )


def bits_of_a_step(shape: Shape, folder: Path, quantization: Any, **options: Any) -> dict[str, Tensor]:
    """The loss and this rank's gradients of adapters, on packed weights or on their numbers."""
    model, grid = build(KIND) if quantization == "nf4" else rounded_model(KIND), Grid.create(shape)
    lora = Lora(LORA.rank, LORA.alpha, quantization=quantization, adapter=folder)
    report = ff.parallelize(model, grid, lora=lora, **options)
    ids, labels = (part[grid.local_rows(4)] for part in batch(4))
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return {"loss": loss.detach(), **local(model, report, "gradients")}


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 2, 1, 1), {"weights": "streamed", "precision": "bf16", "activation_checkpointing": "selective"}),
        ((1, 1, 1, 2), {"weights": "fsdp2", "precision": "bf16"}),
    ],
)
def test_packed_weights_compute_the_bits_of_their_numbers(
    pool: RankPool, tmp_path: Path, shape: Shape, options: dict[str, Any]
) -> None:
    folder = write_random_adapter(tmp_path / "adapter", KIND)
    packed, plain = (
        pool.run(bits_of_a_step, 2, shape, folder, quantization, **options)
        for quantization in ("nf4", "none")
    )
    for one, other in zip(packed, plain, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def stored(shape: Shape, weights: Any, precision: Any, checkpoint: Path | None, seed: int) -> dict[str, Any]:
    """The numbers of every weight, and the bytes of this rank's shards."""
    grid = Grid.create(shape)
    with torch.device("meta"):
        model = construct(KIND)
    report = ff.parallelize(
        model, grid, lora=QLORA, weights=weights, precision=precision, checkpoint=checkpoint, seed=seed
    )
    sizes = {}
    for name, parameter in model.named_parameters():
        local: Tensor = parameter.to_local()  # type: ignore[attr-defined]
        assert is_packed(local) == in_blocks(name), name
        assert not is_packed(local) or not parameter.requires_grad
        sizes[name] = local.nbytes
    return {"weights": dict(_whole(model, report, in_blocks)), "bytes": sizes, "report": str(report)}


def test_first_values_are_bit_equal_on_every_grid(pool: RankPool, tmp_path: Path) -> None:
    build(KIND).save_pretrained(tmp_path)
    fresh = pool.run(stored, 1, (1, 1, 1, 1), "streamed", "fp32", None, 5)[0]
    wanted = {
        name: rounded(value)
        for name, value in load_file(tmp_path / "model.safetensors").items()
        if in_blocks(name)
    }
    for shape, weights, precision in (
        ((1, 1, 2, 2), "streamed", "bf16"),
        ((1, 2, 1, 2), "fsdp2", "bf16"),
        ((1, 2, 2, 1), "fsdp2", "fp32"),
        ((2, 2, 1, 1), "streamed", "fp32"),
    ):
        for given, expected in ((tmp_path, wanted), (None, fresh["weights"])):
            for found in pool.run(stored, 4, shape, weights, precision, given, 5):
                assert found["weights"].keys() == expected.keys()
                assert all(torch.equal(found["weights"][name], expected[name]) for name in expected)
                for name, value in expected.items():
                    parts = math.prod(shape[1:])
                    if name.endswith(("k_proj.weight", "v_proj.weight")):
                        assert found["bytes"][name] <= 2 * value.numel() * BYTES_PER_NUMBER / parts
                    else:
                        assert found["bytes"][name] == value.numel() * BYTES_PER_NUMBER / parts
    assert "in NF4" in fresh["report"]


def test_values_on_the_grids_come_from_the_whole_weight() -> None:
    """What the tests above would not see: that both sides round with blocks of the wrong place."""
    weight = build(KIND).get_parameter("model.layers.0.mlp.down_proj.weight").detach()
    shifted = rounded(weight.roll(1, 1)).roll(-1, 1)
    assert not torch.equal(rounded(weight), shifted)


def written(shape: Shape, adapter: Path, folder: Path, precision: Any) -> Tensor:
    model, grid = build(KIND), Grid.create(shape)
    lora = Lora(LORA.rank, LORA.alpha, quantization="nf4", adapter=adapter)
    report = ff.parallelize(model, grid, lora=lora, precision=precision)
    write_adapter(model, report, folder / "adapter")
    write_model(model, report, folder / "merged")
    ids, _ = batch(4)
    with torch.no_grad():
        own = model(input_ids=ids[grid.local_rows(4)]).logits
    return ff.full_logits(own, grid, batch=(len(ids[grid.local_rows(4)]), ids.shape[1]))


def test_a_merged_model_has_the_dequantised_weights(pool: RankPool, tmp_path: Path) -> None:
    adapter = write_random_adapter(tmp_path / "given", KIND)
    logits = pool.run(written, 4, (1, 1, 2, 2), adapter, tmp_path, "fp32")
    before, after = load_file(adapter / WEIGHTS), load_file(tmp_path / "adapter" / WEIGHTS)
    assert all(torch.equal(before[name], after[name]) for name in before)
    merged = type(build(KIND)).from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(logits[0], merged(input_ids=batch(4)[0]).logits, rtol=0, atol=1e-5)


def test_peft_on_the_dequantised_weights_computes_the_same(pool: RankPool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(rounded_model(KIND), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.1)
    theirs.save_pretrained(tmp_path / "given")
    with torch.no_grad():
        wanted = theirs(input_ids=batch(4)[0]).logits
    for found in pool.run(peft_logits, 2, (1, 1, 1, 2), tmp_path / "given"):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def peft_logits(shape: Shape, folder: Path) -> Tensor:
    from dataclasses import replace

    model, grid = build(KIND), Grid.create(shape)
    ff.parallelize(model, grid, lora=replace(Lora.from_peft(folder), quantization="nf4"))
    with torch.no_grad():
        return ff.full_logits(model(input_ids=batch(4)[0]).logits, grid, batch=(4, 12))


def refused(shape: Shape, kind: str, changes: dict[str, Any], options: dict[str, Any]) -> str:
    try:
        ff.parallelize(build(kind, **changes), Grid.create(shape), lora=QLORA, **options)
    except UnsupportedError as error:
        return str(error)
    return ""


def test_what_is_not_whole_blocks_is_refused(pool: RankPool) -> None:
    (found,) = set(pool.run(refused, 4, (1, 1, 1, 4), KIND, {}, {}))
    assert found == (
        "model.layers.0.self_attn.o_proj has 128 input features, on x=4 32 on each rank, which are not whole blocks of 64 for NF4; "
        "use a smaller x, or quantization='none'"
    )
    assert (
        "has 32 input features, which are not whole blocks"
        in pool.run(refused, 1, (1, 1, 1, 1), "llama", {}, {})[0]
    )
    (message,) = pool.run(refused, 1, (1, 1, 1, 1), KIND, {}, {"compile": True})
    assert message.startswith("weights are in NF4")
    assert message.endswith("use compile=False")
    assert "as [in, out]" in pool.run(refused, 1, (1, 1, 1, 1), "gpt2", {}, {})[0]
    with pytest.raises(ValueError, match="quantization 'int8' is not supported"):
        Lora(quantization="int8")  # type: ignore[arg-type]


def faulty(fault: str, folder: Path) -> None:
    """A fault on one rank: a scale of another shard, or blocks that begin one row-part later."""
    import fourfold.weights.load as load

    quantize = load.quantize

    def wrong(values: Tensor) -> Tensor:
        packed = quantize(values)
        if torch.distributed.get_rank() == 1 and fault == "scale":
            blocks = packed.unflatten(1, (-1, 36))
            blocks[..., 32:] = blocks[..., 32:].roll(1, dims=0).clone()
        if fault == "border":
            packed = quantize(values.flatten().roll(1).view_as(values))
        return packed

    load.quantize = wrong  # type: ignore[attr-defined]
    try:
        for name, whole in stored((1, 2, 1, 1), "streamed", "fp32", folder, 5)["weights"].items():
            value = load_file(folder / "model.safetensors")[name]
            assert not torch.equal(whole, rounded(value)), name
    finally:
        load.quantize = quantize  # type: ignore[attr-defined]


@pytest.mark.parametrize("fault", [pytest.param("scale", marks=pytest.mark.nightly), "border"])
def test_a_fault_is_seen(pool: RankPool, tmp_path: Path, fault: str) -> None:
    build(KIND).save_pretrained(tmp_path)
    pool.run(faulty, 2, fault, tmp_path)


def test_numbers_are_unpacked_one_linear_at_a_time(pool: RankPool) -> None:
    most = pool.run(unpacked_at_once, 1)
    assert most == [1]


def unpacked_at_once() -> int:
    """How many dequantised weights are alive when one more is made, at most, in a step."""
    import weakref

    import fourfold.parallel.product.product as product

    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def counted(packed: Tensor, dtype: torch.dtype) -> Tensor:
        nonlocal most
        made = dequantize(packed, dtype)
        alive.add(made)
        most = max(most, len(alive))
        return made

    model = build(KIND)
    ff.parallelize(model, Grid.create((1, 1, 1, 1)), lora=QLORA)
    product.dequantize = counted  # type: ignore[attr-defined]
    try:
        ids, labels = batch(2)
        model(input_ids=ids, labels=labels).loss.backward()
    finally:
        product.dequantize = dequantize  # type: ignore[attr-defined]
    return most
