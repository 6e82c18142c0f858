"""`fourfold data prepare` and `fourfold data info`: text to tokens, and what became of it."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    parser = commands.add_parser("data", help="turn text into tokens to train on, and look at them")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    _add_prepare(actions)
    _add_info(actions)


def _add_prepare(actions: Any) -> None:
    parser = actions.add_parser(
        "prepare",
        help="tokenise text into a folder",
        description="Tokenise text into a folder of memory-mapped shards. Run the same command again after an "
        "interruption: what is finished stays. The bytes do not depend on --processes or on interruptions.",
    )
    parser.add_argument("folder", type=Path, help="where the tokens go")
    parser.add_argument(
        "inputs",
        nargs="+",
        help="text, JSON lines, Parquet or Arrow files (or .gz), folders of them, a folder of "
        "datasets.save_to_disk, or hf:NAME for a data set of the Hugging Face hub",
    )
    parser.add_argument("--tokenizer", help="a folder or a hub id")
    parser.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="SIZE",
        help="train a byte-level BPE of this size on the inputs",
    )
    parser.add_argument("--column", default="text", help="the field that holds the text (default: text)")
    parser.add_argument(
        "--separator",
        type=_unescaped,
        help=r"what divides the documents of a text file, such as '\n\n' (default: a file is one document)",
    )
    parser.add_argument(
        "--validation", type=float, default=0.005, help="part of the documents to keep apart (default: 0.005)"
    )
    parser.add_argument("--split", default="train", help="of a data set of Hugging Face (default: train)")
    parser.add_argument(
        "--text-suffix",
        action="append",
        default=[],
        metavar=".SUFFIX",
        help="files in folders that are text, too",
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="(default: one for each core)"
    )
    parser.add_argument(
        "--part-mb", type=float, help="input that a process takes at a time (default: 4 to 256)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="remove an earlier preparation of this folder"
    )
    parser.set_defaults(run=prepare)


def _add_info(actions: Any) -> None:
    parser = actions.add_parser("info", help="what a folder of tokens holds")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--verify", action="store_true", help="read every byte and compare with what was written"
    )
    parser.add_argument("--show", type=int, default=0, metavar="N", help="the text of the first N samples")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample, with --show")
    parser.set_defaults(run=info)


def prepare(options: argparse.Namespace) -> int:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from fourfold.data.plan import Settings
    from fourfold.data.prepare import prepare as run

    settings = Settings(
        tokenizer=options.tokenizer,
        train_vocab_size=options.train_tokenizer,
        column=options.column,
        separator=options.separator,
        validation=options.validation,
        split=options.split,
        text_suffixes=tuple(options.text_suffix),
        part_bytes=int(options.part_mb * (1 << 20)) if options.part_mb else None,
    )
    start_s = time.perf_counter()
    with Progress(TextColumn("tokenising"), BarColumn(), DownloadColumn(), TimeRemainingColumn()) as bars:
        bar = bars.add_task("", total=None)
        manifest = run(
            options.folder,
            options.inputs,
            settings,
            processes=options.processes,
            overwrite=options.overwrite,
            progress=lambda done, total: bars.update(bar, completed=done, total=total),
        )
    print(_described(options.folder, manifest))
    print(f"took {time.perf_counter() - start_s:.1f} s")
    return 0


def info(options: argparse.Namespace) -> int:
    from fourfold.data.manifest import DatasetManifest

    manifest = DatasetManifest.load(options.folder)
    print(_described(options.folder, manifest))
    wrong = manifest.find_damage(options.folder, contents=options.verify)
    for line in wrong:
        print(f"DAMAGED: {line}")
    if wrong:
        print(
            f"{len(wrong)} files are not what was written; copy the folder again, or prepare it with --overwrite"
        )
        return 1
    if options.verify:
        print("verified: every byte is what was written")
    if options.show:
        _show(options.folder, options.length, options.show)
    return 0


def _described(folder: Path, manifest: Any) -> str:
    from fourfold.data.manifest import SPLITS

    tokenizer = manifest.tokenizer
    lines = [
        f"{folder}: fingerprint {manifest.fingerprint}",
        f"  tokenizer   {tokenizer.vocab_size:,} tokens, fingerprint {tokenizer.fingerprint}",
        f"  source      {manifest.source_bytes:,} bytes, fingerprint {manifest.source}",
    ]
    for split in SPLITS:
        lines.append(
            f"  {split:<11} {manifest.tokens(split):,} tokens of {manifest.documents(split):,} documents in "
            f"{len(manifest.shards[split])} shards of {manifest.dtype.name}"
        )
    return "\n".join(lines)


def _show(folder: Path, length: int, count: int) -> None:
    from fourfold.data.samples import Samples
    from fourfold.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder / "tokenizer")
    samples = Samples(folder, "train", length)
    for number in range(min(count, len(samples))):
        print(f"-- sample {number}\n{tokenizer.decode(samples[number].input_ids)}")


def _unescaped(text: str) -> str:
    r"""``\n`` and ``\t`` as a shell passes them."""
    return text.replace("\\n", "\n").replace("\\t", "\t")
