"""A run that takes seconds: a small model with dropout, drawn text, and ranks that write down what they did."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import nn

from fourfold.config.describe import toml_value
from fourfold.config.run_file import load_run
from fourfold.config.schema import RunConfig
from fourfold.data.manifest import DatasetManifest
from fourfold.data.shards import ShardWriter, token_dtype
from fourfold.data.tokenizer import TokenizerInfo
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
    """A model, data and the run's file; the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    drawn = np.random.default_rng(0)
    shards = {}
    for split, count in (("train", 400), ("validation", 40)):
        (folder / "data" / split).mkdir(parents=True, exist_ok=True)
        writer = ShardWriter(folder / "data", f"{split}/000000", token_dtype(VOCABULARY), 1 << 20)
        for size in drawn.integers(3, 60, count):
            # Each number follows from the one before: something to learn.
            writer.add(1 + (drawn.integers(VOCABULARY) + 7 * np.arange(size)) % (VOCABULARY - 1))
        writer.close()
        shards[split] = writer.shards
    DatasetManifest(TokenizerInfo("drawn", VOCABULARY, 0), "drawn", 0, shards).save(folder / "data")
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
    lines = []
    for name, fields in values.items():
        lines += [f"[{name}]", *(f"{field} = {toml_value(value)}" for field, value in fields.items())]
    file = folder / "run.toml"
    file.write_text("\n".join(lines) + "\n")
    load_run(file)
    return file


def beside(run: RunConfig, name: str) -> Path:
    return Path(run.logging.folder) / name


class Trace(Callback):
    """What this rank did, a line of JSON for each step: its loss, the state of its generator, what it was fed, and when."""

    def __init__(self, run: RunConfig, attempt: int, *, slow_s: float = 0.0) -> None:
        self._folder, self._attempt = beside(run, "trace"), attempt
        self._slow_s = slow_s  # that each step sleeps
        self._file: IO[bytes] | None = None
        self._fed = hashlib.sha256()

    def say(self, **values: Any) -> None:
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
        def see(module: nn.Module, args: Any, given: dict[str, Any]) -> None:
            if module.training:
                self._fed.update(given["input_ids"].numpy().tobytes())

        trainer.model.register_forward_pre_hook(see, with_kwargs=True)
        self.say(resumed=trainer.step, grid=str(trainer.grid))

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        generator = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        self.say(
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
    """By rank, in the order that they were written; a line that a kill cut short is left out."""
    found: dict[int, list[Line]] = defaultdict(list)
    for file in sorted((logs / "trace").glob("*.jsonl")):
        for line in file.read_bytes().split(b"\n"):
            if line.endswith(b"}"):
                found[int(file.stem)].append(json.loads(line))
    return dict(found)


def steps_done(lines: list[Line]) -> dict[int, tuple[Any, ...]]:
    """What counts of each step: as it was done last."""
    return {
        line["step"]: (line["loss"], line["generator"], line["fed"], line["samples"])
        for line in lines
        if "step" in line
    }
