"""`fourfold plan`: predict step time and memory of every layout, and rank them."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.cli.arguments import add_changes, add_engine, expert_load, positive
from fourfold.config.describe import SIZES, sized_model_config
from fourfold.config.run_file import load_run
from fourfold.config.schema import BY_MEMORY, CHOSEN_ALONG, EngineSection
from fourfold.planner.cost.step import Prices
from fourfold.planner.dry_run_estimate import Job, describe, refuse_compiled, schedule_of, simulate_step
from fourfold.planner.inputs import cluster as clusters
from fourfold.planner.inputs.layout import Attention, Layout
from fourfold.planner.inputs.workload import Workload
from fourfold.planner.plan import plan as make_plan
from fourfold.planner.search import Plan
from fourfold.planner.show import tables
from fourfold.planner.show.page import write_page
from fourfold.planner.show.trace import chrome_trace
from fourfold.planner.workers import estimate_by_dry_run
from fourfold.untrusted_input import find_model_config

if TYPE_CHECKING:
    from fourfold.config.schema import RunConfig

# Of models that --size names: Llama 3's vocabulary, and a smaller one for those that a laptop trains.
VOCABULARY, SMALL_VOCABULARY = 128_256, 8_192


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="rank the layouts of a model on a cluster",
        description="Predict step time and memory of every layout (data, z, y, x) of a model on a cluster, and rank those "
        "that fit. Needs no device; every number is a prediction. With a run config, its model, batch and engine options "
        "apply. With --compare-to, compare a run with its prediction.",
        epilog="Example: fourfold plan run.toml --cluster dgx-h100 --gpus 64 --write run.toml",
    )
    parser.add_argument(
        "model",
        nargs="?",
        help="a run config (TOML), a Hugging Face config.json or the folder it is in, or a hub id",
    )
    parser.add_argument("--size", help=f"a Llama of this size instead: {', '.join(SIZES)} parameters")
    parser.add_argument(
        "--cluster",
        help=f"a preset ({', '.join(clusters.presets())}) or a TOML file (default: grid.cluster of the run config)",
    )
    add_changes(parser)
    parser.add_argument(
        "--gpus",
        type=positive,
        help="number of ranks, one per device (default: the grid's of the run config)",
    )
    given = "default: the run config's, or usual for --size"
    parser.add_argument("--seq-len", type=positive, help=f"tokens per sequence ({given})")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--global-batch-size", type=positive, help=f"the global batch in sequences ({given})")
    batch.add_argument(
        "--batch-tokens",
        type=partial(amount, thousand=1024),
        metavar="TOKENS",
        help="the global batch in tokens, such as 4194304, or 4M for 4 x 1024 x 1024",
    )
    parser.add_argument(
        "--simulate",
        type=int,
        default=0,
        metavar="N",
        help="also simulate the best N layouts over their dry runs, which takes ten to twenty seconds each on a core (default: 0)",
    )
    add_engine(parser, "weights", unless="the run config's, or FSDP2 on GPUs, streamed on CPUs")
    add_engine(parser, "precision", unless="the run config's, or bf16 on GPUs, fp32 on CPUs")
    add_engine(parser, "float8", unless="the run config's, or none")
    add_engine(parser, "compile", unless="the run config's, or on GPUs if nothing is simulated")
    add_engine(parser, "activation_offloading", unless="the run config's, or no")
    add_engine(
        parser,
        "activations",
        "keep_inputs",
        unless="the run config's if it sets no grid, otherwise consider both",
    )
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
    add_engine(parser, "experts", unless="the run config's, or consider all")
    parser.add_argument(
        "--expert-load",
        type=expert_load,
        default=1.0,
        metavar="LOAD",
        help="rows of the rank with most, where ranks own experts, as a multiple of the mean, or worst: all that routers can send to one (default: 1.0)",
    )
    parser.add_argument(
        "--sequence-ranks",
        type=_ranks_or_auto,
        metavar="C",
        help="neighbours along z that share sequences; auto: where that lets the batch divide, or makes micro-batches smaller (default: the run "
        "config's, or 1)",
    )
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
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the fastest layout into this run config"
    )
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
    if options.compare_to:
        from fourfold.planner.show.compare import compare, read_run

        (cluster,) = _needed({"--cluster": options.cluster})
        print(compare(read_run(options.compare_to), clusters.load(cluster)))
        return 0
    asked = _Asked.of(options)
    cluster = clusters.load(asked.cluster)
    wanted = asked.options.get("compile")
    if options.trace and wanted:
        refuse_compiled("leave out --trace or --compile")
    # Dry runs, which are simulated and traced, do not follow compiled blocks.
    quantization = asked.options.get("quantization", "none")
    can_compile = (
        quantization == "none" and cluster.target == "cuda" and not options.simulate and not options.trace
    )
    is_compiled = can_compile if wanted is None else wanted
    plan = make_plan(
        asked.model,
        cluster,
        asked.gpus,
        **{**asked.options, "compile": None if wanted is None and can_compile else is_compiled},
        simulate=options.simulate,
    )
    workload = describe(asked.model)[1]
    assert workload is not None
    sequences, length = asked.options["sequences"], asked.options["length"]
    precision = asked.options["precision"] or cluster.precision
    optimizer = asked.options.get("optimizer", "adamw")
    workload = workload.attended(asked.options.get("attention", "auto"), cluster.target, precision)
    lora_rank = asked.options.get("lora_rank", 0)
    workload = workload.adapted(lora_rank, quantization)
    float8 = asked.options.get("float8", "none")
    title = f"{asked.name} ({_billions(workload)}) on {asked.gpus} devices of {cluster.name}, {sequences} x {length} tokens"
    width = min(max(shutil.get_terminal_size((150, 24)).columns, 80), 180)
    print(tables.show_plan(plan, cluster, title, options.rows, width))
    if asked.fixed:
        print(f"Only layouts with {asked.fixed} are ranked, as the run config sets it.")
    best = plan.best  # raises with the nearest miss, if there is none
    print("\n".join(tables.speedups(plan)))
    if options.tokens:
        print(tables.budget(best, options.tokens, price_per_hour=options.price, watts=options.watts))
    elif options.price is not None or options.watts is not None:
        raise ValueError("--price and --watts need the number of training tokens; give --tokens, such as 15T")
    if options.explain:
        schedule = schedule_of(cluster, precision, is_compiled=is_compiled, float8=float8)
        load = options.expert_load
        prices = Prices(workload, cluster, length, schedule, optimizer=optimizer, expert_load=load)
        a, b = (tables.pick_layout(word, plan, prices, sequences) for word in options.explain)
        print(tables.explain(a, b))
    if options.json:
        options.json.write_text(json.dumps(tables.as_json(plan, title)))
    if options.html:
        write_page(options.html, plan, cluster, title)
        print(f"wrote {options.html}")
    if options.trace:
        attention: Attention | None = "flex" if workload.is_flex else None
        job = Job(
            asked.model,
            sequences,
            length,
            cluster.target,
            precision,
            None,
            optimizer,
            attention,
            float8,
            lora_rank,
            quantization,
            options.expert_load,
        )
        timeline, _ = simulate_step(estimate_by_dry_run(job, best.layout), cluster, keep_spans=True)
        options.trace.write_text(json.dumps(chrome_trace(timeline, str(best.layout))))
        print(f"wrote {options.trace}: open it in ui.perfetto.dev")
    if options.write:
        names = ("compile", "activation_offloading")
        asked_for = {name: asked.options[name] for name in names if asked.options.get(name) is not None}
        planned_for: dict[str, Any] = {
            "engine.precision": precision,
            "engine.float8": float8,
            "optimizer.name": optimizer,
        }
        planned_for |= {"lora.rank": lora_rank, "lora.quantization": quantization}
        print(_write(options.write, plan, sequences, length, asked_for, planned_for))
    return 0


@dataclass(frozen=True)
class _Asked:
    """What to plan, from the options and from a run config."""

    model: Any  # as `fourfold.plan` takes it
    name: str
    cluster: str
    gpus: int
    options: dict[str, Any]  # of `fourfold.plan`
    fixed: str  # what the run config sets of that which a plan could choose

    @staticmethod
    def of(options: argparse.Namespace) -> _Asked:
        if options.model is not None and options.size is not None:
            raise ValueError(f"{options.model} and --size {options.size} are two models; give one of them")
        run = None
        if options.model is not None and options.model.endswith(".toml"):
            run = load_run(options.model, options.set)
        elif options.set:
            raise ValueError("--set changes a run config; give one instead of a model, or leave it out")
        planned = _without_layout(run, options.set) if run else None
        model, name, found = _of_run(planned) if planned else _of_model(options)
        batch = options.global_batch_size or options.batch_tokens or found.get("sequences")
        _, gpus, cluster, length, sequences = _needed(
            {
                "a model (or --size)": model,
                "--gpus": options.gpus or (run.grid.size if run and not run.grid.auto else None),
                "--cluster": options.cluster or (run.grid.cluster if run else None),
                "--seq-len": options.seq_len or found.get("length"),
                "--global-batch-size (or --batch-tokens)": batch,
            }
        )
        if options.batch_tokens:
            sequences = _sequences(options.batch_tokens, length)
        own = {
            name: getattr(options, name)
            for name in ("weights", "precision", "compile", "float8", "activation_offloading", "activations")
            if getattr(options, name) is not None
        }
        if options.lora:
            own["lora_rank"] = options.lora
        if options.quantization:
            own["quantization"] = options.quantization
        own["expert_load"] = options.expert_load
        if options.experts is not None:
            of_all = options.experts
            own["experts"] = (tuple(of_all) if isinstance(of_all, list) else of_all,)
        if options.sequence_ranks:
            own["sequence_ranks"] = options.sequence_ranks
        if options.keep_inputs is not None:
            own["keep_inputs"] = (options.keep_inputs,)
        wanted = {"precision": None, **found, **own, "sequences": sequences, "length": length}
        return _Asked(model, name, cluster, gpus, wanted, _fixed(planned.engine) if planned else "")


def _without_layout(run: RunConfig, changes: list[str]) -> RunConfig:
    from fourfold.train.auto_layout import without_layout  # torch takes seconds to import

    names = [change.partition("=")[0].strip() for change in changes]
    return without_layout(run, [name.removeprefix("engine.") for name in names])


def _fixed(engine: EngineSection) -> str:
    """What the run config sets of that which a plan could choose, in words."""
    fixed = [n for n in sorted(CHOSEN_ALONG) if n in engine.model_fields_set]
    fixed += [n for n in ("activations", "experts", *BY_MEMORY) if getattr(engine, n) not in ("auto", None)]
    return ", ".join(f"engine.{name} = {getattr(engine, name)}" for name in fixed)


def _of_run(run: RunConfig) -> tuple[Any, str, dict[str, Any]]:
    from fourfold.train.auto_layout import plan_options  # torch takes seconds to import

    where = run.model.config or run.model.pretrained
    assert where is not None
    path = find_model_config(where)
    return path, _name_of(path, str(where)), plan_options(run)


def _of_model(options: argparse.Namespace) -> tuple[Any, str, dict[str, Any]]:
    if options.size is not None:
        if options.size not in SIZES:
            raise ValueError(f"there is no size {options.size!r}; use one of {', '.join(SIZES)}")
        size = SIZES[options.size]
        usual = {"length": size.length, "sequences": size.batch_tokens // size.length}
        config = sized_model_config(options.size, SMALL_VOCABULARY if size.is_tied else VOCABULARY)
        return config, f"Llama {options.size.upper()}", usual
    if options.model is None:
        return None, "", {}
    path = find_model_config(options.model)
    return path, _name_of(path, options.model), {}


def _name_of(path: Path, given: str) -> str:
    if path.stem != "config":
        return path.stem
    return path.resolve().parent.name if Path(given).exists() else given


def _needed(values: dict[str, Any]) -> list[Any]:
    """The values; raises if one is missing."""
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise ValueError(f"a plan needs {', '.join(missing)} as well; see fourfold plan --help")
    return list(values.values())


def _sequences(tokens: float, length: int) -> int:
    sequences = int(tokens // length)
    if sequences < 1:
        raise ValueError(
            f"a batch of {tokens:.0f} tokens is smaller than a sequence of {length}; use more tokens"
        )
    return sequences


def _write(
    file: Path,
    plan: Plan,
    sequences: int,
    length: int,
    asked_for: dict[str, bool],
    planned_for: dict[str, Any],
) -> str:
    """Write the fastest layout into a run config that was planned, and what was ``asked_for``; what was written.

    What it was ``planned_for`` besides has to be in the run config already.
    """
    from fourfold.config.edit import with_fields
    from fourfold.train.auto_layout import fastest, layout_fields, without_layout

    run = load_run(file)
    if (run.sequences, run.data.sequence_length) != (sequences, length):
        raise ValueError(
            f"{file} has a batch of {run.sequences} x {run.data.sequence_length} tokens, and the plan is for {sequences} x "
            f"{length}; plan the run config itself: fourfold plan {file}"
        )
    for field, wanted in planned_for.items():
        section, name = field.split(".")
        if (own := getattr(getattr(run, section), name)) != wanted:
            raise ValueError(
                f"{file} has {field}={own}, and the plan is for {wanted}; set it in {file}, and plan again"
            )
    planned = without_layout(run)
    best = fastest(planned, plan).layout
    fields = layout_fields(planned, best)
    fields["engine"] |= asked_for
    # What the run config leaves open and the layout does not need stays open.
    fields["engine"] = {
        name: value for name, value in fields["engine"].items() if _changes(run, best, name, value)
    }
    if best.sequence_ranks == run.batch.sequence_ranks:
        del fields["batch"]["sequence_ranks"]
    file.write_text(with_fields(file.read_text(), fields))
    others = [
        f", {name} = {str(fields['engine'][name]).lower()}" for name in asked_for if name in fields["engine"]
    ]
    return f"wrote the layout {best}{''.join(others)} into {file}"


def _changes(run: RunConfig, layout: Layout, name: str, value: Any) -> bool:
    if name in ("activations", "keep_inputs") and layout.x * layout.y == 1:
        return False
    if name == "weights":
        return False  # the planner takes the run config's, and "auto" is what it assumes
    return bool(getattr(run.engine, name) != value)


def _ranks_or_auto(text: str) -> int | str:
    return text if text == "auto" else positive(text)


def _billions(workload: Workload) -> str:
    count = workload.parameters
    return f"{count / 1e9:.1f}B" if count >= 1e8 else f"{count / 1e6:.1f}M"


def amount(text: str, thousand: int = 1000) -> float:
    """A number with an optional suffix K, M, B or T.

    Example:
        >>> amount("4M"), amount("4M", thousand=1024)
        (4000000.0, 4194304.0)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kKmMbBgGtT]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount; give a number such as 4000000 or 4M")
    power = {"": 0, "k": 1, "m": 2, "b": 3, "g": 3, "t": 4}[match[2].lower()]
    return float(match[1]) * float(thousand) ** power
