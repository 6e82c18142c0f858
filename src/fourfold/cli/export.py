"""`fourfold export`: write a checkpoint as a folder for `from_pretrained`, without starting a rank."""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import Any

from fourfold.cli.plan import amount


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="convert a checkpoint to a Hugging Face folder",
        description="Write the weights of a checkpoint as sharded safetensors, with config.json, the tokenizer and a "
        "model card, for from_pretrained. The checkpoint is verified first. Memory use is a few blocks of a file, "
        "independent of the size of the model.",
        epilog="Example: fourfold export run/checkpoints exported --dtype bf16",
    )
    parser.add_argument(
        "checkpoint", help="a step-N folder, or the folder of a run's checkpoints; can be an fsspec URL"
    )
    parser.add_argument("out", help="the folder to create, or an fsspec URL; it must not exist")
    parser.add_argument("--step", type=int, help="the step of the checkpoint (default: the newest valid one)")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="cast the weights (default: keep their dtype)"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="a folder or a hub id (default: the tokenizer of the run's first data set)",
    )
    parser.add_argument(
        "--max-shard-size",
        type=size_bytes,
        default="5GB",
        metavar="SIZE",
        help="maximum size of a file, such as 500MB; a larger tensor gets its own file (default: 5GB)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import torch

    from fourfold.export import export

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(options.dtype or "")
    exported = export(
        options.checkpoint,
        options.out,
        step=options.step,
        dtype=dtype,
        tokenizer=options.tokenizer,
        file_bytes=options.max_shard_size,
    )
    for note in exported.notes:
        print(note)
    print(
        f"step-{exported.step} -> {options.out}: {exported.parameters:,} parameters, {exported.bytes:,} bytes, "
        f"{', '.join(exported.files)}"
    )
    return 0


def size_bytes(text: str) -> int:
    """A number of bytes, with an optional suffix KB, MB, GB or TB.

    Example:
        >>> size_bytes("5GB"), size_bytes("1.5 mb")
        (5000000000, 1500000)
    """
    with suppress(argparse.ArgumentTypeError):
        size = int(amount(text.strip().upper().removesuffix("B")))
        if size > 0:
            return size
    raise argparse.ArgumentTypeError(f"{text!r} is not a size; give a number of bytes such as 500MB or 5GB")
