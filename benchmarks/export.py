"""Does a model go from Hugging Face to the grid, through training, and back, without losing a bit?

For each family: safetensors that transformers wrote -> `parallelize(checkpoint=...)` on 8 ranks, (1, 2, 2, 2), or with experts on
(1, 4, 1, 1), which is more ranks than experts -> three AdamW steps -> a checkpoint -> `export` -> `from_pretrained` in one process, and the grid again. Compared with what the
ranks held when they saved:

    weights      of the exported model, bit by bit; its files have the names of transformers' files: experts one by one
    logits       of the exported model in one process, within 1e-5 of the largest: sums are in another order
    again        the exported folder on the grid: weights and logits bit by bit

    python -m benchmarks.export
    python -m benchmarks.export --only gpt2 --break weight   # plants a fault: has to fail
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

import fourfold as ff
from benchmarks.ranks import RankPool
from benchmarks.reshard import Piece, whole
from fourfold import Grid, Report
from fourfold.checkpoint import Checkpoints, TrainState
from fourfold.export import export

GRID = (1, 2, 2, 2)
GRIDS = {"qwen3_moe": (1, 4, 1, 1)}  # of families that no axis but z and data shards
RANKS = 8
STEPS, SEQUENCES, LENGTH = 3, 4, 12
VOCABULARY = 131  # divides over no axis
LOGITS_BAR = 1e-5
FILE_BYTES = 20_000  # several files
FAULTS = ("weight", "config")

SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
GATED = SHAPE | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 24}
# Between them: separate and packed projections, tied and separate heads, norms of queries and keys, biases, experts.
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, GATED),
    "qwen3": (Qwen3Config, GATED | {"tie_word_embeddings": True}),
    "gpt2": (GPT2Config, SHAPE | NO_DROPOUT | {"bos_token_id": 0, "eos_token_id": 1}),
    "gemma": (GemmaConfig, GATED),
    "qwen3_moe": (Qwen3MoeConfig, GATED | EXPERTS),
}


@dataclass(frozen=True)
class Outcome:
    """Of one rank: its pieces of the weights, and the logits of its sequences."""

    pieces: list[Piece]
    rows: slice
    logits: Tensor


@dataclass(frozen=True)
class Verdict:
    """Of a family: what is not bit-equal after the export and after the import, and how far logits are off."""

    tensors: int
    files: int
    exported: list[str]
    logits_error: float
    imported: list[str]
    same_logits: bool

    def holds(self) -> bool:
        within = self.logits_error <= LOGITS_BAR
        return not self.exported and not self.imported and within and self.same_logits


# -- on the ranks --------------------------------------------------------------------------------------------------------


def tokens(seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(seed))


def load(folder: Path) -> tuple[Any, Report]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    shape = GRIDS.get(model.config.model_type, GRID)
    return model, ff.parallelize(model, Grid.create(shape, timeout_s=60), checkpoint=folder)


def outcome(model: nn.Module, report: Report) -> Outcome:
    grid, pieces = report.grid, []
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        layout = report.layouts[name]
        local = parameter.detach().to_local().clone()
        boxes = layout.boxes(layout.shard(grid))
        pieces += [(layout.hf_name, layout.hf_shape, index, local[part]) for part, index in boxes]
    rows = grid.local_rows(SEQUENCES)
    model.eval()
    ids = tokens(99)[rows]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    return Outcome(pieces, rows, ff.full_logits(logits, grid, vocab_size=VOCABULARY, batch=ids.shape))


def train_and_save(pretrained: Path, run: Path) -> Outcome:
    model, report = load(pretrained)
    optimizer = ff.sharded_optimizer(torch.optim.AdamW)(model.parameters(), lr=1e-2, eps=1e-4)
    rows = report.grid.local_rows(SEQUENCES)
    model.train()
    for step in range(STEPS):
        ids = tokens(step)[rows]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with Checkpoints(run) as checkpoints:
        checkpoints.save(TrainState(model, optimizer, report, step=STEPS))
    return outcome(model, report)


def load_again(exported: Path) -> Outcome:
    return outcome(*load(exported))


# -- in one process ------------------------------------------------------------------------------------------------------


def write_pretrained(family: str, folder: Path) -> None:
    """As a model that somebody else trained: random numbers in every parameter, several files."""
    config_class, options = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    model.save_pretrained(folder, max_shard_size=FILE_BYTES)


def plant(fault: str | None, folder: Path) -> None:
    if fault == "weight":  # one unit in the last place of one number
        file = sorted(folder.glob("*.safetensors"))[0]
        tensors = load_file(file)
        next(iter(tensors.values())).view(-1).view(torch.int32)[0] += 1
        save_file(tensors, file, metadata={"format": "pt"})
    elif fault == "config":
        config = json.loads((folder / "config.json").read_text())
        key = next(k for k in ("rms_norm_eps", "layer_norm_epsilon") if k in config)
        (folder / "config.json").write_text(json.dumps(config | {key: 0.1}))


def different(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    names = sorted({*expected, *found})
    return [n for n in names if n not in expected or n not in found or not torch.equal(expected[n], found[n])]


def all_rows(outcomes: Iterable[Outcome]) -> Tensor:
    logits = torch.full((SEQUENCES, LENGTH, VOCABULARY), torch.nan)
    for one in outcomes:
        logits[one.rows] = one.logits
    return logits


def names_in(folder: Path) -> list[str]:
    names: list[str] = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names += tensors.keys()
    return sorted(names)


def round_trip(pool: RankPool, family: str, folder: Path, fault: str | None = None) -> Verdict:
    pretrained, run, out = (folder / name for name in ("pretrained", "run", "exported"))
    write_pretrained(family, pretrained)
    ranks = math.prod(GRIDS.get(family, GRID))
    saved: list[Outcome] = pool.run(train_and_save, ranks, pretrained, run)
    exported = export(run, out, file_bytes=FILE_BYTES)
    plant(fault, out)

    weights = whole(piece for one in saved for piece in one.pieces)
    model, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    wrong = different(weights, found) + [f"{k}: {v}" for k, v in loading.items() if v]
    if names_in(out) != names_in(pretrained):
        wrong.append(
            f"{len(names_in(out))} tensors in its files, {len(names_in(pretrained))} in transformers'"
        )
    before = all_rows(saved)
    with torch.no_grad():
        after = model.eval()(input_ids=tokens(99)).logits
    error = float((after - before).abs().max() / before.abs().max())

    again: list[Outcome] = pool.run(load_again, ranks, out)
    return Verdict(
        len(weights),
        sum(name.endswith(".safetensors") for name in exported.files),
        wrong,
        error if error == error else float("inf"),
        different(weights, whole(piece for one in again for piece in one.pieces)),
        torch.equal(before, all_rows(again)),
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=FAMILIES, help="some of the families")
    parser.add_argument(
        "--break", dest="fault", choices=FAULTS, help="plant a fault: the command has to fail"
    )
    options = parser.parse_args(arguments)
    families = options.only or list(FAMILIES)
    start_s = time.perf_counter()
    verdicts = {}
    with RankPool(RANKS) as pool, tempfile.TemporaryDirectory() as folder:
        for family in families:
            verdicts[family] = round_trip(pool, family, Path(folder) / family, options.fault)
    print(
        f"{'family':9} {'tensors':>7} {'files':>5} {'weights':>8} {'logits':>8} {'weights again':>14} {'logits again':>13}"
    )
    for family, v in verdicts.items():
        equal = ["equal" if fine else "NOT" for fine in (not v.exported, not v.imported, v.same_logits)]
        said = "" if v.holds() else f"  FAILED {'; '.join([*v.exported, *v.imported][:3])}"
        print(
            f"{family:9} {v.tensors:7} {v.files:5} {equal[0]:>8} {v.logits_error:8.1e} {equal[1]:>14} {equal[2]:>13}{said}"
        )
    held_up = sum(v.holds() for v in verdicts.values())
    worst = max(v.logits_error for v in verdicts.values())
    print(
        f"export: {held_up}/{len(verdicts)} families bit-equal out and in again; worst logits {worst:.1e} "
        f"(threshold {LOGITS_BAR:g}), {time.perf_counter() - start_s:.0f} s"
    )
    return 0 if held_up == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
