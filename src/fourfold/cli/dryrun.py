"""`fourfold dryrun`: a training step of one rank of any world, without devices."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "dryrun",
        help="run one rank's step of any grid on no device: memory, traffic, errors",
        description="Run the code that trains, of one rank of any grid, on fake tensors: memory by category, every "
        "collective, every operation, and every error that the real start would raise. Nothing is a measurement.",
    )
    parser.add_argument(
        "config", type=Path, help="config.json of a Hugging Face model, or the folder it is in"
    )
    parser.add_argument("--grid", type=grid_shape, required=True, metavar="DATA,Z,Y,X")
    parser.add_argument("--sequences", type=int, required=True, help="the global batch of a step")
    parser.add_argument("--length", type=int, required=True, help="tokens of a sequence")
    parser.add_argument(
        "--micro-batches", type=int, default=1, help="parts in which a rank takes its sequences"
    )
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--activations", choices=("auto", "replicated", "token-sharded"), default="auto")
    parser.add_argument(
        "--keep-inputs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="of token-sharded activations: keep gathered inputs for backward, or gather them again",
    )
    parser.add_argument("--activation-checkpointing", choices=("none", "full"), default="none")
    parser.add_argument("--weights", choices=("auto", "fsdp2", "streamed"), default="auto")
    parser.add_argument(
        "--keep-weights-bytes",
        type=int,
        default=0,
        help="of streamed weights: so many gathered bytes wait for backward",
    )
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda", help="the devices it is for")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument(
        "--every-block", action="store_true", help="trace blocks that are alike one by one, too"
    )
    parser.add_argument("--roles", action="store_true", help="show what each module becomes, too")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all operations and collectives there"
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
        sequences=options.sequences,
        length=options.length,
        micro_batches=options.micro_batches,
        precision=options.precision,
        activations=options.activations,
        activation_checkpointing=options.activation_checkpointing,
        weights=options.weights,
        overlap=Overlap(keep_inputs=options.keep_inputs, keep_bytes=options.keep_weights_bytes),
        target=options.target,
        rank=options.rank,
        every_block=options.every_block,
    )
    # What was decided, and what of the options has no effect; with the roles they are in the report.
    print(result.report if options.roles else "\n".join(result.report.notes))
    print(result)
    if options.json:
        peak = result.peak
        events = [{"event": type(e).__name__.lower(), **asdict(e)} for e in result.trace.events]
        options.json.write_text(
            json.dumps(
                {
                    "grid": dict(zip(AXES, options.grid, strict=True)),
                    "activations": result.report.activations,
                    "peak": {"bytes": peak.bytes, "by_category": peak.by_category, "event": peak.event},
                    "between_steps": result.trace.before,
                    "events": events,
                }
            )
        )
    return 0


def grid_shape(text: str) -> tuple[int, int, int, int]:
    """Four numbers with commas between them."""
    try:
        data, z, y, x = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a grid; give DATA,Z,Y,X as four whole numbers, like 8,4,1,2"
        ) from None
    return data, z, y, x
