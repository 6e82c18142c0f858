"""`fourfold plan`: predict step time and memory of every layout, and rank them."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

from fourfold.cli.arguments import add_engine, positive
from fourfold.planner.cost.step import Prices
from fourfold.planner.dry_run_estimate import Job, schedule_of, simulate_step
from fourfold.planner.inputs import cluster as clusters
from fourfold.planner.inputs.workload import Workload, from_config
from fourfold.planner.plan import plan as make_plan
from fourfold.planner.show import tables
from fourfold.planner.show.page import write_page
from fourfold.planner.show.trace import chrome_trace
from fourfold.planner.workers import estimate_by_dry_run


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="rank the layouts of a model on a cluster",
        description="Predict step time and memory of every layout (data, z, y, x) of a model on a cluster, and rank those "
        "that fit. Needs no device; every number is a prediction. With --compare-to, compare a run with its prediction.",
    )
    parser.add_argument(
        "config", type=Path, nargs="?", help="config.json of a Hugging Face model, or the folder it is in"
    )
    parser.add_argument(
        "--cluster", required=True, help=f"a preset ({', '.join(clusters.presets())}) or a TOML file"
    )
    parser.add_argument("--gpus", type=positive, help="number of ranks, one per device")
    parser.add_argument("--seq-len", type=positive, help="tokens per sequence")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--global-batch-size", type=positive, help="the global batch in sequences")
    batch.add_argument("--batch-tokens", type=amount, help="the global batch in tokens, such as 4M")
    parser.add_argument(
        "--simulate",
        type=int,
        default=0,
        metavar="N",
        help="also simulate the best N layouts over their dry runs, which takes seconds to a minute each (default: 0)",
    )
    add_engine(parser, "weights", unless="FSDP2 on GPUs, streamed on CPUs")
    add_engine(parser, "precision", unless="bf16 on GPUs, fp32 on CPUs")
    add_engine(parser, "activations", "keep_inputs", unless="consider both")
    parser.add_argument("--rows", type=positive, default=10, help="number of layouts to show (default: 10)")
    parser.add_argument(
        "--explain",
        nargs=2,
        metavar=("A", "B"),
        help="explain why A is faster than B; give row numbers of the table, or DATA,Z,Y,X",
    )
    parser.add_argument(
        "--tokens", type=amount, help="number of training tokens, such as 15T, to estimate the training time"
    )
    parser.add_argument("--price", type=float, help="price of a device hour")
    parser.add_argument("--watts", type=float, help="power of a device in watts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all estimates to this file")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML report")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the timeline of the best layout, for ui.perfetto.dev",
    )
    parser.add_argument(
        "--compare-to",
        type=Path,
        metavar="RUN",
        help="a file written by fourfold.save_run, to compare with its prediction",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    cluster = clusters.load(options.cluster)
    if options.compare_to:
        from fourfold.planner.show.compare import compare, read_run

        print(compare(read_run(options.compare_to), cluster))
        return 0
    sequences = _check(options)
    path = options.config / "config.json" if options.config.is_dir() else options.config
    workload = from_config(path, path.parent.name if path.stem == "config" else path.stem)
    plan = make_plan(
        path,
        cluster,
        options.gpus,
        sequences=sequences,
        length=options.seq_len,
        simulate=options.simulate,
        weights=options.weights,
        precision=options.precision,
        activations=options.activations,
        keep_inputs=(True, False) if options.keep_inputs is None else (options.keep_inputs,),
    )
    precision = options.precision or cluster.precision
    prices = Prices(workload, cluster, options.seq_len, schedule_of(cluster, precision))
    title = f"{workload.name} ({_billions(workload)}) on {options.gpus} devices of {cluster.name}, {sequences} x {options.seq_len} tokens"
    width = min(max(shutil.get_terminal_size((150, 24)).columns, 80), 180)
    print(tables.show_plan(plan, cluster, title, options.rows, width))
    best = plan.best  # raises with the nearest miss, if there is none
    print("\n".join(tables.speedups(plan)))
    if options.tokens:
        print(tables.budget(best, options.tokens, price_per_hour=options.price, watts=options.watts))
    elif options.price is not None or options.watts is not None:
        raise ValueError("--price and --watts need the number of training tokens; give --tokens, such as 15T")
    if options.explain:
        a, b = (tables.pick_layout(word, plan, prices, sequences) for word in options.explain)
        print(tables.explain(a, b))
    if options.json:
        options.json.write_text(json.dumps(tables.as_json(plan, title)))
    if options.html:
        write_page(options.html, plan, cluster, title)
        print(f"wrote {options.html}")
    if options.trace:
        job = Job(path, sequences, options.seq_len, cluster.target, precision)
        timeline, _ = simulate_step(estimate_by_dry_run(job, best.layout), cluster, keep_spans=True)
        options.trace.write_text(json.dumps(chrome_trace(timeline, str(best.layout))))
        print(f"wrote {options.trace}: open it in ui.perfetto.dev")
    return 0


def _check(options: argparse.Namespace) -> int:
    """Reject missing or invalid options; the number of sequences of the global batch."""
    needed = {
        "config.json": options.config,
        "--gpus": options.gpus,
        "--seq-len": options.seq_len,
        "--global-batch-size (or --batch-tokens)": options.global_batch_size or options.batch_tokens,
    }
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise ValueError(f"a plan needs {', '.join(missing)} as well; --compare-to RUN needs --cluster alone")
    if options.global_batch_size is not None:
        return int(options.global_batch_size)
    sequences = int(options.batch_tokens // options.seq_len)
    if sequences < 1:
        raise ValueError(
            f"a batch of {options.batch_tokens:.0f} tokens is smaller than a sequence of {options.seq_len}; use more tokens"
        )
    return sequences


def _billions(workload: Workload) -> str:
    count = workload.parameters
    return f"{count / 1e9:.1f}B" if count >= 1e8 else f"{count / 1e6:.1f}M"


def amount(text: str) -> float:
    """A number with an optional suffix K, M, B or T.

    Example:
        >>> amount("4M")
        4000000.0
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kKmMbBgGtT]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount; give a number such as 4000000 or 4M")
    return float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}[match[2].lower()]
