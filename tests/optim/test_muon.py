"""Muon on grids against `torch.optim.Muon` and AdamW on the stock model in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fourfold as ff
from benchmarks.ranks import RankPool
from benchmarks.tiny_models import find_family, tiny_model
from fourfold import Grid, Report
from fourfold.checkpoint import Checkpoints, TrainState
from fourfold.config.schema import OptimizerSection
from fourfold.optim.muon import ShardedMuon, split_matrices
from fourfold.train.loop.optimizers import build_optimizer
from tests.models import batch, build, local_parameters, part

Shape = tuple[int, int, int, int]
# An epsilon that the gradients exceed: a smaller one makes whole updates of the rounding noise about zero.
SECTION = OptimizerSection(name="muon", lr=1e-2, eps=1e-3, momentum=0.9, weight_decay=0.3)
RATES = (1e-2, 3e-2, 2e-2)  # as a schedule sets them from outside
# 18 rows on each of two ranks, which over z=4 are 5, 5, 5 and 3.
UNEVEN = {"llama": {"intermediate_size": 36}, "gpt2": {"n_inner": 36}, "qwen2": {}, "qwen3_moe": {}}


class Stock:
    """The model in one process; the matrices for Muon are listed here by name."""

    def __init__(self, kind: str, **muon: Any) -> None:
        self.model = build(kind, **UNEVEN[kind])
        named = dict(self.model.named_parameters())
        inside = {n for n, p in named.items() if p.ndim == 2 and (".layers." in n or ".h." in n)}
        rest = [p for n, p in named.items() if n not in inside]
        s = SECTION
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                [named[n] for n in named if n in inside],
                lr=s.lr,
                weight_decay=s.weight_decay,
                momentum=s.momentum,
                **{"adjust_lr_fn": "match_rms_adamw"} | muon,
            ),
            torch.optim.AdamW(
                [
                    {"params": [p for p in rest if p.ndim > 1], "weight_decay": s.weight_decay},
                    {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
                ],
                lr=s.lr,
                betas=s.betas,
                eps=s.eps,
            ),
        ]

    def step(self, rate: float) -> None:
        for optimizer in self.optimizers:
            step(optimizer, rate)

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def step(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()


def start(shape: Shape, kind: str, weights: Any = "auto") -> tuple[nn.Module, Report, torch.optim.Optimizer]:
    model = build(kind, **UNEVEN[kind])
    report = ff.parallelize(model, Grid.create(shape), weights=weights)
    return model, report, build_optimizer(model, SECTION, report)


# -- the same numbers --------------------------------------------------------------------------------------------------


def plant_gradients(stock: Stock, model: nn.Module, report: Report, seed: int) -> None:
    """The same random numbers here and there, so that no rounding of forward and backward is between them."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in stock.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    whole = {name: p.grad for name, p in stock.model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        local = part(whole, report, report.grid, name).contiguous()  # type: ignore[arg-type]
        parameter.grad = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def step_with_the_same_gradients(shape: Shape, kind: str, weights: str) -> list[tuple[str, str, int]]:
    stock = Stock(kind)
    model, report, optimizer = start(shape, kind, weights)
    for seed, rate in enumerate(RATES):
        plant_gradients(stock, model, report, seed)
        with report.grid.collectives.counting() as entries:
            step(optimizer, rate)
        stock.step(rate)
        expected = stock.weights()
        for name, shard in local_parameters(model).items():
            assert torch.equal(shard, part(expected, report, report.grid, name)), f"{name}, step {seed}"
    return [(e.axis, e.kind, e.calls) for e in entries if e.purpose == "optimizer"]


GRIDS: list[Any] = [
    ((1, 2, 2, 2), "llama", "streamed"),
    pytest.param((1, 2, 2, 2), "gpt2", "fsdp2", marks=pytest.mark.nightly),
    ((2, 1, 1, 4), "llama", "fsdp2"),  # x=4 and 2 key/value heads, which are replicated
    pytest.param((1, 4, 1, 2), "gpt2", "streamed", marks=pytest.mark.nightly),
    pytest.param((2, 1, 2, 2), "qwen2", "streamed", marks=pytest.mark.nightly),
    ((1, 1, 1, 1), "gpt2", "streamed"),
    ((1, 2, 1, 2), "qwen3_moe", "streamed"),  # Muon for attention and routers, AdamW for experts
]


def step_in_the_other_ways(shape: Shape) -> None:
    other: dict[str, Any] = {"nesterov": False, "adjust_lr_fn": "original"}
    stock, model = Stock("llama", **other), build("llama", **UNEVEN["llama"])
    report = ff.parallelize(model, Grid.create(shape))
    matrices, _ = split_matrices(model)
    group = {"params": matrices, "muon": True, "weight_decay": SECTION.weight_decay}
    optimizer = ShardedMuon([group], model, report, momentum=SECTION.momentum, **other)
    plant_gradients(stock, model, report, seed=0)
    step(optimizer, RATES[0])
    stock.step(RATES[0])
    expected = stock.weights()
    for name, shard in local_parameters(model).items():
        if ".layers." in name and shard.ndim == 2:
            assert torch.equal(shard, part(expected, report, report.grid, name)), name


def test_the_other_options_of_muon_match_torch(pool: RankPool) -> None:
    pool.run(step_in_the_other_ways, 8, (1, 2, 2, 2))


@pytest.mark.parametrize(("shape", "kind", "weights"), GRIDS)
def test_the_same_gradients_give_the_same_weights_bit_for_bit(
    pool: RankPool, shape: Shape, kind: str, weights: str
) -> None:
    ranks = shape[0] * shape[1] * shape[2] * shape[3]
    for entries in pool.run(step_with_the_same_gradients, ranks, shape, kind, weights):
        assert {axis for axis, _, _ in entries} == {a for a, n in zip("zyx", shape[1:], strict=True) if n > 1}
        assert {of for _, of, _ in entries} <= {"all_to_all"}


def rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def train(shape: Shape, kind: str, weights: str) -> None:
    """Newton-Schulz in bf16 makes much of little: a gradient's last bit may round another way, and small singular values
    grow. What that amounts to is seen in one process, with gradients that are off by what sums in another order are.
    """
    stock, shaken = Stock(kind), Stock(kind)
    model, report, optimizer = start(shape, kind, weights)
    before = stock.weights()
    generator = torch.Generator().manual_seed(0)
    for seed, rate in enumerate(RATES):
        ids, labels = batch(8, seed=seed)
        rows = report.grid.local_rows(len(ids))
        for one in (stock, shaken):
            one.model(input_ids=ids, labels=labels).loss.backward()
        for parameter in shaken.model.parameters():
            assert parameter.grad is not None
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad += noise * parameter.grad.abs().max() * 1e-7
        model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
        stock.step(rate)
        shaken.step(rate)
        step(optimizer, rate)
    added = {name: p - before[name] for name, p in stock.weights().items()}
    allowed = 2 * max(
        rms(p - before[name] - added[name]) / rms(added[name]) for name, p in shaken.weights().items()
    )
    assert allowed < 0.1  # Newton-Schulz of something else is off by about 1
    for name, shard in local_parameters(model).items():
        difference = shard - part(before, report, report.grid, name) - part(added, report, report.grid, name)
        assert rms(difference) < allowed * rms(added[report.layouts[name].hf_name]), name


@pytest.mark.parametrize(
    ("shape", "kind", "weights"),
    [
        pytest.param((2, 1, 2, 2), "llama", "fsdp2", marks=pytest.mark.nightly),
        ((1, 2, 2, 2), "gpt2", "streamed"),
    ],
)
def test_training_matches_one_process(pool: RankPool, shape: Shape, kind: str, weights: str) -> None:
    pool.run(train, 8, shape, kind, weights)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def whole_momenta(training: TrainState) -> dict[str, Tensor]:
    """By Hugging Face names: this rank's shard of each tensor at its offset, NaN elsewhere."""
    names = {parameter: name for name, parameter in training.model.named_parameters()}
    found: dict[str, Tensor] = {}
    for parameter, shard in training.optimizer._pairs:  # type: ignore[attr-defined]
        if "momentum_buffer" in (state := training.optimizer.state[shard]):
            layout = training.report.layouts[names[parameter]]
            whole = found.setdefault(layout.hf_name, torch.full(layout.hf_shape, torch.nan))
            layout.of(whole, layout.shard(training.report.grid)).copy_(state["momentum_buffer"])
    return found


def training_on(shape: Shape, kind: str, weights: Any = "auto") -> TrainState:
    model, report, optimizer = start(shape, kind, weights)
    return TrainState(model, optimizer, report)


def advance(training: TrainState) -> None:
    ids, labels = batch(8, seed=training.step)
    rows = training.report.grid.local_rows(len(ids))
    training.model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
    step(training.optimizer, RATES[training.step])
    training.step += 1


def save(folder: str, shape: Shape, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The saved momenta, and the weights of this rank one step later."""
    training = training_on(shape, kind)
    advance(training)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(training)
    momenta = {name: momentum.clone() for name, momentum in whole_momenta(training).items()}
    advance(training)
    return momenta, {name: p.clone() for name, p in local_parameters(training.model).items()}


def load(folder: str, shape: Shape, kind: str, weights: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    training = training_on(shape, kind, weights)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.load(training) == 1
    momenta = whole_momenta(training)
    assert training.optimizer.param_groups[0]["momentum"] == SECTION.momentum
    advance(training)
    return momenta, {name: p.clone() for name, p in local_parameters(training.model).items()}


def together(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The full tensor from the shards of all ranks, which have to agree where they overlap."""
    whole = {name: tensor.clone() for name, tensor in ranks[0].items()}
    for other in ranks[1:]:
        for name, tensor in other.items():
            both = ~(tensor.isnan() | whole[name].isnan())
            assert torch.equal(tensor[both], whole[name][both]), name
            whole[name] = torch.where(whole[name].isnan(), tensor, whole[name])
    return whole


@pytest.mark.nightly
def test_momentum_is_restored_on_another_grid(pool: RankPool, tmp_path: Path) -> None:
    saved = pool.run(save, 8, str(tmp_path), (2, 1, 2, 2), "gpt2")
    expected = together([momenta for momenta, _ in saved])
    assert len(expected) == 2 * 4  # c_attn, c_proj, c_fc, c_proj of two blocks
    loads: list[tuple[Shape, str]] = [((1, 4, 1, 2), "fsdp2"), ((2, 1, 2, 2), "streamed")]
    for shape, weights in loads:
        loaded = pool.run(load, 8, str(tmp_path), shape, "gpt2", weights)
        found = together([momenta for momenta, _ in loaded])
        assert set(found) == set(expected)
        for name, momentum in expected.items():
            assert momentum.isfinite().all()
            assert torch.equal(found[name], momentum), name
    # On the grid that it was saved on, the run goes on as if there had been no break.
    for (_, uninterrupted), (_, resumed) in zip(saved, loaded, strict=True):
        for name, shard in uninterrupted.items():
            assert torch.equal(resumed[name], shard), name


# -- what is refused ---------------------------------------------------------------------------------------------------


def give_experts_to_muon() -> None:
    model = tiny_model(find_family("gpt_oss"))
    report = ff.parallelize(model, Grid.create((1, 1, 1, 1)))
    matrices, others = ({id(p) for p in parameters} for parameters in split_matrices(model))
    experts = {name: p for name, p in model.named_parameters() if ".experts." in name}
    assert len(experts) >= 4  # weights and biases
    assert not matrices & {id(p) for p in experts.values()}
    assert others >= {id(p) for p in experts.values()}
    name = next(name for name in experts if name.endswith("down_proj"))
    with pytest.raises(ValueError, match=r"experts\.down_proj has shape \(\d+, \d+, \d+\).*AdamW"):
        ShardedMuon([{"params": [experts[name]], "muon": True}], model, report)


def test_experts_are_not_for_muon(pool: RankPool) -> None:
    pool.run(give_experts_to_muon, 1)


def refuse() -> None:
    model = build("gpt2")
    report = ff.parallelize(model, Grid.create((1, 1, 1, 2)))
    matrices, _ = split_matrices(model)
    name = next(n for n in report.layouts if n.endswith("c_attn.weight_1"))
    without = [p for p in matrices if p is not model.get_parameter(name)]
    with pytest.raises(ValueError, match=r"h\.0\.attn\.c_attn\.weight is 3072 numbers.* 2048 of them"):
        ShardedMuon([{"params": without, "muon": True}], model, report, lr=1e-2)
    with pytest.raises(ValueError, match=r"ln_f\.weight has shape \(32,\).*AdamW"):
        ShardedMuon(
            [{"params": [model.get_parameter("transformer.ln_f.weight")], "muon": True}], model, report
        )
    with pytest.raises(ValueError, match=r"'rms' is not known"):
        ShardedMuon([{"params": matrices, "muon": True}], model, report, adjust_lr_fn="rms")


def test_inexact_requests_are_rejected(pool: RankPool) -> None:
    pool.run(refuse, 2)
    with pytest.raises(ValueError, match=r"matrices of a model's blocks, but Linear has none.*AdamW"):
        split_matrices(nn.Linear(2, 3))
