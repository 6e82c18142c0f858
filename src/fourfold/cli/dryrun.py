"""`fourfold dryrun`: one rank's training step on any grid, without devices."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.cli.arguments import add_changes, add_engine, expert_load, positive
from fourfold.config.run_file import load_run
from fourfold.config.schema import EngineSection

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig
    from fourfold.parallel.lora import Lora


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "dryrun",
        help="run one rank's step on any grid without a device: memory, traffic, errors",
        description="Run the training code of one rank of any grid on fake tensors: memory by category, every collective, "
        "every operation, and the errors that model and grid would raise. Nothing is measured.",
        epilog="Example: fourfold dryrun run.toml --set grid.z=64 --set grid.x=4",
    )
    parser.add_argument(
        "model",
        help="a run config (TOML), or a Hugging Face config.json, the folder it is in, or a hub id",
    )
    add_changes(parser)
    given = "default: the run config's"
    parser.add_argument(
        "--grid",
        type=grid_shape,
        metavar="DATA,Z,Y,X",
        help=f"sizes of the four axes, such as 8,4,1,2 ({given})",
    )
    parser.add_argument(
        "--gpus",
        type=positive,
        help="number of ranks, if the run config sets no grid and --grid is not given",
    )
    parser.add_argument("--global-batch-size", type=positive, help=f"the global batch in sequences ({given})")
    parser.add_argument("--seq-len", type=positive, help=f"tokens per sequence ({given})")
    parser.add_argument(
        "--micro-batches", type=positive, help=f"number of micro-batches per step ({given}, or 1)"
    )
    parser.add_argument(
        "--sequence-ranks",
        type=positive,
        metavar="C",
        help=f"neighbours along z that share sequences ({given}, or 1)",
    )
    for name, field in EngineSection.model_fields.items():
        add_engine(parser, name, unless=f"the run config's, or {field.default}")
    parser.add_argument(
        "--lora",
        type=positive,
        metavar="RANK",
        help="train adapters of this rank for all linears but the head, and freeze the weights (default: as the run config says)",
    )
    parser.add_argument(
        "--quantization",
        choices=("none", "nf4"),
        help="of the frozen weights of linears in blocks, with adapters (default: as the run config says, or none)",
    )
    parser.add_argument(
        "--target",
        choices=("cuda", "cpu"),
        default="cuda",
        help="the device type of the real run (default: cuda)",
    )
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="memory of a device in GiB, by which activation checkpointing and accumulation 'auto' are chosen (default: that of the run "
        "config's cluster; without one nothing is recomputed, and gradients are whole)",
    )
    parser.add_argument(
        "--expert-load",
        type=expert_load,
        default=1.0,
        metavar="LOAD",
        help="where ranks own experts, the rows of the rank as a multiple of the mean, or worst: all that routers can send to it (default: 1.0)",
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
    from fourfold.parallel.lora import Lora
    from fourfold.train.loop.model import adapters_of, axes_of
    from fourfold.untrusted_input import find_model_config
    from fourfold.weights.overlap import Overlap

    values: dict[str, Any] = {"micro_batches": 1, "sequence_ranks": 1}
    config, engine, where = None, EngineSection(), options.model
    if options.model.endswith(".toml"):
        config = _with_layout(load_run(options.model, options.set), options)
        engine, where = config.engine, config.model.config or config.model.pretrained
        values |= {
            "grid": config.shape,
            "global_batch_size": config.sequences,
            "seq_len": config.data.sequence_length,
            "sequence_ranks": config.sequence_ranks,
        }
    elif options.set or options.gpus:
        raise ValueError(
            "--set and --gpus are for a run config; give --grid DATA,Z,Y,X and the other options"
        )
    sizes = ("grid", "global_batch_size", "seq_len")
    values |= {
        name: given
        for name in (*sizes, "micro_batches", "sequence_ranks", *EngineSection.model_fields)
        if (given := getattr(options, name)) is not None
    }
    missing = [name for name in sizes if name not in values]
    if missing:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ValueError(f"a dry run of a model needs {words} as well; a run config has them")
    if config is not None and options.micro_batches is None:
        rows = _rows(values)
        values["micro_batches"] = max(1, rows // (config.batch.micro_batch_sequences or rows or 1))
    adapters = adapters_of(config.lora) if config is not None else None
    if options.lora:
        adapters = Lora(options.lora)
    if options.quantization:
        if adapters is None:
            raise ValueError("--quantization is for the frozen weights of adapters; give --lora as well")
        adapters = replace(adapters, quantization=options.quantization)
    chosen = {name: values.get(name, getattr(engine, name)) for name in EngineSection.model_fields}
    if (asked := engine.model_copy(update=chosen)).is_open:
        chosen |= _that_fit(config, where, values, asked, options, adapters)
    result = dryrun(
        find_model_config(where),
        values["grid"],
        sequences=values["global_batch_size"],
        length=values["seq_len"],
        micro_batches=values["micro_batches"],
        sequence_ranks=values["sequence_ranks"],
        precision=chosen["precision"],
        activations=chosen["activations"],
        activation_checkpointing=chosen["activation_checkpointing"],
        checkpointed_blocks=chosen["checkpointed_blocks"],
        accumulation=chosen["accumulation"],
        attention=chosen["attention"],
        weights=chosen["weights"],
        compile=chosen["compile"],
        activation_offloading=chosen["activation_offloading"],
        float8=chosen["float8"],
        lora=adapters,
        experts=axes_of(chosen["experts"]),
        overlap=Overlap(keep_inputs=chosen["keep_inputs"], keep_bytes=chosen["keep_weights_bytes"]),
        optimizer="adamw" if config is None else config.optimizer.name,
        target=options.target,
        rank=options.rank,
        expert_load=options.expert_load,
    )
    # Decisions and options without effect; the report with roles includes them.
    share = values["sequence_ranks"]
    print(
        f"{values['global_batch_size']} x {values['seq_len']} tokens per step; {values['micro_batches']} micro-batches of "
        f"{_rows(values) // values['micro_batches']} sequences on each rank"
        + (f", which {share} ranks share" if share > 1 else "")
    )
    print(result.report if options.roles else "\n".join(result.report.notes))
    print(result)
    if options.json:
        events = [{"event": type(e).__name__.lower(), **asdict(e)} for e in result.trace.events]
        options.json.write_text(
            json.dumps(
                {
                    "grid": dict(zip(AXES, values["grid"], strict=True)),
                    "activations": result.report.activations,
                    "peak": asdict(result.peak),
                    "between_steps": result.trace.before,
                    "events": events,
                }
            )
        )
    return 0


def _rows(values: dict[str, Any]) -> int:
    """Sequences that a rank has a part of."""
    data, z, *_ = values["grid"]
    return int(values["global_batch_size"] * values["sequence_ranks"] // (data * z))


def _with_layout(config: RunConfig, options: argparse.Namespace) -> RunConfig:
    """The run with the layout that it would get on these ranks."""
    if options.grid is not None:
        return config
    if not config.grid.auto:
        if options.gpus not in (None, config.grid.size):
            raise ValueError(
                f"--gpus {options.gpus} differs from the {config.grid.size} ranks of the grid that {options.model} sets; leave "
                "it out, or change the grid with --set"
            )
        return config
    if options.gpus is None:
        raise ValueError(
            f"{options.model} sets no grid; give the number of ranks with --gpus, or --grid DATA,Z,Y,X"
        )
    from fourfold.train.auto_layout import choose_layout

    return choose_layout(config, options.gpus)


def _that_fit(
    config: RunConfig | None,
    model: Any,
    values: dict[str, Any],
    engine: EngineSection,
    options: argparse.Namespace,
    adapters: Lora | None,
) -> dict[str, Any]:
    """What a run on devices of that memory would choose."""
    from fourfold.planner.inputs import cluster as clusters
    from fourfold.train.memory_fit import fields_that_fit
    from fourfold.untrusted_input import find_model_config

    gib = options.memory
    if gib is None and config is not None and config.grid.cluster is not None:
        gib = clusters.load(config.grid.cluster).device.memory_gib
    rows = _rows(values) // values["micro_batches"]
    return fields_that_fit(
        find_model_config(model),
        values["grid"],
        engine,
        (rows, values["seq_len"], values["micro_batches"]),
        "adamw" if config is None else config.optimizer.name,
        None if gib is None else gib * 2**30,
        options.target,
        0 if adapters is None else adapters.rank,
        "none" if adapters is None else adapters.quantization,
        values["sequence_ranks"],
    )


def grid_shape(text: str) -> tuple[int, int, int, int]:
    """Four sizes, separated by commas."""
    try:
        data, z, y, x = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a grid; give DATA,Z,Y,X as four whole numbers, like 8,4,1,2"
        ) from None
    return data, z, y, x
