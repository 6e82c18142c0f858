"""Tokenises documents into shards, in parallel, and resumes after an interruption.

The parts of the work depend only on the inputs. Each part writes its shards and then a record of them; a part without a
record is done again from its start. So the output does not depend on the number of processes or on interruptions.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fourfold.data.chats import ChatEncoder, template_of
from fourfold.data.documents import FileChunk, Reading, records_of, texts_of
from fourfold.data.inputs import Inputs, find_inputs, parts
from fourfold.data.manifest import NAME as MANIFEST
from fourfold.data.manifest import SPLITS, DatasetManifest, Split, split_of
from fourfold.data.shards import SHARD_TOKENS, Shard, ShardWriter, find_damage, locked, token_dtype
from fourfold.data.tokenizer import (
    FILE,
    TokenizerInfo,
    load_tokenizer,
    plain_backend,
    save_tokenizer,
    tokenizer_info,
    train_tokenizer,
)
from fourfold.files import write_atomically
from fourfold.untrusted_input import read_json

PLAN = "plan.json"
TRAINING_CHARACTERS = 1 << 26  # of the text that a tokenizer is trained on
TRAINING_PARTS = 64  # that this text is taken from
BATCH_CHARACTERS = 1 << 20  # tokenised together

Progress = Callable[[int, int], None]  # (bytes done, bytes of all)


@dataclass(frozen=True)
class Settings(Reading):
    """The settings that the tokens depend on."""

    tokenizer: str | None = None  # a folder or hub id
    train_vocab_size: int | None = None  # or: train one of this size on the inputs
    chat_template: str | None = None  # for chats, instead of the tokenizer's
    validation: float = 0.005
    split: str = "train"  # of a Hugging Face dataset
    text_suffixes: tuple[str, ...] = ()
    part_bytes: int | None = None
    shard_tokens: int = SHARD_TOKENS

    def __post_init__(self) -> None:
        if (self.tokenizer is None) == (self.train_vocab_size is None):
            given = "neither" if self.tokenizer is None else "both"
            raise ValueError(
                f"{given} of --tokenizer and --train-tokenizer is given; name a tokenizer that exists, or the size of one to "
                "train on this text, such as 8192"
            )
        if self.chats and self.tokenizer is None:
            raise ValueError("--chats needs the tokenizer of the model, with --tokenizer")
        if self.chat_template is not None and not self.chats:
            raise ValueError("--chat-template is for --chats")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation={self.validation} is not a fraction of the documents; use 0 to 0.5")
        if self.separator == "":
            raise ValueError(
                "an empty separator does not separate anything; leave it out, and a file is one document"
            )


def prepare(
    folder: str | Path,
    inputs: Sequence[str],
    settings: Settings,
    *,
    processes: int = 1,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> DatasetManifest:
    """Tokenise the inputs into a folder; a second call resumes where the first was stopped."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if overwrite and (folder / PLAN).exists():  # without a plan, these are other files
            _clear(folder)
        files = find_inputs(inputs, split=settings.split, text_suffixes=settings.text_suffixes)
        work = parts(files, settings, settings.part_bytes)
        tokenizer = _write_or_check_plan(folder, files, settings, work)
        _sweep(folder)
        if (folder / MANIFEST).exists():
            shutil.rmtree(folder / "parts", ignore_errors=True)
            return DatasetManifest.load(folder)
        total = sum(chunk.bytes for part in work for chunk in part)
        done = 0
        for number in _run(folder, settings, tokenizer, work, processes):
            done += sum(chunk.bytes for chunk in work[number])
            progress(done, total)
        prepared = _combine(folder, len(work), tokenizer, sum(path.stat().st_size for path in files))
        prepared.save(folder)
        shutil.rmtree(folder / "parts")
        return prepared


def _clear(folder: Path) -> None:
    """Remove what `prepare` wrote, the manifest first, and nothing else."""
    (folder / MANIFEST).unlink(missing_ok=True)
    for name in (*SPLITS, "parts", "tokenizer"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / PLAN).unlink()


def _sweep(folder: Path) -> None:
    for left in folder.glob("**/*.unfinished"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


# -- the plan, written first, so that a second run cannot mix in other settings or inputs -------------------------


def _write_or_check_plan(
    folder: Path, files: Inputs, settings: Settings, work: Sequence[list[FileChunk]]
) -> TokenizerInfo:
    """Write the plan of this folder, or check that it is the same as before."""
    path = folder / PLAN
    before = read_json(path) if path.exists() else None
    if before is None and any(folder.iterdir()):
        _check_no_foreign_files(folder)
    trained = (
        before is not None and settings.train_vocab_size == before["settings"]["train_vocab_size"] is not None
    )
    if settings.tokenizer is not None:
        tokenizer = load_tokenizer(settings.tokenizer)
        if settings.chats:
            tokenizer.chat_template = settings.chat_template or template_of(tokenizer)
            settings = replace(settings, chat_template=tokenizer.chat_template)
    elif trained:
        tokenizer = load_tokenizer(folder / "tokenizer")
    else:
        tokenizer = train_tokenizer(_sample(work, settings), settings.train_vocab_size or 0)
    facts = tokenizer_info(tokenizer)
    # Plans of text have no settings of chats, as before there were any.
    left_out = {"tokenizer"} if settings.chats else {"tokenizer", "chats", "chat_template"}
    plan = {
        "tokenizer": asdict(facts),
        "settings": {name: value for name, value in asdict(settings).items() if name not in left_out},
        "inputs": [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files],
        "parts": len(work),
    }
    plan = json.loads(json.dumps(plan))  # tuples become lists, as they come back
    if before is not None and before != plan and not _has_parts(folder):
        _clear(folder)  # nothing was tokenised: a column was not there, or the like
        before = None
    if before is None:
        save_tokenizer(tokenizer, folder / "tokenizer")
        write_atomically(path, json.dumps(plan, indent=1).encode() + b"\n")
    elif before != plan:
        raise ValueError(
            f"{folder} holds another preparation: {_difference(before, plan)}; "
            "use another folder, or --overwrite to start over"
        )
    return facts


def _has_parts(folder: Path) -> bool:
    finished = (p for p in (folder / "parts").glob("*") if p.suffix != ".unfinished")
    return (folder / MANIFEST).exists() or any(finished)


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    for name in ("tokenizer", "settings"):
        for field in before[name] | now[name]:
            old, new = before[name].get(field), now[name].get(field)
            if old != new:
                return f"its {name} {field} is {old}, this run has {new}"
    files_before, files_now = ({file[0]: file[1:] for file in plan["inputs"]} for plan in (before, now))
    for path in files_before | files_now:
        old, new = files_before.get(path), files_now.get(path)
        if old is None or new is None:
            return f"{path} is an input of {'this run' if old is None else 'it'} only"
        if old[0] != new[0]:
            return f"{path} had {old[0]} bytes, it has {new[0]} now"
        if old != new:
            return f"{path} was written again since (its time was {old[1]} ns, it is {new[1]} ns)"
    return f"its inputs came in a different order, or in {before['parts']} parts instead of {now['parts']}"


def _check_no_foreign_files(folder: Path) -> None:
    known = {"tokenizer", "tokenizer.unfinished"}  # stopped before the plan was written
    foreign = sorted(p.name for p in folder.iterdir() if p.name not in known and ".unfinished" not in p.name)
    if foreign:
        raise ValueError(f"{folder} has other files in it, such as {foreign[0]}; use an empty folder")


def _sample(work: Sequence[list[FileChunk]], reading: Reading) -> Iterator[str]:
    """Documents from all over the inputs: the beginnings of evenly spaced parts, the same amount from each."""
    chosen = work[:: max(1, len(work) // TRAINING_PARTS)]
    for part in chosen:
        left = TRAINING_CHARACTERS // len(chosen)
        for text in texts_of(part, reading):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break


# -- the parts ----------------------------------------------------------------------------------------------------


def _run(
    folder: Path,
    settings: Settings,
    tokenizer: TokenizerInfo,
    work: Sequence[list[FileChunk]],
    processes: int,
) -> Iterator[int]:
    """Do the parts that are not done yet; yields the index of each part as it is finished."""
    do = partial(_do, folder, settings, tokenizer)
    for name in ("parts", *SPLITS):
        (folder / name).mkdir(exist_ok=True)
    left = []
    for number in range(len(work)):
        if _is_done(folder, number, tokenizer):
            yield number
        else:
            left.append(number)
    if processes == 1 or len(left) < 2:
        for number in left:
            yield do(number, work[number])
        return
    # A fork server imports this once; forking the caller would copy locks held by its threads.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(min(processes, len(left)), context, initializer=_end_with_parent) as pool:
        running = [pool.submit(do, number, work[number]) for number in left]
        try:
            for finished in as_completed(running):
                yield finished.result()
        finally:
            # After an error, only the parts in progress are finished.
            pool.shutdown(wait=False, cancel_futures=True)


def _do(
    folder: Path, settings: Settings, tokenizer: TokenizerInfo, number: int, part: Sequence[FileChunk]
) -> int:
    """Tokenise a part: write its shards, then the record that it is done."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    dtype = token_dtype(tokenizer.vocab_size)
    writers = {
        split: ShardWriter(
            folder, f"{split}/{number:06d}", dtype, settings.shard_tokens, chats=settings.chats
        )
        for split in SPLITS
    }
    source = xxhash.xxh3_128()
    encoded = (_chats if settings.chats else _documents)(folder, settings, tokenizer, part)
    for text, ids, counted in encoded:
        source.update(xxhash.xxh3_128_digest(text.encode()))
        writers[split_of(text, settings.validation)].add(np.array(ids, dtype), counted)
    for writer in writers.values():
        writer.close()
    record = {
        "source": source.hexdigest(),
        "shards": {split: [asdict(shard) for shard in writers[split].shards] for split in SPLITS},
    }
    write_atomically(_record_path(folder, number), json.dumps(record).encode())
    return number


Encoded = Iterator[tuple[str, list[int], NDArray[np.bool_] | None]]  # (text, token ids, which of them count)


def _documents(
    folder: Path, settings: Settings, tokenizer: TokenizerInfo, part: Sequence[FileChunk]
) -> Encoded:
    backend = plain_backend((folder / "tokenizer" / FILE).read_text())
    for texts in _batches(texts_of(part, settings)):
        for text, encoded in zip(texts, backend.encode_batch_fast(texts), strict=True):
            ids = encoded.ids
            if ids[-1:] != [tokenizer.eos_id]:
                ids.append(tokenizer.eos_id)
            yield text, ids, None


def _chats(folder: Path, settings: Settings, tokenizer: TokenizerInfo, part: Sequence[FileChunk]) -> Encoded:
    encode = ChatEncoder(load_tokenizer(folder / "tokenizer"))
    for where, record in records_of(part):
        yield json.dumps(record, sort_keys=True, default=str), *encode(record, where)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _end_with_parent() -> None:
    """End this pool process with its parent: otherwise it would wait for work forever."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# -- records of parts -----------------------------------------------------------------------------------------------


def _record_path(folder: Path, number: int) -> Path:
    return folder / "parts" / f"{number:06d}.json"


def _shards(record: dict[str, Any], split: Split) -> list[Shard]:
    return [Shard(**shard) for shard in record["shards"][split]]


def _is_done(folder: Path, number: int, tokenizer: TokenizerInfo) -> bool:
    """Does a part have its record and all of its files, which may have been lost since?"""
    path = _record_path(folder, number)
    if not path.exists():
        return False
    record = read_json(path)
    shards = [shard for split in SPLITS for shard in _shards(record, split)]
    return not any(find_damage(folder, shards, token_dtype(tokenizer.vocab_size), contents=False))


def _combine(folder: Path, count: int, tokenizer: TokenizerInfo, source_bytes: int) -> DatasetManifest:
    records = [read_json(_record_path(folder, number)) for number in range(count)]
    source = xxhash.xxh3_128_hexdigest("".join(record["source"] for record in records).encode())
    shards = {split: [shard for record in records for shard in _shards(record, split)] for split in SPLITS}
    return DatasetManifest(tokenizer, source, source_bytes, shards)
