"""A run that takes seconds: a small model with dropout, random text, and ranks that trace their steps."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import nn

from benchmarks.run_toml import to_toml
from fourfold.config.run_file import load_run
from fourfold.config.schema import RunConfig
from fourfold.data.manifest import DatasetManifest
from fourfold.data.shards import ShardWriter, token_dtype
from fourfold.data.tokenizer import TokenizerInfo
from fourfold.mesh.axes import AXES
from fourfold.train.loop.trainer import Callback, StepResult, Trainer

VOCABULARY = 160
LENGTH = 32
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "attention_dropout": 0.1,
    "attn_implementation": "eager",
}


def write(folder: Path, *, sequences: int = 8, **sections: dict[str, Any]) -> Path:
    """Write a model, data and the run config; returns the config's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    random = np.random.default_rng(0)
    # Each token follows from the previous one, so that there is something to learn.
    documents = {
        split: [
            1 + (random.integers(VOCABULARY) + 7 * np.arange(size)) % (VOCABULARY - 1)
            for size in random.integers(3, 60, count)
        ]
        for split, count in (("train", 400), ("validation", 40))
    }
    write_data(folder / "data", VOCABULARY, documents)
    values: dict[str, dict[str, Any]] = {
        "model": {"config": str(folder / "config.json")},
        "data": {"sources": [{"path": str(folder / "data")}], "sequence_length": LENGTH},
        "batch": {"tokens": sequences * LENGTH},
        "optimizer": {"lr": 3e-3},
        "schedule": {"steps": 40, "warmup_steps": 0, "kind": "constant"},
        "engine": {"precision": "fp32"},
        "checkpoints": {"folder": str(folder / "checkpoints"), "every_steps": 4},
        "evaluation": {"sequences": 24, "every_steps": 1000},
        "logging": {"folder": str(folder / "logs"), "every_steps": 1, "tensorboard": False},
    }
    for name, fields in sections.items():
        values[name] = values.get(name, {}) | fields
    file = folder / "run.toml"
    file.write_text(to_toml(values))
    load_run(file)
    return file


def write_data(folder: Path, vocabulary: int, documents: Mapping[Any, Iterable[Any]]) -> None:
    """A prepared data set with these documents of token ids by split."""
    shards = {}
    for split, texts in documents.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        writer = ShardWriter(folder, f"{split}/000000", token_dtype(vocabulary), 1 << 20)
        for text in texts:
            writer.add(text)
        writer.close()
        shards[split] = writer.shards
    DatasetManifest(TokenizerInfo("random", vocabulary, 0), "random", 0, shards).save(folder)


def grid_changes(shape: Sequence[int]) -> list[str]:
    """Changes of the run config that set its grid."""
    return [f"grid.{axis}={size}" for axis, size in zip(AXES, shape, strict=True)]


def in_logs(run: RunConfig, name: str) -> Path:
    return Path(run.logging.folder) / name


class Trace(Callback):
    """A line of JSON for each step of this rank: loss, random state, hash of the inputs, time."""

    def __init__(self, run: RunConfig, attempt: int, *, slow_s: float = 0.0) -> None:
        self._folder, self._attempt = in_logs(run, "trace"), attempt
        self._slow_s = slow_s  # sleep after each step
        self._file: IO[bytes] | None = None
        self._fed = hashlib.sha256()

    def write(self, **values: Any) -> None:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = (self._folder / f"{os.environ['RANK']}.jsonl").open("ab", buffering=0)
        line = {
            "attempt": self._attempt,
            "time": time.time(),
            "ranks": int(os.environ["WORLD_SIZE"]),
            **values,
        }
        self._file.write(json.dumps(line).encode() + b"\n")

    def on_start(self, trainer: Trainer) -> None:
        def hash_inputs(module: nn.Module, args: Any, given: dict[str, Any]) -> None:
            if module.training:
                self._fed.update(given["input_ids"].numpy().tobytes())

        trainer.model.register_forward_pre_hook(hash_inputs, with_kwargs=True)
        self.write(resumed=trainer.step, grid=str(trainer.grid))

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        generator = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        self.write(
            step=result.step,
            loss=float(result.loss).hex(),
            generator=generator[:16],
            fed=self._fed.hexdigest()[:16],
            samples=trainer.training.data["samples"],
        )
        self._fed = hashlib.sha256()
        time.sleep(self._slow_s)


Line = dict[str, Any]


def traces(logs: Path) -> dict[int, list[Line]]:
    """Lines by rank, in the order they were written; a line truncated by a kill is left out."""
    found: dict[int, list[Line]] = defaultdict(list)
    for file in sorted((logs / "trace").glob("*.jsonl")):
        for line in file.read_bytes().split(b"\n"):
            if line.endswith(b"}"):
                found[int(file.stem)].append(json.loads(line))
    return dict(found)


def steps_done(lines: list[Line]) -> dict[int, tuple[Any, ...]]:
    """The results of each step, from its last execution."""
    return {
        line["step"]: (line["loss"], line["generator"], line["fed"], line["samples"])
        for line in lines
        if "step" in line
    }
