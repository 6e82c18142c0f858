"""Does a run learn, and equally on every grid? A Llama of about 10M parameters on text of this machine.

The training text is the sources and notes of the installed Python packages, with a tokenizer trained on them. The same run is
done from the same weights: in one process with stock PyTorch, and by `fourfold train` on two grids. At every step the losses may
differ by 1 %, and the last validation loss must be well below the entropy of single tokens. At the end the exported model
generates text.

The model is wide rather than deep: training at a high learning rate amplifies rounding errors, more so with more layers. With 8
layers of hidden size 256 the curves differed by 1.9 % after a hundred steps.

    python -m benchmarks.learn
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.ranks import RankPool
from benchmarks.run_toml import to_toml
from benchmarks.stock import Stock, mixture_of, rows
from fourfold.config.run_file import load_run
from fourfold.config.schema import RunConfig
from fourfold.data.manifest import DatasetManifest

APART = 0.01  # largest relative difference of the losses at a step
BELOW = 0.85  # of the entropy of single tokens
HANG_S = 3600.0  # a run that takes longer hangs


def prepare(folder: Path, megabytes: float, vocabulary: int) -> None:
    """Run `fourfold data prepare` on the sources and notes of installed packages."""
    site = Path(sysconfig.get_path("purelib"))
    found = sorted(p for suffix in (".py", ".md", ".rst") for p in site.rglob(f"*{suffix}"))
    corpus, size = folder / "corpus.jsonl", 0
    with corpus.open("w") as out:
        # Every n-th file, so that all packages are represented.
        for path in (p for first in range(0, 97) for p in found[first::97]):
            if 1_000 < path.stat().st_size < 100_000:
                text = path.read_text(errors="ignore")
                out.write(json.dumps({"text": text}) + "\n")
                size += len(text)
            if size > megabytes * 1e6:
                break
    command = ["data", "prepare", str(folder / "data"), str(corpus), "--train-tokenizer", str(vocabulary)]
    fourfold(*command, "--validation", "0.05")


def fourfold(*arguments: str) -> None:
    """Run a command; what it printed is shown if it fails."""
    from fourfold.cli.main import main as command

    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = command(list(arguments))
    if code:
        raise SystemExit(f"fourfold {' '.join(arguments)} failed:\n{said.getvalue()[-6000:]}")


def write_run(folder: Path, options: argparse.Namespace) -> Path:
    vocabulary = DatasetManifest.load(folder / "data").tokenizer.vocab_size
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=options.length,
        vocab_size=vocabulary,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters", flush=True)
    model.save_pretrained(folder / "start")
    sections = {
        "seed": 0,
        "model": {"pretrained": folder / "start"},
        "data": {"sources": [{"path": folder / "data"}], "sequence_length": options.length},
        "batch": {"tokens": options.length * options.sequences},
        "optimizer": {"lr": 2e-3},
        "schedule": {"steps": options.steps, "warmup_steps": max(1, options.steps // 10)},
        "engine": {"precision": "fp32"},
        "checkpoints": {"folder": folder / "checkpoints", "every_steps": options.steps},
        "evaluation": {"sequences": 64, "every_steps": options.steps},
        "logging": {"every_steps": 1},
        "reliability": {"skip_bad_steps": False},  # stock PyTorch does not skip any
    }
    file = folder / "run.toml"
    file.write_text(to_toml(sections))
    return file


def trained(pool: RankPool, file: Path, grid: str) -> tuple[dict[int, float], float]:
    """(the loss by step, the last validation loss) of `fourfold train` on a grid."""
    logs, checkpoints = file.parent / f"logs {grid}", file.parent / f"checkpoints {grid}"
    sizes = dict(zip(("data", "z", "y", "x"), map(int, grid.split(",")), strict=True))
    changes = [f"grid.{axis}={size}" for axis, size in sizes.items()]
    changes += [f"logging.folder={logs}", f"checkpoints.folder={checkpoints}"]
    words = ["train", str(file), *(f"--set={change}" for change in changes)]
    pool.run(fourfold, math.prod(sizes.values()), *words, timeout_s=HANG_S)
    lines = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}, lines[-1]["validation_loss"]


def unigram_entropy(run: RunConfig) -> float:
    """Entropy of the validation samples in nats per token, by the token frequencies of the training text."""
    vocabulary = DatasetManifest.load(run.data.sources[0].path).tokenizer.vocab_size
    counts = np.ones(vocabulary)
    mixture = mixture_of(run)
    for first in range(0, len(mixture), 256):
        ids = rows(mixture, first, min(256, len(mixture) - first))["input_ids"].numpy()
        counts += np.bincount(ids.ravel(), minlength=vocabulary)
    labels = rows(mixture_of(run, "validation"), 0, run.evaluation.sequences)["labels"][:, 1:].numpy()
    return float(-np.log(counts / counts.sum())[labels[labels >= 0]].mean())


def generate(folder: Path) -> str:
    """Text generated by `transformers.pipeline` from an exported folder."""
    from transformers import pipeline

    writer = pipeline("text-generation", model=str(folder))
    return str(writer("def __init__(self", max_new_tokens=40, do_sample=False)[0]["generated_text"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument(
        "--grids", nargs="+", default=["1,2,2,2", "2,1,1,2"], metavar="D,Z,Y,X", help="grids to train on"
    )
    parser.add_argument("--megabytes", type=float, default=8.0, help="megabytes of text")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name, RankPool() as pool:
        folder = Path(name)
        prepare(folder, options.megabytes, options.vocabulary)
        file = write_run(folder, options)
        run = load_run(file)
        print(
            f"{len(mixture_of(run)):,} samples of {options.length} tokens, {options.steps} steps", flush=True
        )
        curves: dict[str, dict[int, float]] = {}
        validation: dict[str, float] = {}
        start_s = time.perf_counter()
        stock = Stock(run)
        curves["stock PyTorch"] = dict(stock.losses())
        validation["stock PyTorch"] = stock.validation_loss()
        print(f"stock PyTorch: {time.perf_counter() - start_s:.0f} s", flush=True)
        for grid in options.grids:
            start_s = time.perf_counter()
            curves[grid], validation[grid] = trained(pool, file, grid)
            print(f"{grid}: {time.perf_counter() - start_s:.0f} s", flush=True)
        is_close = report(curves, validation)
        entropy = unigram_entropy(run)
        last = max(validation.values())
        print(
            f"entropy of single tokens {entropy:.4f}; validation loss {last:.4f}, {last / entropy:.3f} of it ({BELOW})"
        )
        exported = folder / "exported"
        fourfold("export", str(folder / f"checkpoints {options.grids[0]}"), str(exported))
        text = generate(exported)
        print(f"the exported model generates: {text!r}")
        holds = is_close and last < BELOW * entropy and len(text) > len("def __init__(self")
    print(f"learn: {'holds' if holds else 'does NOT hold'}")
    return 0 if holds else 1


def largest_difference(curves: dict[str, dict[int, float]], until: int | None = None) -> tuple[float, int]:
    """(the largest relative difference of the losses at a step, which step), of all steps or the first ones."""
    steps = [step for step in next(iter(curves.values())) if until is None or step <= until]
    losses = {step: [curve[step] for curve in curves.values()] for step in steps}
    return max((max(found) / min(found) - 1, step) for step, found in losses.items())


def report(curves: dict[str, dict[int, float]], validation: dict[str, float]) -> bool:
    """Print the curves side by side; are they close?"""
    print("step  " + "  ".join(f"{name:>14}" for name in curves))
    steps = sorted(next(iter(curves.values())))
    for step in [s for s in steps if s == 1 or s % max(1, len(steps) // 10) == 0]:
        print(f"{step:4d}  " + "  ".join(f"{losses[step]:14.5f}" for losses in curves.values()))
    print("valid " + "  ".join(f"{loss:14.5f}" for loss in validation.values()))
    worst = largest_difference(curves)
    print(f"largest difference: {worst[0]:.2e} at step {worst[1]} (threshold {APART})")
    return worst[0] < APART and all(sorted(losses) == steps for losses in curves.values())


if __name__ == "__main__":
    sys.exit(main())
