"""Does each rank send what the algorithm says, and nothing more?

One training step of Llama and GPT-2 on five grids. The bytes sent per axis are compared with the formulas of the 4D
algorithm, computed here from the model's sizes alone, and have to be equal to the byte. Statistics of norms, the
scalars of the loss and gradients of replicated parameters are small and listed apart. Each block makes two forward and
two backward all-reduces of activations on each tensor axis that is larger than one. Weights are kept both ways, by
FSDP2 and streamed, which differ in what they gather twice. Sequence-parallel activations send the same bytes, by a
reduce-scatter and an all-gather for each all-reduce: the formulas of bytes are not changed for them. A step of two micro-batches
sends everything twice but the gradients: over data once, over z once or, if they are added up in shards, twice.

    python -m benchmarks.traffic
    python -m benchmarks.traffic --activations sequence-parallel   # these alone
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from typing import get_args

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.ranks import RankPool
from fourfold.mesh.collectives import Entry
from fourfold.mesh.grid import Grid
from fourfold.parallel.options import Activations
from fourfold.parallel.parallelize import parallelize
from fourfold.weights.api import Accumulation, Weights, no_sync
from fourfold.weights.overlap import Overlap

GRIDS = ((1, 1, 1, 8), (1, 1, 4, 2), (1, 2, 2, 2), (2, 2, 1, 2), (2, 2, 2, 1))
BATCH, SEQUENCE = 8, 16
BYTES = 4  # fp32
H, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY, POSITIONS = 64, 128, 8, 8, 8, 3, 128, 32
APART = ("norm", "loss", "clip", "replica")


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    common = {
        "hidden_size": H,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
    }
    tokens = {"bos_token_id": 0, "eos_token_id": 1}
    if kind == "llama":
        config = LlamaConfig(**common, **tokens, intermediate_size=FFN, num_key_value_heads=KV_HEADS)
        return LlamaForCausalLM(config)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**common, **tokens, n_inner=FFN, n_positions=POSITIONS, **dropout))


@dataclass(frozen=True)
class Linear:
    """O = I W of DESIGN's table: k input and n output features, with the axes that cut them."""

    k: int
    n: int
    in_axis: str
    out_axis: str


def _blocks(kind: str) -> list[list[Linear]]:
    """The groups of linears of one block that share one input; a fused projection is one linear."""
    inner = HEADS * HEAD_DIM
    qkv = inner + 2 * KV_HEADS * HEAD_DIM
    up = 2 * FFN if kind == "llama" else FFN
    return [
        [Linear(H, qkv, "y", "x")],
        [Linear(inner, H, "x", "y")],
        [Linear(H, up, "y", "x")],
        [Linear(FFN, H, "x", "y")],
    ]


def expected(
    kind: str,
    shape: tuple[int, int, int, int],
    weights: Weights,
    groups: list[list[Linear]] | None = None,
) -> dict[tuple[str, str], Fraction]:
    """Bytes that each rank sends in one step, by axis and purpose, from the formulas alone; ``groups``: of a block, if it has others."""
    groups = _blocks(kind) if groups is None else groups
    size = dict(zip(("data", "z", "y", "x"), shape, strict=True))
    tokens = BATCH * SEQUENCE // (size["data"] * size["z"])  # m / Gz
    sent: dict[tuple[str, str], Fraction] = defaultdict(Fraction)

    def all_reduce(axis: str, elements: Fraction | int, purpose: str) -> None:
        sent[axis, purpose] += Fraction(2 * (size[axis] - 1), size[axis]) * elements * BYTES

    def gather(elements: Fraction | int, times: int) -> None:
        sent["z", "weight"] += times * Fraction(size["z"] - 1, size["z"]) * elements * BYTES

    def gradient(elements: Fraction | int) -> None:
        sent["z", "gradient"] += Fraction(size["z"] - 1, size["z"]) * elements * BYTES
        all_reduce("data", Fraction(elements, size["z"]), "gradient")

    head = Linear(H, VOCABULARY, "y", "x")
    for group in [*(g for _ in range(LAYERS) for g in groups), [head]]:
        for linear in group:
            all_reduce(linear.in_axis, Fraction(tokens * linear.n, size[linear.out_axis]), "activation")
        k = group[0].k  # one gradient of the shared input
        all_reduce(group[0].out_axis, Fraction(tokens * k, size[group[0].in_axis]), "activation")
    # The lookup in a vocabulary that is cut over x: one all-reduce forward, none backward.
    all_reduce("x", Fraction(tokens * H, size["y"]), "activation")

    matrices = Fraction(sum(linear.k * linear.n for g in groups for linear in g), size["y"] * size["x"])
    norm = Fraction(H, size["y"])
    table = Fraction(VOCABULARY * H, size["x"] * size["y"])
    if kind == "llama":
        block_vectors, outside_vectors = 2 * norm, norm
        tables = {"embedding": table, "head": table}
    else:
        biases = Fraction(3 * HEADS * HEAD_DIM + FFN, size["x"]) + Fraction(2 * H, size["y"])
        block_vectors, outside_vectors = 4 * norm + biases, 2 * norm
        tables = {"tied": table, "positions": Fraction(POSITIONS * H, size["y"])}
    # A lookup's gradient does not read its table, and the head is the first that backward needs: they come once.
    vectors = LAYERS * block_vectors + outside_vectors
    if weights == "fsdp2":  # block by block, all of its parameters
        gather(LAYERS * (matrices + block_vectors), 2)
        gather(outside_vectors + sum(tables.values()), 1)
    else:  # matrix by matrix; vectors come together, once
        # The last two matrices, of the same size, are still there when backward begins: they are within the prefetch.
        last = groups[-1][0]
        gather(LAYERS * matrices, 2)
        gather(Fraction(-2 * last.k * last.n, size["y"] * size["x"]), 1)
        gather(vectors + sum(tables.values()), 1)
        if kind == "gpt2":
            gather(table, 1)  # once for the lookup, once for the head
    gradient(LAYERS * matrices + vectors + sum(tables.values()))
    return {key: value for key, value in sent.items() if value}


def count_rank(
    kind: str,
    shape: tuple[int, int, int, int],
    weights: Weights,
    activations: Activations = "replicated",
    accumulation: Accumulation | None = None,
) -> tuple[list[Entry], list[Entry]]:
    """The accounts of forward and backward on this rank, after a first step that settles the order of things.

    With ``accumulation`` that of a step of two micro-batches, all in the first account.
    """
    model = build(kind)
    grid = Grid.create(shape, timeout_s=60)
    # So small a bundle that only vectors are in it; outputs and batches in one piece, so that calls can be counted.
    overlap = Overlap(bundle_bytes=1024, forward_chunks=1, interleave=False)
    parallelize(
        model,
        grid,
        weights=weights,
        overlap=overlap,
        activations=activations,
        accumulation=accumulation or "whole",
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    ids = ids[grid.local_rows(BATCH)]
    model(input_ids=ids, labels=ids).loss.backward()
    if accumulation is not None:
        with grid.collectives.counting() as step:
            with no_sync(model):
                model(input_ids=ids, labels=ids).loss.backward()
            model(input_ids=ids, labels=ids).loss.backward()
        return step, []
    with grid.collectives.counting() as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with grid.collectives.counting() as backward:
        loss.backward()
    return forward, backward


def check(
    kind: str,
    shape: tuple[int, int, int, int],
    weights: Weights,
    forward: list[Entry],
    backward: list[Entry],
    activations: Activations = "replicated",
    accumulation: Accumulation | None = None,
) -> list[str]:
    """What is not as the formulas say; empty if all is."""
    wrong = []
    entries = [*forward, *backward]
    measured: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for entry in entries:
        if entry.purpose not in APART:
            factor = Fraction((2 if entry.kind == "all_reduce" else 1) * (entry.ranks - 1), entry.ranks)
            measured[entry.axis, entry.purpose] += factor * entry.payload_bytes
    formula = expected(kind, shape, weights)
    if accumulation is not None:
        once = [("data", "gradient"), *([("z", "gradient")] if accumulation == "whole" else [])]
        formula = {key: sent * (1 if key in once else 2) for key, sent in formula.items()}
    for key in sorted(set(measured) | set(formula)):
        if measured[key] != formula.get(key, 0):
            wrong.append(
                f"{key}: sent {float(measured[key]):.0f} bytes, the formula says {float(formula.get(key, 0)):.0f}"
            )
    if accumulation is not None:
        return wrong
    # Two forward and two backward in each block; the head adds one on y and one on x, both forward, because it computes its
    # gradients with the loss, the embedding one on x forward. By tokens each of them is two, in a block or of the embedding one
    # of them in the other direction.
    right_calls = {"y": (2 * LAYERS + 1, 2 * LAYERS), "x": (2 * LAYERS + 2, 2 * LAYERS)}
    if activations == "sequence-parallel":
        right_calls = {"y": (4 * LAYERS + 2, 4 * LAYERS), "x": (4 * LAYERS + 3, 4 * LAYERS + 1)}
    for axis, passes in right_calls.items():
        if shape[("data", "z", "y", "x").index(axis)] == 1:
            continue
        for name, part, right in (("forward", forward, passes[0]), ("backward", backward, passes[1])):
            calls = sum(e.calls for e in part if e.axis == axis and e.purpose == "activation")
            if calls != right:
                wrong.append(f"{axis}: {calls} {name} collectives of activations instead of {right}")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--activations", choices=get_args(Activations), help="these alone")
    chosen = parser.parse_args(arguments).activations
    ways = [chosen] if chosen else list(get_args(Activations))
    equal = total = 0
    with RankPool(8) as pool:
        once = itertools.product(("llama", "gpt2"), ("fsdp2", "streamed"), ways, GRIDS, (None,))
        added_up = itertools.product(
            ("llama",), ("fsdp2", "streamed"), ways[-1:], GRIDS[2:], get_args(Accumulation)
        )
        for kind, weights, activations, shape, adds_up in [*once, *added_up]:
            accounts = pool.run(count_rank, 8, kind, shape, weights, activations, adds_up)
            wrong = [
                w for account in accounts for w in check(kind, shape, weights, *account, activations, adds_up)
            ]
            total += 1
            equal += not wrong
            verdict = "NOT as the formulas say" if wrong else "as the formulas say"
            print(
                f"{kind} on (data, z, y, x) = {shape}, weights {weights}, activations {activations}"
                f"{f', two micro-batches, gradients {adds_up}' if adds_up else ''}: {verdict}"
            )
            for way, part in zip(("forward", "backward"), accounts[0], strict=True):
                for entry in part:
                    apart = "  (apart)" if entry.purpose in APART else ""
                    print(
                        f"    {way:8} {entry.axis:4} {entry.kind:14} {entry.purpose:10} {entry.calls:3} calls "
                        f"{entry.bytes_sent:10.0f} bytes sent{apart}"
                    )
            for line in dict.fromkeys(wrong):
                print(f"    WRONG {line}")
    print(
        f"traffic: {equal}/{total} combinations of model, weights, activations and grid send exactly the bytes of the formulas"
    )
    return 0 if equal == total else 1


if __name__ == "__main__":
    sys.exit(main())
