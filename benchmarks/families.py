"""Which families of transformers train exactly: a row for each.

Every family with a tensor-parallel plan of its own, and those of Fourfold's table, at a tiny random configuration made
from its own config class, on two grids. The loss and every gradient are compared with the stock model in one process.

    verified        exact on both grids
    refused: why    not trained: said before the first step, with the module or plan style that stands in the way;
                    and whether the family is exact on z and data alone, (2, 2, 1, 1)
    failed: why     a defect: neither exact nor refused

Where a family is verified, so it is a second time with activations that are cut by their tokens over both tensor axes:
exact, or refused with what stands in the way.

A gradient that is further off has to be off by less than what rounding does to it in one process, where each weight moves by its last bit
or stays; the row says so.

    python -m benchmarks.families
    python -m benchmarks.families --only llama gpt2
    python -m benchmarks.families --compile
    python -m benchmarks.families --experts z
    python -m benchmarks.families --experts z x

With --compile everything is on: blocks compiled, each as one graph (by aot_eager, without code generation), selective recomputation, and two
micro-batches whose gradients are accumulated in shards. A break of a graph, or one that is made after the second step, is a defect. A
family whose blocks cannot be compiled is refused, with the reason. Every rank traces every block, so grids have four ranks here: one with z
and x, and by tokens one with y and x.

With --experts z, ranks of z own experts and tokens are sent to them: families whose plan has experts, on three grids. So with x, and with z x,
where ranks of both do, of as many experts as ranks.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.ranks import RankError, RankPool
from benchmarks.tiny_configs import EXPERTS
from benchmarks.tiny_models import Family, families, find_family, tiny_batch, tiny_loss, tiny_model
from fourfold.errors import UnsupportedError
from fourfold.hf.anatomy import idle_towers
from fourfold.hf.experts import is_experts
from fourfold.mesh.axes import AXES, Axis
from fourfold.mesh.grid import Grid
from fourfold.parallel import compiled
from fourfold.parallel.options import Activations
from fourfold.parallel.parallelize import parallelize
from fourfold.weights.api import no_sync
from fourfold.weights.overlap import Overlap

Shape = tuple[int, int, int, int]
GRIDS: tuple[Shape, ...] = ((1, 2, 2, 2), (1, 1, 2, 4))
# Where the tensor axes are refused, z and data alone are tried.
WITHOUT_TENSOR_AXES: Shape = (2, 2, 1, 1)
EVERYTHING: dict[str, Any] = {
    "compile": True,
    "activation_checkpointing": "selective",
    "accumulation": "sharded",
}
COMPILED_GRIDS: dict[Activations, tuple[Shape, ...]] = {
    "replicated": ((1, 2, 1, 2),),
    "sequence-parallel": ((1, 1, 2, 2),),
}
# By the axes whose ranks own experts.
OWNED_GRIDS: dict[tuple[Axis, ...], tuple[Shape, ...]] = {
    ("z",): ((1, 2, 1, 1), (2, 2, 1, 1), (1, 2, 2, 2)),
    ("x",): ((1, 1, 1, 4), (1, 1, 2, 2)),
    ("z", "x"): ((1, 2, 1, 4),),
}
WITHOUT_LOSS = ("diffusion_gemma", "embedding_gemma2", "muse_glimmer_assistant")
LOSS_BAR = 1e-5
GRADIENT_BAR = 1e-4  # of the gradient's own largest entry
# A gradient whose true value is zero (a bias of k, which softmax cancels) is rounding noise and has no maximum of its
# own to compare with. Below ZERO of the model's largest gradient entry a gradient counts as zero, and its error is
# measured against ZERO_SCALE of that largest entry: it passes if the noise is below 1e-7 of it.
ZERO = 1e-5
ZERO_SCALE = 1e-3
VERIFIED_BAR = 127
BY_TOKENS_BAR = 122
PLAIN_STYLES = {"colwise", "rowwise"}
# Every text family whose plan is colwise and rowwise alone has to be verified. These are not text families: what
# their other inputs pass has no role.
NOT_TEXT = {
    "higgs_audio_v2": "audio codebooks",
    "muse_glimmer": "images",
    "neomme": "images of pages",
    "voxtral_realtime": "audio",
}


@dataclass(frozen=True)
class Outcome:
    status: str
    detail: str = ""
    gradient: float = 0.0

    @property
    def figure(self) -> str:
        return f" {self.gradient:.1e}{self.detail}" if self.status == "verified" else f": {self.detail}"


def check_rank(
    name: str,
    shape: Shape,
    activations: Activations = "replicated",
    options: dict[str, Any] | None = None,
) -> Outcome:
    """One family on one grid, on this rank: the stock model first, then the parallel one."""
    family, owners = find_family(name), _owners(options)
    experts = max(EXPERTS, math.prod(shape[AXES.index(axis)] for axis in owners))
    try:
        stock = tiny_model(family, experts=experts)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("transformers.models."):
            raise  # a package that is not installed
        return Outcome("missing", str(error))  # transformers lists the family, and does not contain its code
    if owners and not any(is_experts(module) for module in stock.modules()):
        return Outcome("refused", "it has no experts as it is configured here")
    batch = tiny_batch(stock)
    expected = tiny_loss(stock, batch)
    expected.backward()
    gradients = {n: p.grad for n, p in stock.named_parameters()}
    largest = max(float(g.abs().max()) for g in gradients.values() if g is not None)

    model = tiny_model(family, experts=experts)
    grid = Grid.create(shape, timeout_s=300)  # while one rank traces, the others wait
    parts = _own_parts(batch, grid, 1 if not options or owners else 2)
    graphs = _Graphs()
    try:
        # So small a bundle that matrices have collectives of their own.
        report = parallelize(
            model, grid, overlap=Overlap(bundle_bytes=256), activations=activations, **options or {}
        )
        # Twice: in the second step weights come in the recorded order, and two half-batches alternate.
        _step(model, parts)
        model.zero_grad()
        if options:
            _step(model, parts)
            model.zero_grad()
            graphs.settle()
        loss = _step(model, parts)
    except UnsupportedError as why:
        return Outcome("refused", str(why))
    except torch._dynamo.exc.TorchDynamoException as why:
        return Outcome("refused", f"not compiled: {_why(why)}")
    if graphs.wrong:
        return Outcome("failed", graphs.wrong)
    loss_error = abs(loss.item() - expected.item()) / abs(expected.item())
    worst, where = 0.0, ""
    for parameter_name, parameter in model.named_parameters():
        layout = report.layouts[parameter_name]
        whole = gradients[layout.hf_name]
        if parameter.grad is None or whole is None:
            if parameter.grad is not None and parameter.grad.to_local().abs().max() > 0:
                return Outcome("failed", f"{parameter_name} has a gradient, in the stock model it has none")
            if whole is not None and whole.abs().max() > 0:
                return Outcome("failed", f"{parameter_name} has no gradient")
            continue
        local = parameter.grad.to_local()
        part_of_whole = layout.of(whole, layout.shard(grid))
        if local.numel():
            maximum = float(whole.abs().max())
            scale = maximum if maximum > ZERO * largest else ZERO_SCALE * largest
            error = float((local - part_of_whole).abs().max()) / scale
            if not error <= worst:
                worst, where = error, parameter_name
    if not loss_error <= LOSS_BAR:
        return Outcome("failed", f"loss {loss.item():.7g} instead of {expected.item():.7g}", worst)
    details = [f" {graphs.count} graphs"] if options and not owners else []
    if not worst <= GRADIENT_BAR:
        hf_name = report.layouts[where].hf_name
        rounding = _rounding(family, hf_name, gradients[hf_name], experts)
        if not worst <= rounding:
            return Outcome("failed", f"gradient of {where} is off by {worst:.1e} of its maximum", worst)
        details.append(
            f" of {where}, where rounding of the weights alone changes one process by {rounding:.1e}"
        )
    idle = idle_towers(model)
    details += [f" text alone, {', '.join(idle)} idle"] if idle else []
    return Outcome("verified", "".join(details), worst)


def _rounding(family: Family, name: str, gradient: Tensor, experts: int) -> float:
    """How much this gradient of the stock model changes, of its maximum, when each weight moves by its last bit or stays."""
    largest = 0.0
    for seed in range(8):
        model = tiny_model(family, experts=experts)
        drawn = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                last_bit = torch.nextafter(parameter, torch.full_like(parameter, torch.inf)) - parameter
                parameter += last_bit * torch.randint(-1, 2, parameter.shape, generator=drawn)
        tiny_loss(model, tiny_batch(model)).backward()
        moved = model.get_parameter(name).grad
        assert moved is not None
        largest = max(largest, float((moved - gradient).abs().max() / gradient.abs().max()))
    return largest


class _Graphs:
    """The graphs of one model."""

    def __init__(self) -> None:
        # Private, and the only place that tells how many graphs there are (torch 2.13.0).
        from torch._dynamo.utils import counters

        compiled.BACKEND = "aot_eager"
        torch._dynamo.reset()
        counters.clear()
        self._counters, self._settled = counters, 0

    @property
    def count(self) -> int:
        return int(self._counters["stats"]["unique_graphs"])

    def settle(self) -> None:
        """From now on no graph may be made."""
        self._settled = self.count

    @property
    def wrong(self) -> str:
        if self._settled and self.count > self._settled:
            return f"{self.count - self._settled} graphs were made after the second step"
        breaks = sum(self._counters["graph_break"].values())
        return f"{breaks} breaks of graphs" if breaks else ""


def _why(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    return (said or lines or [repr(error)])[0]


def _step(model: Any, parts: list[dict[str, Any]]) -> Tensor:
    """Forward and backward of the micro-batches, which have as many labels each; the mean loss."""
    total = torch.zeros(())
    for number, part in enumerate(parts, 1):
        with no_sync(model) if number < len(parts) else nullcontext():
            loss = tiny_loss(model, part) / len(parts)
            loss.backward()
        total += loss.detach()
    return total


def _own_parts(batch: dict[str, Any], grid: Grid, count: int) -> list[dict[str, Any]]:
    """This rank's rows of the batch, in micro-batches."""
    sequences = next(len(v) for v in batch.values() if isinstance(v, Tensor))
    own = grid.local_rows(sequences)
    rows = (own.stop - own.start) // count
    return [
        {
            k: v[first : first + rows] if isinstance(v, Tensor) and v.ndim and len(v) == sequences else v
            for k, v in batch.items()
        }
        for first in range(own.start, own.stop, rows)
    ]


def check(
    pool: RankPool,
    family: Family,
    activations: Activations = "replicated",
    options: dict[str, Any] | None = None,
) -> Outcome:
    """The outcome of a family over all grids and ranks: the worst of them."""
    worst = Outcome("verified")
    grids = _grids(activations, options)
    for shape in grids:
        try:
            outcomes = pool.run(
                check_rank, math.prod(shape), family.name, shape, activations, options, timeout_s=600
            )
        except RankError as error:
            return Outcome("failed", f"{shape}: {_last_line(error)}")
        for status in ("failed", "missing", "refused"):
            found = next((o for o in outcomes if o.status == status), None)
            if found is not None:
                if _owners(options) and worst.gradient:
                    exact = ", ".join(map(str, grids[: grids.index(shape)]))
                    return replace(found, detail=f"{found.detail} [{exact}: exact]")
                if status != "refused" or activations != "replicated" or options:
                    return found
                return _beside(pool, family, found)
        worst = max([worst, *outcomes], key=lambda o: o.gradient)
    return worst


def _owners(options: dict[str, Any] | None) -> tuple[Axis, ...]:
    """The axes whose ranks own experts."""
    owners: tuple[Axis, ...] = (options or {}).get("experts", ())
    return owners


def _grids(activations: Activations, options: dict[str, Any] | None) -> tuple[Shape, ...]:
    if owners := _owners(options):
        grids = OWNED_GRIDS[owners]
        return grids if activations == "replicated" or "x" in owners else grids[-1:]
    return COMPILED_GRIDS[activations] if options else GRIDS


def _beside(pool: RankPool, family: Family, refused: Outcome) -> Outcome:
    """The same refusal, with what comes of the family on z and data alone."""
    if family.folder in WITHOUT_LOSS:
        return replace(refused, detail=f"{refused.detail} [z and data: not tried, it has no loss of its own]")
    try:
        outcomes = pool.run(check_rank, 4, family.name, WITHOUT_TENSOR_AXES, timeout_s=180)
    except RankError as error:
        return Outcome("failed", f"{WITHOUT_TENSOR_AXES}: {_last_line(error)}")
    failed = next((o for o in outcomes if o.status == "failed"), None)
    if failed is not None:
        return replace(failed, detail=f"{WITHOUT_TENSOR_AXES}: {failed.detail}")
    worst = max(outcomes, key=lambda o: o.gradient)
    exact = "exact" if worst.gradient <= GRADIENT_BAR else f"exact to rounding,{worst.figure}"
    also = next((f"refused, {o.detail}" for o in outcomes if o.status == "refused"), exact)
    return replace(refused, detail=f"{refused.detail} [z and data: {also}]")


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
    parser.add_argument(
        "--compile", action="store_true", help="compile blocks, recompute selectively, accumulate in shards"
    )
    parser.add_argument(
        "--experts", nargs="+", choices=("z", "x"), help="let ranks of z, of x or of both own experts"
    )
    options = parser.parse_args(arguments)
    if options.compile and options.experts:
        parser.error(
            "blocks with experts that ranks own are not compiled; use one of --compile and --experts"
        )
    owners = tuple(axis for axis in AXES if axis in (options.experts or ()))
    given = EVERYTHING if options.compile else {"experts": owners} if owners else None
    chosen = [find_family(name) for name in options.only] if options.only else families()
    if options.experts:
        chosen = [family for family in chosen if options.only or "moe_tp_experts" in family.plan_styles]
    if given == EVERYTHING:
        print(
            f"with {', '.join(f'{name}={value}' for name, value in given.items())}, two micro-batches, aot_eager"
        )
    grids = {activations: _grids(activations, given) for activations in ("replicated", "sequence-parallel")}
    print(
        f"grids {grids['replicated']}, by tokens {grids['sequence-parallel']}, loss within {LOSS_BAR:g}, gradients within {GRADIENT_BAR:g} of their own maximum; Gloo on CPU, fp32"
    )
    ranks = max(math.prod(shape) for shapes in grids.values() for shape in shapes)
    start_s = time.perf_counter()
    outcomes: dict[str, Outcome] = {}
    by_tokens: dict[str, Outcome] = {}
    short: list[str] = []
    torch.set_num_threads(1)
    with RankPool(ranks, quiet=True) as pool:
        for family in chosen:
            outcome = check(pool, family, options=given)
            outcomes[family.name] = outcome
            line = f"{family.name:28} {outcome.status}{outcome.figure}"
            if outcome.status == "verified":
                by_tokens[family.name] = check(pool, family, "sequence-parallel", given)
                line += f"; by tokens {by_tokens[family.name].status}{by_tokens[family.name].figure}"
            elif (
                outcome.status != "missing"
                and set(family.plan_styles) <= PLAIN_STYLES
                and family.plan_styles
                and family.name not in NOT_TEXT
            ):
                short.append(family.name)
            print(line, flush=True)
    found = summarise(outcomes)
    # Of a family that is refused for another of its rows, a row by tokens is shown, and not counted.
    counted = {name: o for name, o in by_tokens.items() if name.partition(":")[0] in found["verified"]}
    counts = {status: len(names) for status, names in found.items()}
    cut = {status: len(names) for status, names in summarise(counted).items()}
    if short:
        print(
            f"text families with a plan of colwise and rowwise alone that are not verified: {', '.join(short)}"
        )
    worst = max(
        (o.gradient for o in [*outcomes.values(), *by_tokens.values()] if o.status == "verified"), default=0.0
    )
    last = (
        f"families: {counts['verified']} verified, {counts['refused']} refused, {counts['failed']} failed, "
        f"{counts['missing']} missing in transformers, of {sum(counts.values())} ({len(chosen)} rows); "
        f"of the verified by tokens: {cut['verified']} verified, {cut['refused']} refused, {cut['failed']} failed, "
        f"worst gradient error {worst:.2e}, {time.perf_counter() - start_s:.0f} s"
    )
    print(last)
    enough = counts["verified"] >= VERIFIED_BAR and cut["verified"] >= BY_TOKENS_BAR and not short
    failed = any(o.status == "failed" for o in [*outcomes.values(), *by_tokens.values()])
    return 0 if (options.only or options.experts or enough) and not failed else 1


def summarise(outcomes: dict[str, Outcome]) -> dict[str, set[str]]:
    """The families by outcome; one with several rows (gemma4, gemma4:moe) is verified if all of them are."""
    rows: dict[str, set[str]] = {}
    for name, outcome in outcomes.items():
        rows.setdefault(name.partition(":")[0], set()).add(outcome.status)
    by_status: dict[str, set[str]] = {"verified": set(), "refused": set(), "failed": set(), "missing": set()}
    for name, statuses in rows.items():
        status = next(s for s in ("failed", "missing", "refused", "verified") if s in statuses)
        by_status[status].add(name)
    return by_status


if __name__ == "__main__":
    sys.exit(main())
