"""Do ranks that share sequences train exactly? Context parallelism over z, against the stock model on whole sequences in one process.

families    every family, two ranks a sequence, on (1, 2, 2, 2); where tensor axes are refused, on (2, 2, 1, 1)
grids       Llama, Gemma 3 (sliding windows), Qwen 3, GPT-OSS (sinks), Gemma 2 (soft cap) and DeepSeek-V3 (latent attention) with packed
            documents, 2, 4 and 8 ranks a sequence: loss, every gradient, and the bytes of keys and values
documents   the logits of all other documents while the tokens of one change

python -m benchmarks.long
python -m benchmarks.long --only llama gemma3
python -m benchmarks.long --quick                 # without the sweep of families
python -m benchmarks.long --quick --break mask    # plants a fault: has to fail
python -m benchmarks.long --train                 # 50 steps of 32k tokens on eight ranks: losses of one process, stopped and resumed
python -m benchmarks.long --train --tokens 2048 --steps 6
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import fourfold as ff
from benchmarks import long_train
from benchmarks.families import GRADIENT_BAR, LOSS_BAR, ZERO, ZERO_SCALE, Outcome
from benchmarks.packed import windowed_model
from benchmarks.ranks import RankError, RankPool
from benchmarks.tiny_models import Family, families, find_family, tiny_batch
from fourfold.errors import UnsupportedError
from fourfold.mesh.grid import Grid
from fourfold.parallel.context import attention, chunks, masks
from fourfold.parallel.context.chunks import own_tokens, positions_of

RANKS = 8
LENGTH = 32
ROWS = 4
BLOCK = 3  # queries of a mask: several blocks, also of so short a sequence
SHAPE, WITHOUT_TENSOR_AXES = (1, 2, 2, 2), (2, 2, 1, 1)
MODELS = ("llama", "gemma3", "qwen3", "gpt_oss", "gemma2", "deepseek_v3")
# A grid and how many of its z ranks share a sequence; the second where the family has no tensor axes.
SHARED = (
    ((1, 2, 2, 2), (2, 2, 1, 1), 2),
    ((1, 4, 1, 2), (1, 4, 1, 1), 2),
    ((1, 4, 1, 2), (1, 4, 1, 1), 4),
    ((2, 4, 1, 1), (2, 4, 1, 1), 4),
    ((1, 8, 1, 1), (1, 8, 1, 1), 8),
)
# Of these columns a document begins: inside chunks, at their borders, and a row that is one document.
BEGINS = ((0, 5, 8, 27), (0,), (0, 16), (0, 1, 2, 30))
FAULTS = ("mask", "order", "positions", "dk", "label")
VERIFIED_BAR = 60


# -- faults -----------------------------------------------------------------------------------------------------------


@contextmanager
def injected(fault: str) -> Iterator[None]:
    """A fault, for as long as it lasts."""
    saved = (
        masks.CutMask.of,
        attention.in_order,
        chunks.positions_of,
        attention._Work.scatter,
        chunks.own_tokens,
    )
    if fault == "mask":  # documents attend to those before them
        masks.CutMask.of = _without_documents  # type: ignore[method-assign]
    elif fault == "order":  # keys and values in the order of the ranks
        attention.in_order = lambda by_rank, dim: torch.cat(by_rank.unbind(0), dim=dim)
    elif fault == "positions":  # those of this rank's tokens, counted on
        chunks.own_tokens = _counted_on
    elif fault == "dk":  # a rank keeps its own queries' part of the gradients of its keys
        attention._Work.scatter = _own_part  # type: ignore[method-assign]
    elif (
        fault == "label"
    ):  # shifted after the cut: the last token of a chunk predicts the first of this rank's next chunk
        chunks.own_tokens = _shifted_again
    try:
        yield
    finally:
        (
            masks.CutMask.of,
            attention.in_order,
            chunks.positions_of,
            attention._Work.scatter,
            chunks.own_tokens,
        ) = saved  # type: ignore[method-assign]


def _without_documents(mask: masks.CutMask, queries: slice, keys: slice) -> Tensor:
    rows, length = mask.sequences.positions.shape
    places = torch.arange(length)
    return (places[queries, None] >= places[keys]).expand(rows, 1, -1, -1)


def _counted_on(whole: Tensor, grid: Grid) -> Tensor:
    own = own_tokens(whole, grid)
    if whole.dtype == torch.long and bool((whole[:, 0] == 0).all()) and int(whole.max()) < whole.shape[1]:
        return torch.arange(own.shape[1]).expand_as(own)  # of all inputs the positions alone are like this
    return own


def _shifted_again(whole: Tensor, grid: Grid) -> Tensor:
    own = own_tokens(whole, grid)
    is_label = bool((whole[:, -1] == -100).all())
    if not is_label:
        return own
    before = own_tokens(torch.cat([whole[:, :1], whole[:, :-1]], dim=1), grid)
    return torch.nn.functional.pad(before, (0, 1), value=-100)[:, 1:]


def _own_part(work: Any, sums: Tensor, features: tuple[int, int]) -> tuple[Tensor, ...]:
    ranks = work.collectives.size("sequence")
    place = work.mask.sequences.grid.coordinate("sequence")
    return chunks.by_rank(sums, ranks, 2)[place].split(features, dim=-1)


# -- one family on one grid -------------------------------------------------------------------------------------------


def packed_positions(rows: int) -> Tensor:
    begins = torch.zeros(rows, LENGTH, dtype=torch.long)
    for row in range(rows):
        begins[row, list(BEGINS[row % len(BEGINS)])] = 1
    return positions_of(begins.cumsum(1))


def one_by_one(stock: Any, ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    """The mean loss of documents that are rows of their own: not every stock model keeps those of a packed row apart."""
    count = int((positions > 0).sum())
    losses = []
    for *row, at in zip(ids, labels, positions, strict=True):
        begins = (at == 0).nonzero().flatten()[1:]
        for document, wanted in zip(*(tensor.tensor_split(begins) for tensor in row), strict=True):
            if len(document) > 1:
                given = {"input_ids": document.unsqueeze(0), "labels": wanted.unsqueeze(0)}
                losses.append(stock(**given, num_items_in_batch=count, use_cache=False).loss)
    return torch.stack(losses).sum()


def check_rank(
    name: str,
    shape: tuple[int, int, int, int],
    share: int,
    is_packed: bool = False,
    fault: str | None = None,
) -> Outcome:
    """One family on one grid, on this rank: the stock model on whole sequences first, then the parallel one on a part of them."""
    with patch.object(masks, "QUERIES", BLOCK):
        return _check(name, shape, share, is_packed, fault)


def _check(
    name: str, shape: tuple[int, int, int, int], share: int, is_packed: bool, fault: str | None
) -> Outcome:
    family = find_family(name)
    try:
        stock = windowed_model(family)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("transformers.models."):
            raise
        return Outcome("missing", str(error))
    batch = tiny_batch(stock, ROWS, LENGTH)
    if set(batch) != {"input_ids", "labels"}:
        return Outcome("refused", f"it takes {', '.join(sorted(batch))}")
    positions = packed_positions(ROWS) if is_packed else None
    ids, labels = batch["input_ids"], batch["labels"]
    if positions is not None:
        labels = torch.where(positions == 0, -100, labels)
    if positions is None:
        expected = stock(input_ids=ids, labels=labels, use_cache=False).loss
    else:
        expected = one_by_one(stock, ids, labels, positions)
    expected.backward()
    gradients = {n: p.grad for n, p in stock.named_parameters()}
    largest = max(float(g.abs().max()) for g in gradients.values() if g is not None)
    model = windowed_model(family)
    grid = Grid.create(shape, sequence_ranks=share, timeout_s=120)
    own = grid.local_rows(ROWS)
    try:
        report = ff.parallelize(model, grid, overlap=ff.Overlap(bundle_bytes=256))
        with injected(fault) if fault else nullcontext():
            inputs = chunks.cut_sequences(
                ids[own],
                grid,
                labels=labels[own],
                position_ids=None if positions is None else positions[own],
                shift=stock.loss_function.__name__ == "ForCausalLMLoss",
            )
            model(**inputs).loss.backward()
            model.zero_grad()
            with grid.collectives.counting() as entries:
                loss = model(**inputs).loss
                loss.backward()
    except UnsupportedError as why:
        return Outcome("refused", str(why))
    worst, where = abs(loss.item() - expected.item()) / abs(expected.item()), "loss"
    if not worst <= LOSS_BAR:
        return Outcome("failed", f"loss {loss.item():.7g} instead of {expected.item():.7g}", worst)
    for parameter_name, parameter in model.named_parameters():
        layout = report.layouts[parameter_name]
        whole = gradients[layout.hf_name]
        if parameter.grad is None or whole is None:
            if (whole is not None and whole.abs().max() > 0) or (
                parameter.grad is not None and parameter.grad.to_local().abs().max() > 0
            ):
                return Outcome("failed", f"{parameter_name} has a gradient in one of the two models alone")
            continue
        local, part = parameter.grad.to_local(), layout.of(whole, layout.shard(grid))
        if local.numel():
            maximum = float(whole.abs().max())
            scale = maximum if maximum > ZERO * largest else ZERO_SCALE * largest
            error = float((local - part).abs().max()) / scale
            if not error <= worst:
                worst, where = error, parameter_name
    if not worst <= GRADIENT_BAR:
        return Outcome("failed", f"gradient of {where} is off by {worst:.1e} of its maximum", worst)
    if is_packed and (wrong := wrong_bytes(stock, grid, own.stop - own.start, entries)):
        return Outcome("failed", wrong, worst)
    return Outcome("verified", "", worst)


def wrong_bytes(stock: Any, grid: Grid, rows: int, entries: Any) -> str:
    """What differs from the formula of the traffic of keys and values, in fp32 and without recomputation."""
    config = stock.config.get_text_config()
    heads, size = config.num_key_value_heads, getattr(config, "head_dim", None)
    of_head = 2 * (size or config.hidden_size // config.num_attention_heads)
    if getattr(config, "kv_lora_rank", None):  # latent attention: its keys are wider than its values
        heads, of_head = (
            config.num_attention_heads,
            config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim,
        )
    whole = config.num_hidden_layers * rows * LENGTH * max(1, heads // (grid.x * grid.y)) * of_head * 4
    # Gathered in forward and in backward, and their gradients scattered in fp32.
    expected = {"all_gather": 2 * whole, "reduce_scatter": whole}
    found = {e.kind: e.payload_bytes for e in entries if e.purpose == "keys-values"}
    return "" if found == expected else f"keys and values took {found} bytes, not {expected}"


def documents_rank(
    name: str, shape: tuple[int, int, int, int], share: int, fault: str | None = None
) -> float:
    """The largest change of the logits of this rank's tokens of other documents, while the tokens of one document change."""
    with patch.object(masks, "QUERIES", BLOCK):
        return _documents(name, shape, share, fault)


def _documents(name: str, shape: tuple[int, int, int, int], share: int, fault: str | None) -> float:
    model = windowed_model(find_family(name))
    ids = tiny_batch(model, ROWS, LENGTH)["input_ids"]
    grid = Grid.create(shape, sequence_ranks=share, timeout_s=120)
    ff.parallelize(model, grid)
    positions, own = packed_positions(ROWS), grid.local_rows(ROWS)
    numbers = (positions == 0).cumsum(1)
    worst = 0.0
    with torch.no_grad(), injected(fault) if fault else nullcontext():
        for document in range(1, int(numbers.max()) + 1):
            is_in = numbers == document
            logits = []
            for given in (ids, torch.where(is_in, ids.flip(1), ids)):
                inputs = chunks.cut_sequences(given[own], grid, position_ids=positions[own])
                found = model(**inputs).logits
                logits.append(ff.full_logits(found, grid, batch=inputs["input_ids"].shape))
            others = ~chunks.own_tokens(is_in[own], grid)
            worst = max(worst, float((logits[0] - logits[1])[others].abs().max()))
    return worst


# -- all of them ------------------------------------------------------------------------------------------------------


def check(pool: RankPool, name: str, shape: tuple[int, int, int, int], share: int, *more: Any) -> Outcome:
    """The worst outcome of all ranks."""
    ranks = shape[0] * shape[1] * shape[2] * shape[3]
    try:
        outcomes = pool.run(check_rank, ranks, name, shape, share, *more, timeout_s=600)
    except RankError as error:
        return Outcome("failed", _last_line(error))
    for status in ("failed", "missing", "refused"):
        if found := next((o for o in outcomes if o.status == status), None):
            return found
    return max(outcomes, key=lambda o: o.gradient)


def check_family(pool: RankPool, family: Family, fault: str | None) -> Outcome:
    found = check(pool, family.name, SHAPE, 2, False, fault)
    if found.status != "refused" or "sequence_ranks" in found.detail:
        return found
    beside = check(pool, family.name, WITHOUT_TENSOR_AXES, 2, False, fault)
    return beside if beside.status != "verified" else Outcome("beside", found.detail, beside.gradient)


def _last_line(error: RankError) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    raised = [line for line in lines if not line.startswith((" ", "then rank", "rank "))]
    return raised[-1] if raised else lines[0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="FAMILY", help="these families alone; no bar on their number"
    )
    parser.add_argument("--quick", action="store_true", help="without the sweep of families")
    parser.add_argument(
        "--break", dest="fault", choices=FAULTS, help="plant a fault: the command has to fail"
    )
    parser.add_argument("--train", action="store_true", help="train on eight ranks, and nothing else")
    parser.add_argument("--tokens", type=int, default=32768, help="of a row, with --train (default: 32768)")
    parser.add_argument("--steps", type=int, default=50, help="with --train, at least 4 (default: 50)")
    options = parser.parse_args(arguments)
    if options.train and options.steps < 4:
        parser.error(f"{options.steps} steps are too few to stop and resume; use 4")
    if options.train:
        return long_train.check(options.tokens, options.steps, options.fault)
    start_s = time.perf_counter()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    failed, worst = 0, 0.0
    print(
        f"loss within {LOSS_BAR:g}, gradients within {GRADIENT_BAR:g} of their own maximum; Gloo on CPU, fp32"
    )
    with RankPool(RANKS, quiet=True) as pool:
        for name in [n for n in MODELS if not options.only or n in options.only]:
            for with_tensor_axes, without, share in SHARED:
                shape, found = (
                    with_tensor_axes,
                    check(pool, name, with_tensor_axes, share, True, options.fault),
                )
                if found.status == "refused" and "sequence_ranks" not in found.detail and without != shape:
                    shape, found = without, check(pool, name, without, share, True, options.fault)
                leak = "not tried"
                if found.status == "verified":
                    leak = f"{max(pool.run(documents_rank, _ranks(shape), name, shape, share, options.fault)):.1e}"
                good = found.status == "verified" and float(leak) <= GRADIENT_BAR
                failed += not good
                counts["grids"] += good
                worst = max(worst, found.gradient)
                print(
                    f"{name:12} {shape!s:14} {share} ranks a sequence: {found.status}{found.figure}; other documents change by {leak}",
                    flush=True,
                )
        if not options.quick:
            for family in [find_family(n) for n in options.only] if options.only else families():
                found = check_family(pool, family, options.fault)
                counts[found.status] += 1
                failed += found.status == "failed"
                worst = max(worst, found.gradient)
                print(f"{family.name:28} {found.status}{found.figure}", flush=True)
    print(
        f"long: {counts['grids']} models and grids with packed documents exact, documents apart, bytes as by the formula; of the families "
        f"{counts['verified']} exact with two ranks a sequence on {SHAPE}, {counts['beside']} on {WITHOUT_TENSOR_AXES}, {counts['refused']} refused, "
        f"{counts['missing']} missing, {failed} failures, worst gradient error {worst:.2e}, {time.perf_counter() - start_s:.0f} s"
    )
    enough = options.quick or options.only or counts["verified"] >= VERIFIED_BAR
    return 0 if enough and not failed else 1


def _ranks(shape: tuple[int, int, int, int]) -> int:
    return shape[0] * shape[1] * shape[2] * shape[3]


if __name__ == "__main__":
    sys.exit(main())
