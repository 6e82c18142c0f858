"""`fourfold init` and `fourfold config`: write a starting run config, and show its fields."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.cli.arguments import add_changes, positive
from fourfold.config.schema import EvaluationSection

if TYPE_CHECKING:
    from fourfold.data.manifest import DatasetManifest


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "init",
        help="write a starting run config",
        description="Write a run config with every field and its description. It works on any number of ranks that divides the sequences of its batch: the grid is "
        "chosen when the run starts, unless you set one. The model is a pretrained one to fine-tune, an architecture with "
        "random init, or a Llama of a size, whose config.json is written into a folder named as the run config.",
        epilog="Example: fourfold init run.toml --pretrained Qwen/Qwen3-8B --data text",
    )
    parser.add_argument("file", type=Path, help="the file to write, such as run.toml")
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--pretrained",
        metavar="MODEL",
        help="start from these weights: a folder with safetensors, or a hub id",
    )
    model.add_argument(
        "--config", metavar="MODEL", help="start from random init: a config.json, its folder, or a hub id"
    )
    model.add_argument(
        "--size",
        default="1m",
        help="random init of a Llama: 1m, 10m, 125m, 1b, 8b, 70b, 405b or 1t parameters (default: 1m)",
    )
    parser.add_argument(
        "--data", type=Path, default=Path("data"), help="the folder of the prepared data set (default: data)"
    )
    parser.add_argument(
        "--epochs", type=positive, default=1, help="with --pretrained: passes through the text (default: 1)"
    )
    parser.set_defaults(run=init)

    about = "show the fields of a run config"
    parser = commands.add_parser(
        "config",
        help=about,
        description=f"{about.capitalize()}, or check one.",
        epilog="Example: fourfold config run.toml --set optimizer.lr=3e-4",
    )
    parser.add_argument("file", nargs="?", type=Path, help="a run config to check and show")
    add_changes(parser)
    parser.add_argument("--schema", action="store_true", help="print the JSON schema, for editors")
    parser.set_defaults(run=config)


def init(options: argparse.Namespace) -> int:
    from fourfold.config.describe import SIZES, pretraining, sized_model_config, starting_file
    from fourfold.config.run_file import ConfigError
    from fourfold.data.manifest import NAME, DatasetManifest
    from fourfold.data.samples import Samples
    from fourfold.planner.inputs.workload import from_config

    file: Path = options.file
    if options.size not in SIZES:
        raise ConfigError(f"there is no size {options.size!r}; use one of {', '.join(SIZES)}")
    if file.exists():
        raise ConfigError(f"{file} exists already; remove it, or give another name")
    if not (options.data / NAME).exists():
        model = options.pretrained or options.config
        tokenizer = f"--tokenizer {model}" if model else "--train-tokenizer 8192"
        raise ConfigError(
            f"{options.data} is not a prepared data set; run `fourfold data prepare {options.data} TEXT {tokenizer}` first, "
            "or give its folder with --data"
        )
    data = DatasetManifest.load(options.data)
    folder = file.with_suffix("")
    written = [file]
    if options.epochs != 1 and not options.pretrained:
        raise ValueError("--epochs is for --pretrained; otherwise set schedule.steps in the file")
    if options.pretrained:
        about, chosen = _fine_tuning(options.pretrained, options.data, data, options.epochs)
    elif options.config:
        about, chosen = _random_init(options.config, data)
    else:
        config = folder / "config.json"
        config.parent.mkdir(parents=True, exist_ok=True)
        sizes = sized_model_config(options.size, data.tokenizer.vocab_size)
        sizes |= dict.fromkeys(("bos_token_id", "eos_token_id"), data.tokenizer.eos_id)
        config.write_text(json.dumps(sizes, indent=2) + "\n")
        written.append(config)
        parameters = from_config(sizes).parameters
        about = f"A run of a {options.size.upper()} model: a Llama with {parameters:,.0f} parameters."
        chosen = {"model.config": str(config), **pretraining(options.size)}
    chosen |= {
        "data.sources": [{"path": str(options.data)}],
        "checkpoints.folder": str(folder / "checkpoints"),
        "logging.folder": str(folder / "logs"),
    }
    length = chosen["data.sequence_length"]
    samples = len(Samples(options.data, "validation", length))
    if not samples:
        chosen["evaluation.sequences"] = 0
        print(
            f"{options.data} has {data.tokens('validation')} tokens of validation text, less than one sample of {length}: the run does not "
            "evaluate; for a validation loss, prepare the data again (--overwrite) with a larger --validation, or with --separator if a "
            "text file has several documents, and run init again",
            file=sys.stderr,
        )
    elif samples < (read := EvaluationSection().sequences):
        print(
            f"{options.data} has {samples} samples of {length} tokens of validation text; evaluation.sequences = {read} reads them "
            "repeatedly. For a better estimate prepare the data with a larger --validation",
            file=sys.stderr,
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(starting_file(about, chosen))
    if options.pretrained and (steps := chosen["schedule.steps"]) < 50:
        print(
            f"{options.data} is {steps} steps of {chosen['batch.tokens']} tokens, which change the weights little; for more passes "
            "through it use --epochs",
            file=sys.stderr,
        )
    print(f"wrote {' and '.join(map(str, written))}; next: fourfold train {file}")
    return 0


def _fine_tuning(
    model: str, prepared: Path, data: DatasetManifest, epochs: int
) -> tuple[str, dict[str, Any]]:
    from fourfold.config.describe import FINE_TUNING_LENGTH, fine_tuning
    from fourfold.data.samples import Samples

    size, config = _read(model, data)
    folder = Path(model)
    if folder.exists() and not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{model} has a config.json and no safetensors, so there are no weights to start from; save them with "
            "save_pretrained, or use --config for random init"
        )
    _warn_of_another_tokenizer(model, data)
    positions = _positions(config)
    train = Samples(prepared, "train", min(positions, FINE_TUNING_LENGTH))
    train_tokens = len(train) * train.length if data.has_chats else data.tokens("train")
    chosen = fine_tuning(size, positions=positions, train_tokens=train_tokens, epochs=epochs)
    return f"Fine-tunes {model}.", {"model.pretrained": model, **chosen}


def _random_init(model: str, data: DatasetManifest) -> tuple[str, dict[str, Any]]:
    from fourfold.config.describe import pretraining

    size, config = _read(model, data)
    chosen = pretraining(size)
    length = min(_positions(config), chosen["data.sequence_length"])
    chosen |= {"model.config": model, "data.sequence_length": length}
    return f"Trains {model} from random init.", chosen


def _positions(config: dict[str, Any]) -> int:
    """The longest sequence that a model takes; GPT-2 has another name for it."""
    return int(config.get("max_position_embeddings") or config.get("n_positions") or sys.maxsize)


def _read(model: str, data: DatasetManifest) -> tuple[str, dict[str, Any]]:
    """The size whose settings suit a model, and its config; rejects one that cannot take the data."""
    from fourfold.config.describe import nearest_size
    from fourfold.untrusted_input import find_model_config, read_json

    config = read_json(find_model_config(model))
    config |= config.get("text_config", {})
    vocabulary = config.get("vocab_size")
    if isinstance(vocabulary, int) and vocabulary < data.tokenizer.vocab_size:
        raise ValueError(
            f"{model} has a vocabulary of {vocabulary} tokens, the data of {data.tokenizer.vocab_size}; prepare the data "
            f"with the model's tokenizer: fourfold data prepare DATA TEXT --tokenizer {model}"
        )
    hidden = next((config[name] for name in ("hidden_size", "n_embd", "d_model") if config.get(name)), 0)
    return nearest_size(int(hidden)), config


def _warn_of_another_tokenizer(model: str, data: DatasetManifest) -> None:
    from fourfold.data.tokenizer import load_tokenizer, tokenizer_info

    try:
        own = tokenizer_info(load_tokenizer(model)).fingerprint
    except (OSError, ValueError) as error:
        why = f"the tokenizer of {model} cannot be read ({next(iter(str(error).splitlines()), '')})"
    else:
        if own == data.tokenizer.fingerprint:
            return
        why = f"the data were prepared with another tokenizer than that of {model}"
    print(
        f"warning: {why}; pretrained weights know their own tokens alone, so prepare the data with --tokenizer {model}",
        file=sys.stderr,
    )


def config(options: argparse.Namespace) -> int:
    from fourfold.config.describe import reference
    from fourfold.config.run_file import load_run
    from fourfold.config.schema import RunConfig

    if options.file is not None:
        run = load_run(options.file, options.set)
        shown = run.model_dump(mode="json")
        if run.grid.auto:  # sizes would look as if they were set
            shown["grid"] = {"cluster": run.grid.cluster} if run.grid.cluster else "auto"
        print(json.dumps(shown, indent=2))
    elif options.schema:
        print(json.dumps(RunConfig.model_json_schema(), indent=2))
    else:
        print(reference())
    return 0
