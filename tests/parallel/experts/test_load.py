"""Counts of the tokens of experts, and the correction bias that follows from them: those of one process, to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fourfold as ff
from benchmarks.ranks import RankPool
from benchmarks.tiny_models import find_family, tiny_batch, tiny_model
from fourfold import Grid
from fourfold.errors import UnsupportedError
from fourfold.mesh.collectives import Collectives
from fourfold.parallel.experts.load import CorrectionBias, ExpertLoad

Shape = tuple[int, int, int, int]
RATE, STEPS, ROWS = 0.05, 3, 8
Found = tuple[
    list[list[list[int]]], list[Tensor]
]  # counts of each step by layer and expert; biases at the end


def of_one_process(name: str) -> Found:
    """The stock model, whose experts' own arguments are counted by hand."""
    model = tiny_model(find_family(name))
    batch, choices = tiny_batch(model, ROWS), dict[str, Tensor]()

    def note(where: str) -> Any:
        return lambda module, args: choices.__setitem__(where, args[1])

    for where, module in model.named_modules():
        if where.endswith(".experts"):
            module.register_forward_pre_hook(note(where))
    named = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    biases = [bias for key, bias in named.items() if key.endswith(("correction_bias", "expert_bias"))]
    steps = []
    for _ in range(STEPS):
        model(**batch)
        counts = [[int((given == e).sum()) for e in range(biases[0].numel())] for given in choices.values()]
        for bias, own in zip(biases, counts, strict=True):
            mean = sum(own) / len(own)
            change = [RATE * ((mean > count) - (mean < count)) for count in own]
            bias.data += torch.tensor(change).view(bias.shape)
        steps.append(counts)
    return steps, [bias.detach().flatten() for bias in biases]


def on_grid(
    name: str,
    shape: Shape,
    activations: Any,
    options: dict[str, Any] | None = None,
    fault: Callable[[pytest.MonkeyPatch], None] | None = None,
) -> Found:
    model, grid = tiny_model(find_family(name)), Grid.create(shape)
    batch = tiny_batch(model, ROWS)
    report = ff.parallelize(model, grid, activations=activations, **options or {})
    load = ExpertLoad(model, report)
    bias = CorrectionBias(model, report, load)
    steps, own = [], grid.local_rows(ROWS)
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault(patch)
        for _ in range(STEPS):
            with load.counting():
                loss = model(**{key: given[own] for key, given in batch.items()}).loss
            loss.backward()  # with recomputation it runs the forward again
            counts = load.take()
            bias.update(counts, RATE)
            steps.append([row[:size].tolist() for row, size in zip(counts, load.experts, strict=True)])
    return steps, [whole(model, key) for key in bias.names]


def whole(model: nn.Module, name: str) -> Tensor:
    tensor = getattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]).detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).flatten().clone()


def check(pool: RankPool, name: str, shape: Shape, activations: str = "auto", **given: Any) -> None:
    counts, biases = of_one_process(name)
    assert any(bias.unique().numel() > 1 for bias in biases)
    ranks = shape[0] * shape[1] * shape[2] * shape[3]
    for found, own in pool.run(on_grid, ranks, name, shape, activations, **given):
        assert found == counts
        assert all(torch.equal(a, b) for a, b in zip(own, biases, strict=True))


# A buffer of the router; a buffer of the module around it; a frozen parameter, which is sharded over z.
@pytest.mark.parametrize("name", ["deepseek_v3", "minimax_m2", "ernie4_5_moe"])
@pytest.mark.parametrize(
    ("shape", "activations"), [((1, 2, 1, 1), "replicated"), ((1, 1, 1, 2), "sequence-parallel")]
)
def test_counts_and_bias_are_those_of_one_process(
    pool: RankPool, name: str, shape: Shape, activations: str
) -> None:
    check(pool, name, shape, activations)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 1, 1, 1), {"weights": "fsdp2", "activation_checkpointing": "full"}),
        ((1, 1, 2, 1), {"weights": "streamed", "activation_checkpointing": "selective"}),
        # A choice counts where its token is from.
        ((1, 2, 1, 2), {"experts": ("z", "x"), "activation_checkpointing": "full"}),
        pytest.param((1, 2, 1, 2), {"experts": ("x",), "weights": "fsdp2"}, marks=pytest.mark.nightly),
        pytest.param((1, 2, 1, 2), {"experts": ("z",), "weights": "fsdp2"}, marks=pytest.mark.nightly),
    ],
)
def test_recomputed_blocks_and_owned_experts_count_once(
    pool: RankPool, shape: Shape, options: dict[str, Any]
) -> None:
    check(pool, "deepseek_v3", shape, options=options)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "afmoe", "hy_v3", "ernie4_5_moe", "laguna"])
@pytest.mark.parametrize("shape", [(2, 2, 1, 1), (1, 2, 1, 2), (1, 2, 2, 1)])
def test_other_families_and_grids(pool: RankPool, name: str, shape: Shape) -> None:
    check(pool, name, shape)


def counts_are_local(patch: pytest.MonkeyPatch) -> None:
    before = Collectives.all_reduce

    def all_reduce(
        self: Collectives, tensor: Tensor, axis: Any, purpose: Any, *others: Any, **more: Any
    ) -> Any:
        own = tensor.clone() if purpose == "balance" else None
        pending = before(self, tensor, axis, purpose, *others, **more)
        if own is not None:
            pending.wait()
            tensor.copy_(own)
        return pending

    patch.setattr(Collectives, "all_reduce", all_reduce)


@pytest.mark.parametrize("shape", [(1, 2, 1, 1), (1, 1, 1, 2)])
def test_a_bias_by_local_counts_is_found(pool: RankPool, shape: Shape) -> None:
    _, biases = of_one_process("deepseek_v3")
    found = pool.run(on_grid, 2, "deepseek_v3", shape, "auto", fault=counts_are_local)
    assert any(not torch.equal(a, b) for _, own in found for a, b in zip(own, biases, strict=True))


def refused() -> dict[str, str]:
    found, grid = {}, Grid.create((1, 1, 1, 1))
    for name in ("llama", "qwen3_moe"):
        model = tiny_model(find_family(name))
        report = ff.parallelize(model, grid)
        with pytest.raises(UnsupportedError) as error:
            CorrectionBias(model, report, ExpertLoad(model, report))
        found[name] = str(error.value)
    return found


def test_models_without_experts_or_without_a_bias_are_refused(pool: RankPool) -> None:
    (found,) = pool.run(refused, 1)
    assert "has no experts whose tokens could be counted" in found["llama"]
    assert "layers.0.mlp.experts of Qwen3MoeForCausalLM has no correction bias" in found["qwen3_moe"]
