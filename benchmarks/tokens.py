"""Is nothing kept, computed or sent twice, where activations are cut by their tokens over both tensor axes?

On eight ranks of one host, (1, 1, 2, 4) and (1, 1, 4, 2), against the same grid with replicated activations:

    saved    numbers that a block keeps for backward (saved-tensor hooks, each storage once), equal to the formulas below
    FLOPs    of a rank's step (FlopCounterMode), equal to the formulas below
    sent     bytes of activations by axis, equal to those of replicated activations; what is gathered again apart
    step     the median time of forward and backward, below that of replicated activations; measured in turns. With
             smaller blocks (--hidden, --length) less is saved, and there are as many calls

    python -m benchmarks.tokens
    python -m benchmarks.tokens --only step --rounds 21

`formulas` has what `docs/decisions/0018-token-sharding.md` says. Gloo on CPU; no GPU has run this.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import fourfold as ff
from benchmarks.measure import ROUNDS, Times, batch, build, interleaved, llama, ratio, stepper
from benchmarks.ranks import RankPool
from fourfold import Grid

Shape = tuple[int, int, int, int]
GRIDS: tuple[Shape, ...] = ((1, 1, 2, 4), (1, 1, 4, 2))
RANKS = 8
# What is counted is small; what is timed has a block that is worth cutting.
SEQUENCES, LENGTH, HIDDEN, INNER, HEADS, VOCABULARY = 2, 16, 64, 96, 8, 128


@dataclass(frozen=True)
class Share:
    """Of a rank: numbers that a block keeps with inputs kept and with inputs gathered again, FLOPs of a step."""

    saved: int
    saved_again: int
    flops: int


def formulas(y: int, x: int) -> Share:
    """A Llama of one block with as many key/value as query heads and eager attention."""
    tokens, h, f = SEQUENCES * LENGTH, HIDDEN, INNER
    # Two norms: their input, and that normalised. q, k, v and probabilities. Gate, silu(gate) and up.
    saved = tokens * (4 * h + 3 * h + LENGTH * HEADS + 3 * f) // (x * y)
    saved += 2 * tokens // x  # the norms' statistics, on each y rank
    # The inputs of q, k, v, of gate and up, of o and of down: whole over one axis, or cut over both.
    kept = tokens * (2 * h // y + (h + f) // x)
    again = tokens * (2 * h + h + f) // (x * y)
    matmuls = 6 * tokens * (4 * h * h + 3 * h * f + h * VOCABULARY) // (x * y)
    attention = 12 * tokens * LENGTH * h // (x * y)
    return Share(saved + kept, saved + again, matmuls + attention)


def count(shape: Shape, activations: str, keep_inputs: bool = True) -> tuple[int, int]:
    """What a block keeps for backward, and the FLOPs of a step, on this rank."""
    grid = Grid.create(shape)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS}
    config = LlamaConfig(**sizes, num_key_value_heads=HEADS, num_hidden_layers=1, vocab_size=VOCABULARY)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config)
    overlap = ff.Overlap(keep_inputs=keep_inputs, interleave=False)
    ff.parallelize(model, grid, activations=activations, overlap=overlap)  # type: ignore[arg-type]
    kept: dict[int, Tensor] = {}
    elsewhere = {p.to_local().untyped_storage().data_ptr() for p in model.parameters()}  # type: ignore[operator]

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    block: nn.Module = model.model.layers[0]
    inner = block.forward

    def forward(*args: Any, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Any:
        elsewhere.update(table.untyped_storage().data_ptr() for table in position_embeddings)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return inner(*args, position_embeddings=position_embeddings, **kwargs)

    block.forward = forward  # type: ignore[method-assign]
    ids = torch.arange(SEQUENCES * LENGTH).reshape(SEQUENCES, LENGTH)
    with FlopCounterMode(display=False) as flops:
        model(input_ids=ids, labels=ids).loss.backward()
    numbers = sum(t.untyped_storage().nbytes() // 4 for p, t in kept.items() if p not in elsewhere)
    return numbers, flops.get_total_flops()


def sent(shape: Shape, activations: str, keep_inputs: bool) -> dict[str, Fraction]:
    """Bytes that this rank sends in a step, of activations and of what it gathers again, as a ring sends them."""
    grid = Grid.create(shape)
    config = llama(hidden=64, layers=2)
    overlap = ff.Overlap(keep_inputs=keep_inputs)
    step = stepper(build(config, grid, activations=activations, overlap=overlap), batch(config, 4, 32))
    step()
    with grid.collectives.counting() as entries:
        step()
    found: dict[str, Fraction] = {}
    for e in entries:
        if e.purpose in ("activation", "regather", "shared"):
            passes = 2 if e.kind == "all_reduce" else 1
            key = f"{e.axis} {e.purpose}"
            found[key] = found.get(key, Fraction()) + Fraction(
                passes * (e.ranks - 1) * e.payload_bytes, e.ranks
            )
    return found


def time_steps(shape: Shape, rounds: int, sizes: dict[str, int]) -> dict[str, tuple[float, ...]]:
    grid = Grid.create(shape, timeout_s=600)
    config = llama(hidden=sizes["hidden"], layers=sizes["layers"])
    ids = batch(config, sizes["sequences"], sizes["length"])
    ways = {
        "replicated": build(config, grid, activations="replicated"),
        "sequence-parallel": build(config, grid, activations="sequence-parallel"),
        "gathered again": build(
            config, grid, activations="sequence-parallel", overlap=ff.Overlap(keep_inputs=False)
        ),
    }
    steps = {name: stepper(model, ids) for name, model in ways.items()}
    for step in steps.values():
        for _ in range(2):
            step()
    dist.barrier()
    return {name: times.seconds for name, times in interleaved(steps, rounds).items()}


def check_counts(pool: RankPool, shape: Shape) -> list[str]:
    """Prints what was counted; what does not equal the formulas."""
    _, _, y, x = shape
    right = formulas(y, x)
    # Its FLOPs would not compare: PyTorch does not count sums of products that are made in place.
    replicated, _ = pool.run(count, RANKS, shape, "replicated")[0]
    wrong = []
    for keep_inputs, saved in ((True, right.saved), (False, right.saved_again)):
        found = set(pool.run(count, RANKS, shape, "sequence-parallel", keep_inputs))
        name = f"{shape} inputs {'kept' if keep_inputs else 'gathered again'}"
        print(
            f"{name}: a block keeps {sorted({s for s, _ in found})} numbers, by the formula {saved} (replicated {replicated}); "
            f"a step {sorted({f for _, f in found})} FLOPs, by the formula {right.flops}",
            flush=True,
        )
        if found != {(saved, right.flops)}:
            wrong.append(f"{name}: saved or FLOPs")
    return wrong


def check_sent(pool: RankPool, shape: Shape) -> list[str]:
    replicated, kept, again = (
        pool.run(sent, RANKS, shape, *way)[0]
        for way in (("replicated", True), ("sequence-parallel", True), ("sequence-parallel", False))
    )
    for name, found in (("replicated", replicated), ("inputs kept", kept), ("gathered again", again)):
        print(
            f"{shape} {name}: sends {', '.join(f'{k} {float(v):,.0f} B' for k, v in found.items())}",
            flush=True,
        )
    apart = {k: v for k, v in again.items() if not k.endswith("regather")}
    return [] if kept == replicated == apart and len(apart) < len(again) else [f"{shape}: sent"]


def check_steps(pool: RankPool, shape: Shape, rounds: int, sizes: dict[str, int]) -> list[str]:
    seconds = pool.run(time_steps, RANKS, shape, rounds, sizes, timeout_s=1800)[0]
    times = {name: Times(tuple(values)) for name, values in seconds.items()}
    reached = ratio(times["sequence-parallel"], times["replicated"])
    again = ratio(times["gathered again"], times["replicated"])
    print(
        f"{shape} step: replicated {times['replicated']}, sequence-parallel {times['sequence-parallel']}: {reached:.3f} (threshold: below 1); "
        f"with inputs gathered again {times['gathered again']}: {again:.3f}",
        flush=True,
    )
    return [] if reached < 1 else [f"{shape}: step {reached:.3f}"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("counts", "sent", "step"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=2, help="the batch")
    parser.add_argument("--length", type=int, default=1024)
    options = parser.parse_args(arguments)
    sizes = {name: getattr(options, name) for name in ("hidden", "layers", "sequences", "length")}
    wrong: list[str] = []
    with RankPool(RANKS, quiet=True) as pool:
        for shape in GRIDS:
            if options.only in (None, "counts"):
                wrong += check_counts(pool, shape)
            if options.only in (None, "sent"):
                wrong += check_sent(pool, shape)
            if options.only in (None, "step"):
                wrong += check_steps(pool, shape, options.rounds, sizes)
    print(f"tokens: {'holds' if not wrong else '; '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
