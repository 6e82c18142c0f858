"""`fourfold plan`: which layout, does it fit, how long is a step, what limits it."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.planner.cost.step import Estimate, Prices, estimate_with
from fourfold.planner.dry_run_estimate import precision_of, schedule_of, simulate_step, target_of
from fourfold.planner.inputs import cluster as clusters
from fourfold.planner.inputs.cluster import Cluster
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.inputs.workload import Workload, from_config
from fourfold.planner.plan import plan as make_plan
from fourfold.planner.search import Plan
from fourfold.planner.show.page import write_page
from fourfold.planner.show.tables import (
    budget,
    explain,
    rate_that_hides,
    sequence_parallel_speedup,
    show_plan,
    y_speedup,
)
from fourfold.planner.show.trace import chrome_trace
from fourfold.planner.workers import estimate_by_dry_run

if TYPE_CHECKING:
    from fourfold.planner.simulate import Simulated


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="rank the layouts of a model on a cluster before anything runs",
        description="Predict step time and memory of every layout (data, z, y, x) of a model on a cluster, and rank those "
        "that fit. Needs no device; every figure is a prediction. With --against, hold a run against its prediction.",
    )
    parser.add_argument(
        "config", type=Path, nargs="?", help="config.json of a Hugging Face model, or the folder it is in"
    )
    parser.add_argument(
        "--cluster", required=True, help=f"a preset ({', '.join(clusters.presets())}) or a TOML file"
    )
    parser.add_argument("--gpus", type=int, help="ranks, one a device")
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--sequences", type=int, help="the global batch in sequences")
    batch.add_argument("--batch-tokens", type=amount, help="the global batch in tokens, such as 4M")
    parser.add_argument(
        "--simulate",
        type=int,
        default=20,
        metavar="N",
        help="simulate the best N over their dry runs, seconds each; 20, unless given (0: by formulas alone, at once)",
    )
    parser.add_argument(
        "--weights", choices=("fsdp2", "streamed"), help="FSDP2 on GPUs and streamed on CPUs, unless given"
    )
    parser.add_argument(
        "--precision", choices=("bf16", "fp32"), help="bf16 on GPUs and fp32 on CPUs, unless given"
    )
    parser.add_argument(
        "--activations",
        choices=("replicated", "token-sharded"),
        help="what x and y ranks would repeat: replicated, or cut by tokens; both are looked at, unless given",
    )
    parser.add_argument(
        "--keep-inputs",
        action=argparse.BooleanOptionalAction,
        help="of token-sharded activations: keep gathered inputs for backward, or gather them again; both are looked at, unless "
        "given",
    )
    parser.add_argument("--rows", type=int, default=10, help="layouts to show")
    parser.add_argument(
        "--explain", nargs=2, metavar=("A", "B"), help="why A beats B: places in the table, or DATA,Z,Y,X"
    )
    parser.add_argument("--tokens", type=amount, help="the tokens to train on, for the time they take")
    parser.add_argument("--price", type=float, help="of a device hour")
    parser.add_argument("--watts", type=float, help="of a device")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all estimates there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page to look at")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the best layout's timeline, for ui.perfetto.dev"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="RUN",
        help="what fourfold.save_run wrote: compare it with its prediction",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    cluster = clusters.load(options.cluster)
    if options.against:
        from fourfold.planner.show.compare import compare, read_run

        print(compare(read_run(options.against), cluster))
        return 0
    sequences = _check(options)
    path = options.config / "config.json" if options.config.is_dir() else options.config
    workload = from_config(path, path.parent.name if path.stem == "config" else path.stem)
    plan = make_plan(
        path,
        cluster,
        options.gpus,
        sequences=sequences,
        length=options.length,
        simulate=options.simulate,
        weights=options.weights,
        precision=options.precision,
        activations=options.activations,
        keep_inputs=(True, False) if options.keep_inputs is None else (options.keep_inputs,),
    )
    precision = options.precision or precision_of(cluster)
    prices = Prices(workload, cluster, options.length, schedule_of(cluster, precision))
    title = f"{workload.name} ({_billions(workload)}) on {options.gpus} devices of {cluster.name}, {sequences} x {options.length} tokens"
    width = min(max(shutil.get_terminal_size((150, 24)).columns, 80), 180)
    print(show_plan(plan, cluster, title, options.rows, width))
    best = plan.best  # raises with the nearest miss, if there is none
    print(y_speedup(plan))
    if sequence_parallel_speedup(plan):
        print(sequence_parallel_speedup(plan))
    print(_what_hides(prices, best, sequences, cluster))
    if options.tokens:
        print(budget(best, options.tokens, price_per_hour=options.price, watts=options.watts))
    elif options.price is not None or options.watts is not None:
        raise ValueError(
            "--price and --watts are of a training of so many tokens; give --tokens, such as 15T"
        )
    if options.explain:
        a, b = (pick(word, plan, prices, sequences) for word in options.explain)
        print(explain(a, b))
    if options.json:
        options.json.write_text(json.dumps(as_json(plan, title)))
    if options.html or options.trace:
        timeline = _timeline(path, best, sequences, options.length, cluster, precision)
        if options.html:
            write_page(options.html, plan, cluster, title, timeline)
            print(f"wrote {options.html}")
        if options.trace:
            options.trace.write_text(json.dumps(chrome_trace(timeline, str(best.layout))))
            print(f"wrote {options.trace}: open it in ui.perfetto.dev")
    return 0


def _check(options: argparse.Namespace) -> int:
    """The sequences of the global batch."""
    lacking = [f"--{name}" for name in ("gpus", "length") if getattr(options, name) is None]
    if options.config is None:
        lacking.insert(0, "config.json")
    if options.sequences is None and options.batch_tokens is None:
        lacking.append("--sequences (or --batch-tokens)")
    if lacking:
        raise ValueError(f"a plan needs {', '.join(lacking)} as well; --against RUN needs --cluster alone")
    for name in ("gpus", "length", "sequences", "rows"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} is no number of at least 1; use one")
    if options.sequences is not None:
        return int(options.sequences)
    sequences = int(options.batch_tokens // options.length)
    if sequences < 1:
        raise ValueError(
            f"a batch of {options.batch_tokens:.0f} tokens holds no sequence of {options.length}; use more tokens"
        )
    return sequences


def _billions(workload: Workload) -> str:
    return (
        f"{workload.parameters / 1e9:.1f}B"
        if workload.parameters >= 1e8
        else f"{workload.parameters / 1e6:.1f}M"
    )


def _what_hides(prices: Prices, best: Estimate, sequences: int, cluster: Cluster) -> str:
    rates = rate_that_hides(prices, best, sequences)
    if rates is None:
        return "No bandwidth would hide all of the best layout's communication: latencies, or what nothing hides, remain."
    links = cluster.links
    if rates == (links.node_gbps, links.device_gbps):
        return "By the formulas, all but 2 % of the best layout's communication is hidden."
    return (
        f"By the formulas, all but 2 % of the best layout's communication would hide at {rates[0]:.0f} GB/s out of a node (it "
        f"has {links.node_gbps:g}) and {rates[1]:.0f} GB/s inside (it has {links.device_gbps:g})."
    )


def _timeline(
    path: Path, best: Estimate, sequences: int, length: int, cluster: Cluster, precision: str
) -> Simulated:
    dry_run = estimate_by_dry_run(path, best.layout, sequences, length, target_of(cluster), precision)
    return simulate_step(dry_run, cluster, keep_spans=True)[0]


def pick(word: str, plan: Plan, prices: Prices, sequences: int) -> Estimate:
    """A layout by its place in the table, or by its grid."""
    if word.isdigit():
        place = int(word)
        if not 1 <= place <= len(plan.ranked):
            raise ValueError(f"there is no layout number {place}; the table has 1 to {len(plan.ranked)}")
        return plan.ranked[place - 1]
    try:
        data, z, y, x = (int(part) for part in word.split(","))
    except ValueError:
        raise ValueError(f"{word!r} is no layout; give its number in the table, or DATA,Z,Y,X") from None
    found = next((e for e in plan.ranked if e.layout.grid == (data, z, y, x)), None)
    if found is not None:
        return found
    reason = next((r.reason for r in plan.rejected if r.layout.grid == (data, z, y, x)), None)
    if reason is None:
        raise ValueError(f"{word} is no grid of {plan.ranks} ranks; their product has to be {plan.ranks}")
    print(f"{word} cannot run: {reason}")
    return estimate_with(prices, Layout(data, z, y, x, activation_checkpointing="full"), sequences)


def as_json(plan: Plan, title: str) -> dict[str, Any]:
    return {
        "title": title,
        "memory_limit_bytes": plan.memory_limit_bytes,
        "considered": plan.considered,
        "notes": plan.notes,
        "ranked": [{**asdict(e), "limited_by": e.limited_by} for e in plan.ranked],
        "rejected": [asdict(r) for r in plan.rejected],
    }


def amount(text: str) -> float:
    """A number with K, M, B or T behind it, if any.

    Example:
        >>> amount("4M")
        4000000.0
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kKmMbBgGtT]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount; give a number such as 4000000 or 4M")
    return float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}[match[2].lower()]
