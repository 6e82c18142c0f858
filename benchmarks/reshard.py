"""Does a checkpoint of any grid load on any other, bit by bit, and does training go on as it would have?

On each of 12 grids (1 to 8 ranks, odd ones among them; FSDP2 and streamed weights in turn) a small model with a packed
projection and a vocabulary that divides over nothing trains three AdamW steps, is saved, and goes on for two. Each of
the 12 checkpoints is loaded on each of the 12 grids, into a model of NaNs and a new optimizer. Compared with the saver:
every weight and every number of the optimizer's state, put together by the layout of the Hugging Face tensors, not by
the checkpoint's; and the losses of the two steps. So for a model with two experts, on grids of z and data.

    python -m benchmarks.reshard
    python -m benchmarks.reshard --small
    python -m benchmarks.reshard --small --break momentum   # plants a fault: has to fail
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.checkpoint import Checkpoints, TrainState
from fourfold.parallel.experts.choice import Experts

Shape = tuple[int, int, int, int]
Weights = Literal["fsdp2", "streamed"]
# A piece of a tensor: its name, the tensor's shape, where the piece lies in it, and its numbers.
Piece = tuple[str, tuple[int, ...], tuple[slice, ...], Tensor]

GRIDS: tuple[Shape, ...] = (
    (1, 1, 1, 1),
    (2, 1, 1, 1),
    (1, 3, 1, 1),
    (1, 1, 3, 1),
    (1, 1, 1, 3),
    (1, 2, 1, 2),
    (2, 1, 2, 1),
    (1, 5, 1, 1),
    (1, 2, 1, 3),
    (3, 1, 2, 1),
    (1, 2, 2, 2),
    (2, 2, 1, 2),
)
SMALL: tuple[Shape, ...] = ((1, 1, 1, 1), (1, 3, 1, 1), (1, 2, 1, 2), (2, 1, 2, 1))
EXPERT_GRIDS: tuple[Shape, ...] = ((1, 1, 1, 1), (1, 2, 1, 1), (1, 4, 1, 1), (2, 4, 1, 1))
# Where ranks own the experts of a model of four; on other grids they are gathered.
OWNED: dict[Shape, Experts] = {(1, 2, 1, 1): ("z",), (1, 1, 1, 2): ("x",), (1, 2, 1, 2): ("z", "x")}
MODELS = ("gpt2", "qwen3_moe")
FAULTS = ("momentum", "weight", "schedule")
SEQUENCES = 120  # divides over every data * z of these grids
LENGTH = 6
VOCABULARY = 131
SAVED_AT, STEPS = 3, 5
SAME_GRID_BAR, OTHER_GRID_BAR = 1e-6, 1e-5


@dataclass(frozen=True)
class Outcome:
    """Of one rank: what it held at the step of the checkpoint, and the losses after it."""

    pieces: list[Piece]
    losses: list[float]


def weights_of(shape: Shape) -> Weights:
    return "streamed" if (*GRIDS, *EXPERT_GRIDS, *OWNED).index(shape) % 2 else "fsdp2"


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind in ("qwen3_moe", "owned"):
        experts = {"num_experts": 4 if kind == "owned" else 2, "num_experts_per_tok": 1}
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, head_dim=8,
                vocab_size=VOCABULARY, pad_token_id=None, moe_intermediate_size=24, **experts,
            )
        ).train()  # fmt: skip
    config = GPT2Config(
        n_embd=48, n_head=6, n_layer=2, n_inner=96, n_positions=LENGTH, vocab_size=VOCABULARY, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def start(shape: Shape, kind: str = "gpt2") -> TrainState:
    model = build(kind)
    experts = OWNED.get(shape, "auto") if kind == "owned" else "auto"
    report = ff.parallelize(
        model, Grid.create(shape, timeout_s=60), weights=weights_of(shape), experts=experts
    )
    return renewed(TrainState(model, torch.optim.SGD([torch.zeros(1)]), report))


def renewed(training: TrainState) -> TrainState:
    """The same model with a new optimizer and schedule."""
    optimizer = ff.sharded_optimizer(torch.optim.AdamW)(training.model.parameters(), lr=1e-2, eps=1e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    return TrainState(training.model, optimizer, training.report, schedule)


def train(training: TrainState, until: int) -> list[float]:
    grid, losses = training.report.grid, []
    rows = grid.local_rows(SEQUENCES)
    while training.step < until:
        generator = torch.Generator().manual_seed(training.step)
        ids = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=generator)[rows]
        loss = training.model(input_ids=ids, labels=ids).loss
        loss.backward()
        ff.clip_grad_norm_(training.model.parameters(), 1.0, grid)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.schedule.step()
        training.step += 1
        training.data["sequences"] = training.step * SEQUENCES
        losses.append(loss.item())
    return losses


def held(training: TrainState) -> list[Piece]:
    """What this rank holds of the weights and of the optimizer's state, as pieces of Hugging Face tensors."""
    pieces: list[Piece] = []
    names = {id(p): n for n, p in training.model.named_parameters()}
    for parameter, shard in training.optimizer._pairs:  # type: ignore[attr-defined]
        layout = training.report.layouts[names[id(parameter)]]
        held = {layout.hf_name: _local(parameter)}
        for kind, value in training.optimizer.state[shard].items():
            held[f"{layout.hf_name}: {kind}"] = value.clone()
        for name, value in held.items():
            if not value.ndim:
                pieces.append((name, (), (), value))
                continue
            for part, index in layout.boxes(layout.shard(training.report.grid)):
                pieces.append((name, layout.hf_shape, index, value[part]))
    return pieces


def _local(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.detach().to_local().clone()


def save_on(shape: Shape, folder: str, kind: str) -> Outcome:
    training = start(shape, kind)
    train(training, SAVED_AT)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(training)
    pieces = held(training)
    return Outcome(pieces, train(training, STEPS))


def load_on(shape: Shape, folders: list[str], fault: str | None, kind: str) -> list[Outcome]:
    training = start(shape, kind)
    outcomes = []
    for folder in folders:
        with torch.no_grad():
            for parameter in training.model.parameters():
                assert isinstance(parameter, DTensor)
                parameter.to_local().fill_(torch.nan)
        training = renewed(training)
        with Checkpoints(folder) as checkpoints:
            assert checkpoints.load(training) == SAVED_AT
        assert training.data == {"sequences": SAVED_AT * SEQUENCES}
        plant(fault, training)
        pieces = held(training)
        outcomes.append(Outcome(pieces, train(training, STEPS)))
    return outcomes


def plant(fault: str | None, training: TrainState) -> None:
    shard = next(s for _, s in training.optimizer._pairs if s.numel())  # type: ignore[attr-defined]
    if fault == "momentum":
        training.optimizer.state[shard]["exp_avg"].zero_()
    elif fault == "weight":  # one unit in the last place of one number
        flat = shard.detach().view(-1).view(torch.int32)
        flat[0] += 1
    elif fault == "schedule":
        for group in training.optimizer.param_groups:
            group["lr"] *= 2


def whole(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """The tensors that all ranks hold together; replicas have to agree, and nothing may be missing."""
    tensors: dict[str, Tensor] = {}
    for name, shape, index, numbers in pieces:
        tensor = tensors.setdefault(name, torch.full(shape, torch.nan, dtype=numbers.dtype))
        before = tensor[index]
        if not bool(torch.all(before.isnan() | (before == numbers))):
            raise ValueError(f"{name}: replicas differ at {index}")
        tensor[index] = numbers
    return tensors


@dataclass(frozen=True)
class Verdict:
    """Of one load: what is not bit-equal, and how far the worst loss is off, relative."""

    different: list[str]
    loss_error: float
    bar: float

    def holds(self) -> bool:
        return not self.different and self.loss_error <= self.bar


def judge(saved: list[Outcome], loaded: list[Outcome], *, same_grid: bool) -> Verdict:
    expected, found = (whole(p for outcome in side for p in outcome.pieces) for side in (saved, loaded))
    # NaN is equal to nothing: what nobody holds is different, too.
    different = [n for n in sorted({*expected, *found}) if not _equal(expected.get(n), found.get(n))]
    error = max(
        abs(a - b) / abs(a)
        for outcome in loaded
        for a, b in zip(saved[0].losses, outcome.losses, strict=True)
    )
    bar = SAME_GRID_BAR if same_grid else OTHER_GRID_BAR
    return Verdict(different, error if error == error else float("inf"), bar)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


def ranks_of(shape: Shape) -> int:
    return shape[0] * shape[1] * shape[2] * shape[3]


def reshard(
    pool: RankPool, grids: tuple[Shape, ...], folder: Path, fault: str | None = None, kind: str = "gpt2"
) -> dict[tuple[Shape, Shape], Verdict]:
    """A verdict for each pair of the grid that saved and the grid that loaded."""
    folders = {shape: str(folder / "-".join(map(str, shape))) for shape in grids}
    saved = {shape: pool.run(save_on, ranks_of(shape), shape, folders[shape], kind) for shape in grids}
    verdicts = {}
    for shape in grids:
        by_rank: list[Any] = pool.run(
            load_on, ranks_of(shape), shape, list(folders.values()), fault, kind, timeout_s=300
        )
        for i, source in enumerate(grids):
            loaded = [outcomes[i] for outcomes in by_rank]
            verdicts[source, shape] = judge(saved[source], loaded, same_grid=source == shape)
    return verdicts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help=f"{len(SMALL)} grids instead of {len(GRIDS)}")
    parser.add_argument(
        "--break", dest="fault", choices=FAULTS, help="plant a fault: the command has to fail"
    )
    options = parser.parse_args(arguments)
    grids = {
        "gpt2": SMALL if options.small else GRIDS,
        "qwen3_moe": EXPERT_GRIDS[:3] if options.small else EXPERT_GRIDS,
    }
    start_s = time.perf_counter()
    verdicts = {}
    with RankPool(8) as pool, tempfile.TemporaryDirectory() as folder:
        for kind in MODELS:
            found = reshard(pool, grids[kind], Path(folder) / kind, options.fault, kind)
            verdicts |= {(kind, *pair): verdict for pair, verdict in found.items()}
    print(f"{'model':9} {'saved on':16} {'loaded on':16} {'bit-equal':>9} {'loss':>9}")
    for (kind, source, target), verdict in verdicts.items():
        equal = "yes" if not verdict.different else "NO"
        said = "" if verdict.holds() else f"  FAILED {', '.join(verdict.different[:3])}"
        print(f"{kind:9} {source!s:16} {target!s:16} {equal:>9} {verdict.loss_error:9.1e}{said}")
    held_up = sum(v.holds() for v in verdicts.values())
    same = max(v.loss_error for (_, a, b), v in verdicts.items() if a == b)
    other = max((v.loss_error for (_, a, b), v in verdicts.items() if a != b), default=0.0)
    print(
        f"reshard: {held_up}/{len(verdicts)} loads bit-equal and within the bars; worst loss {same:.1e} on the same grid "
        f"(threshold {SAME_GRID_BAR:g}), {other:.1e} across (threshold {OTHER_GRID_BAR:g}), {time.perf_counter() - start_s:.0f} s"
    )
    return 0 if held_up == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
