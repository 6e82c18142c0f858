"""`fourfold dryrun`: one rank's training step on any grid, without devices."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fourfold.cli.arguments import add_engine, positive
from fourfold.config.schema import EngineSection


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "dryrun",
        help="run one rank's step on any grid without a device: memory, traffic, errors",
        description="Run the training code of one rank of any grid on fake tensors: memory by category, every collective, "
        "every operation, and every error that a real run would raise. Nothing is measured.",
    )
    parser.add_argument(
        "config", type=Path, help="config.json of a Hugging Face model, or the folder it is in"
    )
    sizes = "sizes of the four axes, such as 8,4,1,2"
    parser.add_argument("--grid", type=grid_shape, required=True, metavar="DATA,Z,Y,X", help=sizes)
    parser.add_argument(
        "--global-batch-size", type=positive, required=True, help="the global batch in sequences"
    )
    parser.add_argument("--seq-len", type=positive, required=True, help="tokens per sequence")
    parser.add_argument(
        "--micro-batches", type=positive, default=1, help="number of micro-batches per step (default: 1)"
    )
    add_engine(parser, *EngineSection.model_fields)
    parser.add_argument(
        "--target",
        choices=("cuda", "cpu"),
        default="cuda",
        help="the device type of the real run (default: cuda)",
    )
    parser.add_argument("--rank", type=int, default=0, help="the rank to run (default: 0)")
    parser.add_argument("--roles", action="store_true", help="also show the role of each module")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all operations and collectives to this file"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    # torch and transformers take seconds to import
    from fourfold.dry_run.run import dryrun
    from fourfold.mesh.axes import AXES
    from fourfold.weights.overlap import Overlap

    result = dryrun(
        options.config,
        options.grid,
        sequences=options.global_batch_size,
        length=options.seq_len,
        micro_batches=options.micro_batches,
        precision=options.precision,
        activations=options.activations,
        activation_checkpointing=options.activation_checkpointing,
        weights=options.weights,
        overlap=Overlap(keep_inputs=options.keep_inputs, keep_bytes=options.keep_weights_bytes),
        target=options.target,
        rank=options.rank,
    )
    # Decisions and options without effect; the report with roles includes them.
    print(result.report if options.roles else "\n".join(result.report.notes))
    print(result)
    if options.json:
        events = [{"event": type(e).__name__.lower(), **asdict(e)} for e in result.trace.events]
        options.json.write_text(
            json.dumps(
                {
                    "grid": dict(zip(AXES, options.grid, strict=True)),
                    "activations": result.report.activations,
                    "peak": asdict(result.peak),
                    "between_steps": result.trace.before,
                    "events": events,
                }
            )
        )
    return 0


def grid_shape(text: str) -> tuple[int, int, int, int]:
    """Four sizes, separated by commas."""
    try:
        data, z, y, x = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a grid; give DATA,Z,Y,X as four whole numbers, like 8,4,1,2"
        ) from None
    return data, z, y, x
