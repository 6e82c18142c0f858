"""LoRA on a grid: losses, gradients and steps are those of adapters in one process, and their first values do not depend on the grid."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid, Lora, UnsupportedError
from fourfold.export.live import _whole, write_model
from fourfold.export.live import write_adapter as write_adapter_of
from fourfold.parallel.lora import PEFT_PREFIX, WEIGHTS, is_adapter
from fourfold.weights.nf4 import dequantize
from tests.models import assert_shards_close, batch, build, construct

Shape = tuple[int, int, int, int]
LORA = Lora(rank=6, alpha=9)


class Adapted(nn.Module):
    """A linear with an adapter, as it is defined."""

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)

    def forward(self, input: Tensor) -> Tensor:
        return self.base(input) + LORA.scale * (input @ self.a.t()) @ self.b.t()


def linears(model: nn.Module, lora: Lora = LORA) -> dict[str, tuple[int, int]]:
    """(out, in) of each linear that has an adapter."""
    head = model.get_output_embeddings()
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head and lora.is_target(name):
            shape = tuple(module.weight.shape)
            found[name] = shape[::-1] if isinstance(module, Conv1D) else shape
    return found


def values(model: nn.Module, lora: Lora = LORA) -> dict[str, Tensor]:
    """Random adapters, with a B that is not 0, by the names of the model."""
    drawn = torch.Generator().manual_seed(3)
    found = {}
    for name, (out, inner) in linears(model, lora).items():
        found[f"{name}.lora_A.weight"] = torch.randn(lora.rank, inner, generator=drawn) / math.sqrt(inner)
        found[f"{name}.lora_B.weight"] = torch.randn(out, lora.rank, generator=drawn) / 10
    return found


def write_adapter(folder: Path, kind: str) -> Path:
    folder.mkdir(exist_ok=True)
    named = {PEFT_PREFIX + name: value for name, value in values(build(kind)).items()}
    save_file(named, folder / WEIGHTS)
    return folder


def adapt(model: nn.Module) -> dict[str, nn.Parameter]:
    """Freeze the model and give it adapters; returns them by name."""
    model.requires_grad_(False)
    adapters = values(model)
    placed: dict[str, nn.Parameter] = {}
    for name in linears(model):
        parent, _, key = name.rpartition(".")
        adapted = Adapted(
            model.get_submodule(name), adapters[f"{name}.lora_A.weight"], adapters[f"{name}.lora_B.weight"]
        )
        setattr(model.get_submodule(parent), key, adapted)
        placed |= {f"{name}.lora_A.weight": adapted.a, f"{name}.lora_B.weight": adapted.b}
    return placed


def frozen_as_is(kind: str) -> nn.Module:
    return build(kind)


@functools.cache
def in_one_process(
    kind: str, frozen: Callable[[str], nn.Module] = frozen_as_is
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """(losses of three steps, gradients of the first, adapters at the end) of the model ``frozen`` with adapters."""
    model = frozen(kind)
    placed = adapt(model)
    optimizer = torch.optim.AdamW(placed.values(), lr=1e-2, eps=1e-4)
    ids, labels = batch(4)
    losses, first = [], {}
    for _ in range(3):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in placed.items()}
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, first, {name: p.detach() for name, p in placed.items()}


def local(model: nn.Module, report: ff.Report, kind: str) -> dict[str, Tensor]:
    """This rank's shards of adapters, or of their gradients."""
    found = {}
    for name, parameter in model.named_parameters():
        if not is_adapter(report.layouts[name].hf_name):
            assert not parameter.requires_grad
            assert parameter.grad is None
            continue
        tensor = parameter.grad if kind == "gradients" else parameter.detach()
        assert tensor is not None, name
        found[name] = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone()
    return found


def on_grid(
    kind: str,
    shape: Shape,
    folder: Path,
    micro_batches: int = 1,
    *,
    frozen: Callable[[str], nn.Module] = frozen_as_is,
    quantization: Any = "none",
    **options: Any,
) -> None:
    wanted, gradients, adapters = in_one_process(kind, frozen)
    model, grid = build(kind), Grid.create(shape)
    before = {name: p.detach().clone() for name, p in frozen(kind).named_parameters()}
    lora = Lora(LORA.rank, LORA.alpha, quantization=quantization, adapter=folder)
    report = ff.parallelize(model, grid, lora=lora, **options)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = ff.sharded_optimizer(torch.optim.AdamW)(trained, lr=1e-2, eps=1e-4)
    every, labels = batch(4)
    rows = grid.local_rows(4)
    ids, labels = every[rows], labels[rows]
    layouts = {name: at for name, at in report.layouts.items() if is_adapter(at.hf_name)}
    of_adapters = ff.Report(report.model, grid, (), (), layouts)
    for step in range(3):
        count = ff.count_labels(labels, grid, shift=True)
        total = 0.0
        parts = list(zip(ids.chunk(micro_batches), labels.chunk(micro_batches), strict=True))
        for number, (some, said) in enumerate(parts):
            with ff.no_sync(model) if number < len(parts) - 1 else torch.enable_grad():
                loss = model(input_ids=some, labels=said, num_items_in_batch=count).loss
                loss.backward()
                total += loss.item()
        assert total == pytest.approx(wanted[step], rel=1e-5)
        if step == 0:
            assert_shards_close(local(model, report, "gradients"), gradients, of_adapters, grid)
        optimizer.step()
        optimizer.zero_grad()
    assert_shards_close(local(model, report, "values"), adapters, of_adapters, grid)
    for name, layout in report.layouts.items():
        if name not in layouts:  # the weights are frozen
            parameter: Any = dict(model.named_parameters())[name]
            shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if shard.dtype == torch.uint8:
                shard = dequantize(shard, torch.float32)
            whole = before[layout.hf_name]
            if shape != (1, 1, 1, 1):
                whole = layout.of(whole, layout.shard(grid))
            assert torch.equal(shard, whole)


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        ("llama", (1, 1, 1, 1), {}),
        ("llama", (1, 2, 1, 1), {"weights": "fsdp2"}),
        ("llama", (1, 1, 2, 2), {"weights": "streamed", "micro_batches": 2}),
        ("llama", (1, 2, 2, 2), {"weights": "fsdp2", "activation_checkpointing": "selective"}),
        (
            "llama",
            (1, 1, 1, 4),
            {"weights": "streamed", "activation_checkpointing": "full"},
        ),  # 2 heads of keys
        ("llama", (2, 1, 2, 1), {"weights": "fsdp2", "activations": "replicated"}),
        ("llama of 6 heads", (1, 1, 2, 2), {"weights": "streamed"}),  # attention of a row on each y rank
        ("gpt2", (1, 1, 2, 2), {"weights": "fsdp2"}),
        ("qwen3", (1, 2, 1, 2), {"weights": "streamed", "overlap": ff.Overlap(interleave=True)}),
        ("gemma2", (1, 1, 4, 1), {"weights": "streamed"}),
        pytest.param("qwen3_5", (1, 2, 1, 2), {"weights": "fsdp2"}, marks=pytest.mark.nightly),
        pytest.param("qwen3_5", (1, 1, 2, 2), {"weights": "streamed"}, marks=pytest.mark.nightly),
        pytest.param("balanced qwen3_moe", (1, 2, 1, 1), {"weights": "fsdp2"}, marks=pytest.mark.nightly),
        pytest.param(
            "balanced qwen3_moe",
            (1, 2, 1, 2),
            {"weights": "streamed", "activation_checkpointing": "full"},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_steps_equal_those_of_one_process(
    pool: RankPool, tmp_path: Path, kind: str, shape: Shape, options: dict[str, Any]
) -> None:
    pool.run(on_grid, math.prod(shape), kind, shape, write_adapter(tmp_path / "adapter", kind), **options)


@pytest.mark.nightly
def test_steps_of_compiled_blocks_equal_those_of_one_process(pool: RankPool, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", "llama")
    pool.run(on_grid, 4, "llama", (1, 1, 2, 2), folder, weights="fsdp2", compile=True)


def test_a_rank_may_have_no_row_of_an_adapter(pool: RankPool, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", "llama")
    for weights in ("fsdp2", "streamed"):
        pool.run(on_grid, 4, "llama", (1, 4, 1, 1), folder, weights=weights)


# -- first values, and PEFT -------------------------------------------------------------------------------------------


def first_values(shape: Shape, kind: str, precision: Any, weights: Any) -> dict[str, Tensor]:
    """All tensors of a model with new adapters, whole."""
    grid = Grid.create(shape)
    with torch.device("meta"):
        model = construct(kind)
    report = ff.parallelize(
        model,
        grid,
        lora=Lora(rank=4, targets=("q_proj", "c_attn", "down_proj")),
        precision=precision,
        weights=weights,
        seed=5,
    )
    for name, parameter in model.named_parameters():
        is_trained = is_adapter(report.layouts[name].hf_name)
        assert parameter.requires_grad == is_trained
        assert parameter.dtype == (torch.float32 if is_trained or precision == "fp32" else torch.bfloat16)
    return dict(_whole(model, report, lambda _: True))


@pytest.mark.parametrize(("kind", "precision"), [("llama", "fp32"), ("gpt2", "bf16")])
def test_first_values_are_bit_equal_on_every_grid(pool: RankPool, kind: str, precision: str) -> None:
    wanted = pool.run(first_values, 1, (1, 1, 1, 1), kind, precision, "fsdp2")[0]
    assert any(is_adapter(name) for name in wanted)
    for shape, weights in (((1, 2, 1, 2), "fsdp2"), ((1, 1, 2, 2), "streamed"), ((2, 2, 1, 1), "fsdp2")):
        for found in pool.run(first_values, 4, shape, kind, precision, weights):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for name, value in wanted.items():
        if name.endswith("lora_A.weight"):
            bound = 1 / math.sqrt(value.shape[1])
            assert 0.8 * bound < value.abs().max() <= bound
        elif name.endswith("lora_B.weight"):
            assert not value.any()


def written(shape: Shape, kind: str, adapter: Path, folder: Path, precision: Any = "fp32") -> Tensor:
    """Write the adapters and the merged model; returns logits."""
    model, grid = build(kind), Grid.create(shape)
    report = ff.parallelize(
        model, grid, lora=Lora(LORA.rank, LORA.alpha, adapter=adapter), precision=precision
    )
    write_adapter_of(model, report, folder / "adapter")
    write_model(model, report, folder / "merged")
    ids, _ = batch(4)
    with torch.no_grad():
        own = model(input_ids=ids[grid.local_rows(4)]).logits
    return ff.full_logits(own, grid, batch=(len(ids[grid.local_rows(4)]), ids.shape[1]))


@pytest.mark.parametrize(
    ("kind", "shape"), [("llama", (1, 2, 1, 2)), ("gpt2", (1, 1, 2, 2)), ("llama", (1, 1, 1, 1))]
)
def test_adapters_are_written_as_they_were_read_and_merged(
    pool: RankPool, tmp_path: Path, kind: str, shape: Shape
) -> None:
    adapter = write_adapter(tmp_path / "given", kind)
    logits = pool.run(written, math.prod(shape), shape, kind, adapter, tmp_path)
    before, after = load_file(adapter / WEIGHTS), load_file(tmp_path / "adapter" / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    merged = type(build(kind)).from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        alone = merged(input_ids=batch(4)[0]).logits
    assert not torch.allclose(alone, build(kind)(input_ids=batch(4)[0]).logits, rtol=0, atol=1e-3)
    rows = len(alone) // len(logits[0])
    for rank, found in enumerate(logits):
        place = rank * rows // len(logits)
        torch.testing.assert_close(found, alone.chunk(rows)[place], rtol=0, atol=1e-5)


def test_stock_peft_reads_what_is_written_and_the_other_way(pool: RankPool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules="all-linear", task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(build("llama"), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.1)
    theirs.save_pretrained(tmp_path / "given")
    with torch.no_grad():
        wanted = theirs(input_ids=batch(4)[0]).logits
    assert Lora.from_peft(tmp_path / "given").alpha == LORA.alpha
    for found in pool.run(written, 2, (1, 1, 1, 2), "llama", tmp_path / "given", tmp_path):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    again = peft.PeftModel.from_pretrained(build("llama"), tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=batch(4)[0]).logits, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "kind LOHA"),
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"of_a_later_release": {"a": 1}}, "of_a_later_release"),
    ],
)
def test_other_kinds_of_adapters_are_refused(config: dict[str, Any], message: str) -> None:
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    assert Lora.of_config(given) == Lora(4, 8, ("q_proj",))
    with pytest.raises(UnsupportedError, match=message):
        Lora.of_config(given | config)


def refused(folder: Path) -> None:
    grid = Grid.create((1, 1, 1, 1))
    with pytest.raises(UnsupportedError, match="float8"):
        ff.parallelize(build("llama"), grid, lora=LORA, float8="rowwise_with_gw_hp")
    with pytest.raises(ValueError, match=r"no linear of LlamaForCausalLM .*'query'"):
        ff.parallelize(build("llama"), grid, lora=Lora(targets=("query",)))
    with pytest.raises(ValueError, match=r"shape \(6, 32\) in the adapter, but \(7, 32\) in the model"):
        ff.parallelize(build("llama"), grid, lora=Lora(rank=7, adapter=folder))
    with pytest.raises(ValueError, match=r"tensors that the model has no adapter for"):
        ff.parallelize(build("llama"), grid, lora=Lora(rank=6, targets=("q_proj",), adapter=folder))
    with pytest.raises(ValueError, match=r"is not among the 28 tensors"):
        ff.parallelize(build("gpt2"), grid, lora=Lora(rank=6, adapter=folder))


def test_what_does_not_fit_is_an_error(pool: RankPool, tmp_path: Path) -> None:
    pool.run(refused, 1, write_adapter(tmp_path / "adapter", "llama"))
