"""Documents -> shards of tokens, in parallel, and again from where it was stopped.

The work is cut into parts by the inputs alone. Each part writes its own shards and then a note of them; a part with a
note is done, another is done from its start. So the bytes do not depend on the number of processes or on
interruptions.
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
from fourfold.data.plan import Settings, settle_plan
from fourfold.data.shards import Shard, ShardWriter, find_damage, locked, token_dtype
from fourfold.data.tokenizer import FILE, TokenizerInfo, plain_backend
from fourfold.files import write_atomically
from fourfold.untrusted_input import read_json

BATCH_CHARACTERS = 1 << 20  # of documents that are tokenised together

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
    """Tokenise the inputs into a folder; a second call goes on where the first was stopped."""
    if processes < 1:
        raise ValueError(f"{processes} processes do no work; use at least 1")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if overwrite and (folder / plan.NAME).exists():  # no plan: not ours to remove
            _clear(folder)
        files = find_inputs(inputs, split=settings.split, text_suffixes=settings.text_suffixes)
        work = parts(files, settings.reading, settings.part_bytes)
        tokenizer = settle_plan(folder, files, settings, work)
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
        prepared = _put_together(folder, len(work), tokenizer, sum(file.bytes for file in files))
        prepared.save(folder)
        shutil.rmtree(folder / "parts")
        return prepared


def _clear(folder: Path) -> None:
    """Remove what a preparation wrote, the manifest first, and nothing else."""
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
    """Do what is not done yet; the numbers of parts, as they are finished."""
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
    # A server that has imported this once; forking the caller would fork its threads' locks.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(min(processes, len(left)), context, initializer=_end_with_parent) as pool:
        running = [pool.submit(_do, task, number, work[number]) for number in left]
        try:
            for finished in as_completed(running):
                yield finished.result()
        finally:
            # After an error, only the parts under way are finished.
            pool.shutdown(wait=False, cancel_futures=True)


def _do(task: _Task, number: int, part: Sequence[FileChunk]) -> int:
    """Tokenise a part: its shards, then the note that says that it is done."""
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
    note = {
        "source": source.hexdigest(),
        "shards": {split: [shard.to_json() for shard in writers[split].shards] for split in SPLITS},
    }
    write_atomically(_note(folder, number), json.dumps(note).encode())
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
    """A pool's process waits for work for ever if its parent is killed."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# -- notes of parts -----------------------------------------------------------------------------------------------


def _note(folder: Path, number: int) -> Path:
    return folder / "parts" / f"{number:06d}.json"


def _shards(note: dict[str, Any], split: Split) -> list[Shard]:
    return [Shard(**shard) for shard in note["shards"][split]]


def _is_done(folder: Path, number: int, tokenizer: TokenizerInfo) -> bool:
    """A note is written last, but files may have been lost since."""
    path = _note(folder, number)
    if not path.exists():
        return False
    note = read_json(path)
    shards = [shard for split in SPLITS for shard in _shards(note, split)]
    return not any(find_damage(folder, shards, token_dtype(tokenizer.vocab_size), contents=False))


def _put_together(folder: Path, count: int, tokenizer: TokenizerInfo, source_bytes: int) -> DatasetManifest:
    notes = [read_json(_note(folder, number)) for number in range(count)]
    source = xxhash.xxh3_128_hexdigest("".join(note["source"] for note in notes).encode())
    shards = {split: [shard for note in notes for shard in _shards(note, split)] for split in SPLITS}
    return DatasetManifest(tokenizer, source, source_bytes, shards)
