"""What a step sends with experts: by the formulas, of sizes and of what routers chose, and by the account of collectives, by axis and purpose."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks import traffic
from benchmarks.experts.faults import FAULTS
from benchmarks.experts.ways import Shape, Way, on_grid
from benchmarks.traffic import (
    APART,
    BATCH,
    BYTES,
    FFN,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    SEQUENCE,
    VOCABULARY,
    H,
)
from fourfold import Grid
from fourfold.hf.experts import is_experts
from fourfold.mesh.axes import AXES
from fourfold.weights.overlap import Overlap

EXPERTS, CHOSEN, INDEX_BYTES = 8, 2, 8
Bytes = dict[tuple[str, str], Fraction]


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=H,
        intermediate_size=FFN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_hidden_layers=LAYERS,
        vocab_size=VOCABULARY,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
    )
    return MixtralForCausalLM(config)


@dataclass(frozen=True)
class Account:
    """Of one rank."""

    sent: Bytes
    place: tuple[int, ...]
    chosen: list[Tensor]  # by layer, the experts of its own tokens


def account(way: Way, fault: str | None = None) -> Account:
    """Of a second step, after the one that finds out which linears share an input."""
    model, grid = mixtral(), Grid.create(way.shape, timeout_s=120)
    chosen: list[Tensor] = []

    def note(module: object, given: tuple[Tensor, ...]) -> None:
        choices = given[1]
        if way.activations == "replicated" and "x" in way.owners:
            choices = choices.chunk(grid.x)[grid.coordinate("x")]
        chosen.append(choices)

    with FAULTS[fault].planted() if fault else nullcontext():
        overlap = Overlap(bundle_bytes=1024, forward_chunks=1, interleave=False)
        on_grid(model, way, grid, overlap)
        for module in model.modules():
            if is_experts(module):
                module.register_forward_pre_hook(note)
        ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
        ids = ids[grid.local_rows(BATCH)]
        model(input_ids=ids, labels=ids).loss.backward()
        chosen.clear()
        with grid.collectives.counting() as entries:
            model(input_ids=ids, labels=ids).loss.backward()
    sent: Bytes = {}
    for entry in entries:
        if entry.purpose in APART:
            continue
        factor = Fraction((2 if entry.kind == "all_reduce" else 1) * (entry.ranks - 1), entry.ranks)
        kept = entry.kept_bytes
        size = factor * entry.payload_bytes if kept is None else Fraction(entry.payload_bytes - kept)
        key = (entry.axis, entry.purpose)
        sent[key] = sent.get(key, Fraction(0)) + size
    return Account(
        {key: size for key, size in sent.items() if size}, tuple(map(grid.coordinate, AXES)), chosen
    )


def formulas(way: Way, accounts: list[Account]) -> list[Bytes]:
    """Of each rank: that of a Llama without its MLP, and of experts and routers of all layers."""
    without_mlp = traffic._blocks("llama")[:2]
    same = traffic.expected("llama", way.shape, way.weights, without_mlp)
    for key, size in of_experts(way).items():
        same[key] = same.get(key, Fraction(0)) + size
    found = []
    for rank, own in enumerate(accounts):
        rows = of_rows(way, accounts, own) if way.owners else {}
        assert rank == _rank(own.place, way.shape)
        found.append({key: size for key, size in {**same, **rows}.items() if size})
    return found


def of_experts(way: Way) -> Bytes:
    """Of all layers, in forward and backward; without the rows that are sent to experts."""
    data, z, y, x = way.shape
    tokens = BATCH * SEQUENCE // (data * z)
    over = {axis: Fraction(size - 1, size) for axis, size in zip(AXES, way.shape, strict=True)}
    features = Fraction(tokens * H * BYTES)  # of all tokens that x ranks have together
    weights = tokens * CHOSEN * BYTES  # of choices
    is_owned_over_x = "x" in way.owners
    if way.activations == "sequence-parallel":
        # Over y the features are gathered, and scattered behind the experts; in backward the other way round. So are tokens over x,
        # with choices and weights, of which the gradients come back, if x ranks have parts of all experts. Gradients of weights are summed over y.
        on_y, on_x = 4 * features / x, 4 * features
        routing_y, routing_x = 2 * Fraction(weights, x), Fraction(2 * weights + tokens * CHOSEN * INDEX_BYTES)
        if is_owned_over_x:
            on_x = routing_x = Fraction(0)
    else:
        # x sums the gradients of the features, and what experts made of them. An all-reduce is as much as two gathers.
        on_y, on_x = 4 * features, 4 * features / y
        routing_y = routing_x = Fraction(2 * weights)
        if is_owned_over_x:  # experts have the tokens of an x rank, and what they made is gathered
            on_y, on_x = 2 * features + 2 * features / x, 3 * features / y
    sent = {
        ("y", "activation"): on_y * over["y"],
        ("x", "activation"): on_x * over["x"],
        ("y", "routing"): routing_y * over["y"],
        ("x", "routing"): routing_x * over["x"],
    }
    of_experts, of_router = EXPERTS * Fraction(3 * FFN * H, x * y) * BYTES, EXPERTS * H * BYTES
    over_z = of_router + (0 if "z" in way.owners else of_experts)
    sent["z", "weight"] = 2 * over_z * over["z"]
    sent["z", "gradient"] = over_z * over["z"]
    sent["data", "gradient"] = 2 * (of_experts + of_router) / z * over["data"]
    return {key: LAYERS * size for key, size in sent.items()}


def of_rows(way: Way, accounts: list[Account], own: Account) -> Bytes:
    """Of owned experts: rows of choices that other ranks own go forth and, as gradients, back; results the other way round."""
    sizes = dict(zip(AXES, way.shape, strict=True))
    owners = [axis for axis in way.owners if sizes[axis] > 1]
    axis = "zx" if len(owners) == 2 else owners[0]
    ranks = 1
    for each in owners:
        ranks *= sizes[each]

    def is_peer(other: Account) -> bool:
        return all(a == b for at, a, b in zip(AXES, other.place, own.place, strict=True) if at not in owners)

    def rows_of(sender: Account) -> list[Tensor]:
        """With parts of experts on x, each x rank sends rows of the tokens of all of them."""
        if "x" in way.owners or way.activations == "replicated":
            return sender.chosen
        return [c for o in accounts if o.place[:-1] == sender.place[:-1] for c in o.chosen]

    def to(place: tuple[int, ...], sender: Account) -> int:
        mine = torch.tensor(_experts_at(place, owners, sizes))
        return sum(int(torch.isin(choices, mine).sum()) for choices in rows_of(sender))

    away = sum(choices.numel() for choices in rows_of(own)) - to(own.place, own)
    came = sum(to(own.place, o) for o in accounts if is_peer(o) and o.place != own.place)
    rows = Fraction((away + came) * H * BYTES)
    counts = Fraction(ranks - 1, ranks) * LAYERS * EXPERTS * INDEX_BYTES
    return {(axis, "dispatch"): rows, (axis, "combine"): rows, (axis, "counts"): counts}


def _experts_at(place: tuple[int, ...], owners: list[str], sizes: dict[str, int]) -> list[int]:
    """Whose shard of the experts' dim is there: x is outside, z inside."""
    found = list(range(EXPERTS))
    for axis in ("x", "z"):
        if axis in owners:
            part = len(found) // sizes[axis]
            at = place[AXES.index(axis)]  # type: ignore[arg-type]
            found = found[at * part : (at + 1) * part]
    return found


def _rank(place: tuple[int, ...], shape: Shape) -> int:
    rank = 0
    for at, size in zip(place, shape, strict=True):
        rank = rank * size + at
    return rank
