"""`fourfold init` and `fourfold config`: write a starting run config, and show its fields."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fourfold.cli.arguments import add_changes


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "init",
        help="write a starting run config",
        description="Write a run config with every field and its description, and the config.json of a Llama of the chosen size.",
    )
    parser.add_argument("file", type=Path, help="the file to write, such as run.toml")
    parser.add_argument(
        "--size", default="1m", help="parameters: 1m, 10m, 125m, 1b, 8b, 70b or 405b (default: 1m)"
    )
    parser.add_argument(
        "--data", type=Path, default=Path("data"), help="the folder of the prepared data set (default: data)"
    )
    parser.add_argument(
        "--model", help="a config.json, a folder or a hub id to use instead of the one that is written"
    )
    parser.set_defaults(run=init)

    about = "show the fields of a run config"
    parser = commands.add_parser("config", help=about, description=f"{about.capitalize()}, or check one.")
    parser.add_argument("file", nargs="?", type=Path, help="a run config to check and show")
    add_changes(parser)
    parser.add_argument("--schema", action="store_true", help="print the JSON schema, for editors")
    parser.set_defaults(run=config)


def init(options: argparse.Namespace) -> int:
    from fourfold.config.describe import SIZES, sized_model_config, starting_file
    from fourfold.config.run_file import ConfigError
    from fourfold.data.manifest import NAME, DatasetManifest

    if options.size not in SIZES:
        raise ConfigError(f"there is no size {options.size!r}; use one of {', '.join(SIZES)}")
    if options.file.exists():
        raise ConfigError(f"{options.file} exists already; remove it, or give another name")
    model = Path(options.model) if options.model else options.file.with_suffix("") / "config.json"
    written = [options.file]
    if not options.model:
        if not (options.data / NAME).exists():
            raise ConfigError(
                f"{options.data} is not a prepared data set, whose tokenizer sets the vocabulary of the model; run "
                f"`fourfold data prepare {options.data} TEXT --train-tokenizer 8192` first, or give --model"
            )
        vocabulary = DatasetManifest.load(options.data).tokenizer.vocab_size
        model.parent.mkdir(parents=True, exist_ok=True)
        model.write_text(json.dumps(sized_model_config(options.size, vocabulary), indent=2) + "\n")
        written.append(model)
    options.file.write_text(starting_file(options.size, model=str(model), data=str(options.data)))
    print(f"wrote {' and '.join(map(str, written))}; next: fourfold train {options.file}")
    return 0


def config(options: argparse.Namespace) -> int:
    from fourfold.config.describe import reference
    from fourfold.config.run_file import load_run
    from fourfold.config.schema import RunConfig

    if options.file is not None:
        print(load_run(options.file, options.set).model_dump_json(indent=2))
    elif options.schema:
        print(json.dumps(RunConfig.model_json_schema(), indent=2))
    else:
        print(reference())
    return 0
