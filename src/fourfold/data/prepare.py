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
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from fourfold.data import manifest, plan
from fourfold.data.documents import FileChunk, texts_of
from fourfold.data.inputs import find_inputs, parts
from fourfold.data.manifest import SPLITS, DatasetManifest, Split, split_of
from fourfold.data.plan import Settings, write_or_check_plan
from fourfold.data.shards import Shard, ShardWriter, find_damage, locked, token_dtype
from fourfold.data.tokenizer import FILE, TokenizerInfo, plain_backend
from fourfold.files import write_atomically
from fourfold.untrusted_input import read_json

BATCH_CHARACTERS = 1 << 20  # tokenised together

Progress = Callable[[int, int], None]  # (bytes done, bytes of all)


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
    if processes < 1:
        raise ValueError(f"processes={processes} is too few; use at least 1")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if overwrite and (folder / plan.NAME).exists():  # without a plan, these are other files
            _clear(folder)
        files = find_inputs(inputs, split=settings.split, text_suffixes=settings.text_suffixes)
        work = parts(files, settings.reading, settings.part_bytes)
        tokenizer = write_or_check_plan(folder, files, settings, work)
        _sweep(folder)
        if (folder / manifest.NAME).exists():
            shutil.rmtree(folder / "parts", ignore_errors=True)
            return DatasetManifest.load(folder)
        total = sum(chunk.bytes for part in work for chunk in part)
        done = 0
        task = _Task(str(folder), settings, tokenizer)
        for number in _run(task, work, processes):
            done += sum(chunk.bytes for chunk in work[number])
            progress(done, total)
        prepared = _combine(folder, len(work), tokenizer, sum(file.bytes for file in files))
        prepared.save(folder)
        shutil.rmtree(folder / "parts")
        return prepared


def _clear(folder: Path) -> None:
    """Remove what `prepare` wrote, the manifest first, and nothing else."""
    (folder / manifest.NAME).unlink(missing_ok=True)
    for name in (*SPLITS, "parts", "tokenizer"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / plan.NAME).unlink()


def _sweep(folder: Path) -> None:
    for left in folder.glob("**/*.unfinished"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


# -- the parts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    folder: str
    settings: Settings
    tokenizer: TokenizerInfo


def _run(task: _Task, work: Sequence[list[FileChunk]], processes: int) -> Iterator[int]:
    """Do the parts that are not done yet; yields the index of each part as it is finished."""
    folder = Path(task.folder)
    for name in ("parts", *SPLITS):
        (folder / name).mkdir(exist_ok=True)
    left = []
    for number in range(len(work)):
        if _is_done(folder, number, task.tokenizer):
            yield number
        else:
            left.append(number)
    if processes == 1 or len(left) < 2:
        for number in left:
            yield _do(task, number, work[number])
        return
    # A fork server imports this once; forking the caller would copy locks held by its threads.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(min(processes, len(left)), context, initializer=_end_with_parent) as pool:
        running = [pool.submit(_do, task, number, work[number]) for number in left]
        try:
            for finished in as_completed(running):
                yield finished.result()
        finally:
            # After an error, only the parts in progress are finished.
            pool.shutdown(wait=False, cancel_futures=True)


def _do(task: _Task, number: int, part: Sequence[FileChunk]) -> int:
    """Tokenise a part: write its shards, then the record that it is done."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    folder, settings, facts = Path(task.folder), task.settings, task.tokenizer
    backend = plain_backend((folder / "tokenizer" / FILE).read_text())
    dtype = token_dtype(facts.vocab_size)
    writers = {
        split: ShardWriter(folder, f"{split}/{number:06d}", dtype, settings.shard_tokens) for split in SPLITS
    }
    source = xxhash.xxh3_128()
    for texts in _batches(texts_of(part, settings.reading)):
        for text, encoded in zip(texts, backend.encode_batch_fast(texts), strict=True):
            source.update(xxhash.xxh3_128_digest(text.encode()))
            ids = encoded.ids
            if ids[-1:] != [facts.eos_id]:
                ids.append(facts.eos_id)
            writers[split_of(text, settings.validation)].add(np.array(ids, dtype))
    for writer in writers.values():
        writer.close()
    record = {
        "source": source.hexdigest(),
        "shards": {split: [shard.to_json() for shard in writers[split].shards] for split in SPLITS},
    }
    write_atomically(_record_path(folder, number), json.dumps(record).encode())
    return number


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
