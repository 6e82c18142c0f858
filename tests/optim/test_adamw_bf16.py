"""AdamW with moments in bf16: that of torch, whose moments are rounded after each step; the same on every grid and after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.checkpoint import Checkpoints, TrainState
from fourfold.config.schema import OptimizerSection
from fourfold.optim import adamw_bf16
from fourfold.optim.adamw_bf16 import AdamWBf16
from fourfold.train.loop.optimizers import build_optimizer, update
from tests.models import batch, build, local_parameters, part

Shape = tuple[int, int, int, int]
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def rounded(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for kind in ("exp_avg", "exp_avg_sq"):
            state[kind].copy_(state[kind].bfloat16())


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("size", [5, 2**24])
def test_it_is_adamw_with_rounded_moments(monkeypatch, fused, size):
    monkeypatch.setattr(adamw_bf16, "PART", size)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((4, 3), (7,), (2, 2), (6, 4))]
    start[3] = start[3].t()  # not contiguous
    ours, stock = ([torch.nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2))
    optimizer, reference = (
        AdamWBf16(ours, **OPTIONS, fused=fused),
        torch.optim.AdamW(stock, **OPTIONS, fused=fused),
    )
    for step in range(5):
        for mine, theirs in zip(ours, stock, strict=True):
            gradient = torch.randn(mine.shape, generator=generator)
            # One is without a gradient in the first step.
            mine.grad, theirs.grad = (
                None if step == 0 and mine.ndim == 1 else gradient.clone() for _ in range(2)
            )
        optimizer.step()
        reference.step()
        rounded(reference)
        for mine, theirs in zip(ours, stock, strict=True):
            assert torch.equal(mine, theirs), step
            for kind, value in reference.state[theirs].items():
                assert torch.equal(optimizer.state[mine][kind].float(), value), kind
    assert {state["exp_avg_sq"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


def test_a_flag_skips_a_step():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamWBf16([weight], **OPTIONS, fused=True)
    for flag in (False, True, False):
        weight.grad = torch.ones(3)
        before = weight.detach().clone(), {k: v.clone() for k, v in optimizer.state[weight].items()}
        update(optimizer, [torch.tensor(flag)])
        assert torch.equal(weight, before[0]) == flag
        if flag:
            assert all(torch.equal(value, before[1][kind]) for kind, value in optimizer.state[weight].items())
    assert optimizer.state[weight]["step"] == 2


def test_a_second_moment_that_would_not_move_is_rejected():
    with pytest.raises(ValueError, match=r"beta2=0.999 .* use at most 0.99"):
        AdamWBf16([torch.nn.Parameter(torch.ones(3))], betas=(0.9, 0.999))
    with pytest.raises(ValueError, match=r"beta2=0.999 .* use at most 0.99"):
        OptimizerSection(name="adamw-bf16", betas=(0.9, 0.999))
    with pytest.raises(ValueError, match="amsgrad=True is not supported"):
        AdamWBf16([torch.nn.Parameter(torch.ones(3))], **OPTIONS, amsgrad=True)


# -- on grids, and after a resume ------------------------------------------------------------------------------------


def training_on(shape: Shape, name: str = "adamw-bf16", weights: Any = "auto") -> TrainState:
    model = build("llama")
    report = ff.parallelize(model, Grid.create(shape), weights=weights)
    section = OptimizerSection(name=name, lr=1e-2, eps=1e-3)
    return TrainState(model, build_optimizer(model, section, report), report)


def advance(training: TrainState) -> None:
    ids, labels = batch(8, seed=training.step)
    rows = training.report.grid.local_rows(len(ids))
    training.model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.step += 1


def stock_weights(steps: int) -> dict[str, Tensor]:
    model = build("llama")
    decaying, others = (
        [p for p in model.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False)
    )
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-3)
    for step in range(steps):
        ids, labels = batch(8, seed=step)
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rounded(optimizer)
    return {name: p.detach() for name, p in model.named_parameters()}


def furthest_from_stock(shape: Shape, weights: str) -> float:
    training = training_on(shape, weights=weights)
    for _ in range(3):
        advance(training)
    expected = stock_weights(3)
    errors = []
    for name, shard in local_parameters(training.model).items():
        whole = part(expected, training.report, training.report.grid, name)
        errors.append(float((shard - whole).abs().max() / whole.abs().max()))
    return max(errors)


@pytest.mark.parametrize(("shape", "weights"), [((1, 2, 1, 2), "fsdp2"), ((2, 1, 2, 1), "streamed")])
def test_grids_have_the_weights_of_one_process(pool: RankPool, shape: Shape, weights: str) -> None:
    # A gradient that differs in its last bit may round a moment to the other side: 2^-8 of it, in some elements.
    assert max(pool.run(furthest_from_stock, 4, shape, weights)) < 2e-3


def save(folder: str, shape: Shape) -> dict[str, Tensor]:
    """The weights of this rank, a step after the save."""
    training = training_on(shape)
    advance(training)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(training)
    advance(training)
    return {name: p.clone() for name, p in local_parameters(training.model).items()}


def load(folder: str, shape: Shape, name: str) -> tuple[set[torch.dtype], dict[str, Tensor]]:
    training = training_on(shape, name)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.load(training) == 1
    states = training.optimizer.state.values()
    dtypes = {state[kind].dtype for state in states for kind in ("exp_avg", "exp_avg_sq")}
    advance(training)
    return dtypes, {name: p.clone() for name, p in local_parameters(training.model).items()}


def test_a_run_resumes_with_the_same_bits(pool: RankPool, tmp_path: Path) -> None:
    saved = pool.run(save, 2, str(tmp_path), (1, 2, 1, 1))
    loaded = pool.run(load, 2, str(tmp_path), (1, 2, 1, 1), "adamw-bf16")
    for before, (dtypes, after) in zip(saved, loaded, strict=True):
        assert dtypes == {torch.bfloat16}
        assert all(torch.equal(before[name], after[name]) for name in before)
    said = "exp_avg is torch.bfloat16 in the checkpoint, but torch.float32 here"
    with pytest.raises(Exception, match=said):
        pool.run(load, 2, str(tmp_path), (1, 2, 1, 1), "adamw")
