"""Sharded optimizers take a closure, as Lightning passes one."""

import torch

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from tests.models import batch, build, local_parameters


def steps(by_closure: bool) -> list[torch.Tensor]:
    model = build("llama")
    ff.parallelize(model, Grid.create((1, 2, 1, 1)))
    optimizer = ff.sharded_optimizer(torch.optim.AdamW)(model.parameters(), lr=1e-2)
    ids, labels = batch(2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(input_ids=ids, labels=labels).loss
        loss.backward()
        return loss.detach()

    losses = []
    for _ in range(2):
        if by_closure:
            with torch.no_grad():
                losses.append(optimizer.step(closure))
        else:
            losses.append(closure())
            optimizer.step()
    return [*losses, *(tensor.clone() for tensor in local_parameters(model).values())]


def test_a_closure_is_called_before_the_step(pool: RankPool) -> None:
    for by_closure, by_hand in zip(pool.run(steps, 2, True), pool.run(steps, 2, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(by_closure, by_hand, strict=True))
