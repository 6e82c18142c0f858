"""`fourfold data prepare` and `fourfold data info`: tokenise text, and inspect the result."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from fourfold.cli.arguments import add_repeated, positive


def add_to(commands: Any) -> None:
    parser = commands.add_parser("data", help="tokenise text for training, and inspect the result")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    _add_prepare(actions)
    _add_info(actions)


def _add_prepare(actions: Any) -> None:
    parser = actions.add_parser(
        "prepare",
        help="tokenise text into a folder",
        description="Tokenise text into a folder of memory-mapped shards. Run the same command again after an "
        "interruption: finished parts are kept. The result does not depend on --processes or on interruptions.",
        epilog="Example: fourfold data prepare text corpus.jsonl --tokenizer Qwen/Qwen3-8B",
    )
    parser.add_argument("folder", type=Path, help="the folder for the tokens")
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
    parser.add_argument("--column", default="text", help="the field with the text (default: text)")
    parser.add_argument(
        "--chats",
        action="store_true",
        help="each record is a chat (messages, or a prompt and its completion), whose answers alone are learned",
    )
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="with --chats: a Jinja template instead of the tokenizer's",
    )
    parser.add_argument(
        "--separator",
        type=_unescaped,
        help=r"the separator between documents of a text file, such as '\n\n' (default: a file is one document)",
    )
    parser.add_argument(
        "--validation",
        type=float,
        default=0.005,
        help="the fraction of documents held out for validation (default: 0.005)",
    )
    parser.add_argument(
        "--split", default="train", help="the split of a Hugging Face data set (default: train)"
    )
    add_repeated(parser, "--text-suffix", ".SUFFIX", "also read files with this suffix as text")
    parser.add_argument(
        "--processes",
        type=positive,
        default=os.cpu_count() or 1,
        help="number of processes (default: one per core)",
    )
    parser.add_argument("--part-mb", type=float, help="megabytes of input per part (default: 4 to 256)")
    parser.add_argument(
        "--overwrite", action="store_true", help="remove the existing contents of this folder first"
    )
    parser.set_defaults(run=prepare)


def _add_info(actions: Any) -> None:
    about = "Show the contents of a prepared folder: documents, tokens and the tokenizer."
    parser = actions.add_parser(
        "info",
        help="show the contents of a prepared folder",
        description=about,
        epilog="Example: fourfold data info text --verify",
    )
    parser.add_argument("folder", type=Path, help="the folder that `fourfold data prepare` wrote")
    parser.add_argument(
        "--verify", action="store_true", help="read every byte and compare it with the recorded hashes"
    )
    parser.add_argument(
        "--show",
        type=int,
        default=0,
        metavar="N",
        help="print the text of the first N samples; of chats, what the loss counts in colour",
    )
    parser.add_argument(
        "--seq-len",
        type=positive,
        help="tokens per sample, with --show and for chats (default: 128, and 4096 for chats)",
    )
    parser.set_defaults(run=info)


def prepare(options: argparse.Namespace) -> int:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from fourfold.data.prepare import Settings
    from fourfold.data.prepare import prepare as run

    settings = Settings(
        tokenizer=options.tokenizer,
        train_vocab_size=options.train_tokenizer,
        column=options.column,
        chats=options.chats,
        chat_template=options.chat_template.read_text() if options.chat_template else None,
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
    print(manifest.describe(options.folder))
    print(f"took {time.perf_counter() - start_s:.1f} s")
    if options.validation and not manifest.tokens("validation"):
        print(
            f"warning: --validation {options.validation} held out no document; for a validation loss prepare with a larger one "
            "and --overwrite",
            file=sys.stderr,
        )
    return 0


def info(options: argparse.Namespace) -> int:
    from fourfold.data.manifest import DatasetManifest
    from fourfold.data.samples import Samples, show

    manifest = DatasetManifest.load(options.folder)
    print(manifest.describe(options.folder))
    wrong = manifest.find_damage(options.folder, contents=options.verify)
    for line in wrong:
        print(f"DAMAGED: {line}")
    if wrong:
        print(
            f"{len(wrong)} files differ from what was written; copy the folder again, or prepare it with --overwrite"
        )
        return 1
    if options.verify:
        print("verified: every byte is what was written")
    length = options.seq_len or (4096 if manifest.has_chats else 128)
    if manifest.has_chats:
        print(Samples(options.folder, "train", length).describe_packing())
    if options.show:
        show(options.folder, length, options.show)
    return 0


def _unescaped(text: str) -> str:
    r"""``\n`` and ``\t`` as a shell passes them."""
    return text.replace("\\n", "\n").replace("\\t", "\t")
