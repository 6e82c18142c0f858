"""Does every grid train exactly like one process?

Three AdamW steps with clipping of a small model of each kind, on every factorisation of the ranks into
(data, z, y, x), against the stock Hugging Face model in one process, in fp32. Compared on every rank, shard by shard:
the loss of each step, every gradient of each step (as clipped), every parameter after the third.

    python -m benchmarks.parity --ranks 8
    python -m benchmarks.parity --ranks 8 --break norm      # plants a fault: has to fail
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fourfold.grid import Grid, factorisations
from fourfold.parallel import linear, loss, norm
from fourfold.parallel.clip import clip_grad_norm_
from fourfold.parallel.optimizer import on_shards
from fourfold.parallel.parallelize import parallelize
from fourfold.ranks import RankPool

LOSS_BAR = 1e-5  # relative
GRADIENT_BAR = 1e-4  # of the gradient's own largest entry
PARAMETER_BAR = 1e-4  # of the parameter's own largest entry
STEPS = 3
LEARNING_RATE = 1e-3
MAX_NORM = 0.5  # below the norms that occur, so that clipping acts in each step
# AdamW divides by sqrt(v) + eps. With its usual 1e-8, entries whose true gradient is zero get a full update in the
# direction of their rounding noise; with this eps an update is decided by the gradient.
EPS = 1e-5
VOCABULARY = 131  # does not divide over any axis
GRIDS_OF_16 = ((2, 2, 2, 2), (1, 4, 2, 2), (1, 1, 4, 4), (1, 2, 2, 4), (4, 1, 2, 2))
QUICK_GRIDS_OF_8 = ((1, 1, 1, 8), (1, 1, 8, 1), (8, 1, 1, 1), (1, 2, 2, 2), (2, 2, 1, 2), (2, 1, 4, 1))
FAULTS = ("norm", "sibling-reduce", "loss")

_SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def build(kind: str) -> PreTrainedModel:
    """A small model with random weights, the same in every process."""
    torch.manual_seed(0)
    model: PreTrainedModel
    if kind == "llama":  # grouped-query attention: at x = 8 the four key/value heads are replicated
        model = LlamaForCausalLM(LlamaConfig(**_SMALL, num_key_value_heads=4))
    elif kind == "gpt2":  # Conv1D, tied, LayerNorm, biases, learned positions
        config = {
            k: v for k, v in _SMALL.items() if k not in ("intermediate_size", "max_position_embeddings")
        }
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = GPT2LMHeadModel(GPT2Config(**config, n_inner=128, n_positions=64, **dropout))
    elif kind == "qwen3":  # norms of q and k
        model = Qwen3ForCausalLM(Qwen3Config(**_SMALL, num_key_value_heads=8, head_dim=16))
    elif kind == "gemma2":  # scaled embeddings, 1 + w, soft-capping of attention and logits, sliding windows
        model = Gemma2ForCausalLM(
            Gemma2Config(
                **_SMALL, num_key_value_heads=8, head_dim=16, sliding_window=8, attn_implementation="eager"
            )
        )
    elif kind == "gpt_neox":  # fused QKV with bias, parallel residual
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**_SMALL))
    else:
        raise ValueError(f"no model {kind!r}")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # biases start at 0 and norms at 1: give each something to get wrong
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model.train()


KINDS = ("llama", "gpt2", "qwen3", "gemma2", "gpt_neox")


def batches(ranks: int) -> list[tuple[Tensor, Tensor]]:
    """A batch for each step, with labels masked so that each sequence counts another number of them."""
    generator = torch.Generator().manual_seed(2)
    out = []
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (ranks, 12), generator=generator)
        labels = ids.clone()
        for row in range(ranks):
            labels[row, : row % 11] = -100
        out.append((ids, labels))
    return out


def reference(kind: str, ranks: int, path: Path) -> list[float]:
    """Train the stock model in this process; write gradients and final parameters, return the losses."""
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    losses, tensors = [], {}
    for step, (ids, labels) in enumerate(batches(ranks)):
        loss_value = model(input_ids=ids, labels=labels).loss
        loss_value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        losses.append(loss_value.item())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            tensors[f"gradient {step} {name}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        tensors[f"parameter {name}"] = parameter.detach().clone()
    save_file(tensors, path)
    return losses


@dataclass(frozen=True)
class Errors:
    loss: float
    gradient: float
    parameter: float
    worst_gradient: str

    def within_bars(self) -> bool:
        # Written so that a NaN fails.
        return self.loss <= LOSS_BAR and self.gradient <= GRADIENT_BAR and self.parameter <= PARAMETER_BAR


def run_rank(
    shape: tuple[int, int, int, int], kind: str, losses: list[float], path: Path, fault: str | None
) -> Errors:
    """Train on the grid, on this rank; the largest errors of what this rank holds."""
    ranks = shape[0] * shape[1] * shape[2] * shape[3]
    model = build(kind)
    grid = Grid.create(shape, timeout_s=60)
    with planted(fault):
        report = parallelize(model, grid)
        if fault == "sibling-reduce":
            for module in model.modules():
                if isinstance(module, linear.Linear4D) and len(module.group.members) > 1:
                    module.group.out_axis = None
        optimizer = on_shards(torch.optim.AdamW)(model.parameters(), lr=LEARNING_RATE, eps=EPS, foreach=True)
        parameters = dict(model.named_parameters())
        loss_error, gradients = 0.0, defaultdict(float)
        parameter_error = 0.0
        with safe_open(path, "pt") as file:

            def difference(key: str, name: str, local: Tensor) -> float:
                """Largest difference on this rank, relative to the whole reference tensor's largest entry."""
                layout = report.layouts[name]
                whole = file.get_tensor(f"{key} {layout.hf_name}")
                part = whole[layout.in_hf(layout.shard(grid))]
                if not part.numel():
                    return 0.0
                return float((local - part).abs().max() / whole.abs().max())

            for step, (ids, labels) in enumerate(batches(ranks)):
                rows = grid.local_rows(len(ids))
                loss_value = model(input_ids=ids[rows], labels=labels[rows]).loss
                loss_value.backward()
                clip_grad_norm_(model.parameters(), MAX_NORM, grid)
                loss_error = max(loss_error, abs(loss_value.item() - losses[step]) / abs(losses[step]))
                for name, parameter in parameters.items():
                    error = difference(f"gradient {step}", name, parameter.grad.to_local())
                    gradients[name] = max(gradients[name], error, key=_nan_first)
                optimizer.step()
                optimizer.zero_grad()
            for name, parameter in parameters.items():
                error = difference("parameter", name, parameter.detach().to_local())
                parameter_error = max(parameter_error, error, key=_nan_first)
    worst = max(gradients, key=lambda n: _nan_first(gradients[n]))
    return Errors(loss_error, gradients[worst], parameter_error, worst)


def _nan_first(value: float) -> float:
    return float("inf") if value != value else value


class planted:  # noqa: N801 - a context manager, used like a function
    """A fault in one layer, for as long as it lasts."""

    def __init__(self, fault: str | None) -> None:
        self._fault = fault

    def __enter__(self) -> None:
        if self._fault == "norm":  # each shard normalises by its own statistics
            self._saved = norm.sum_both
            norm.sum_both = lambda tensor, *_: tensor * 2
        elif self._fault == "loss":  # the mean over the labels of this rank, not of the global batch
            self._saved = loss.count_labels
            loss.count_labels = lambda labels, grid, **_: (labels != -100).sum().clamp(min=1)

    def __exit__(self, *_: object) -> None:
        if self._fault == "norm":
            norm.sum_both = self._saved
        elif self._fault == "loss":
            loss.count_labels = self._saved


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, choices=(2, 4, 8, 16))
    parser.add_argument("--models", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--quick", action="store_true", help="a few grids of 8 ranks instead of all")
    parser.add_argument(
        "--break", dest="fault", choices=FAULTS, help="plant a fault: the command has to fail"
    )
    options = parser.parse_args(arguments)

    grids = list(GRIDS_OF_16) if options.ranks == 16 else factorisations(options.ranks)
    if options.quick and options.ranks == 8:
        grids = list(QUICK_GRIDS_OF_8)
    print(
        f"bars: loss {LOSS_BAR:g} relative, gradients {GRADIENT_BAR:g} and parameters {PARAMETER_BAR:g} of their own maximum"
    )
    print(
        f"{STEPS} AdamW steps, lr {LEARNING_RATE:g}, eps {EPS:g}, gradient norm clipped to {MAX_NORM:g}; Gloo on CPU, fp32"
    )
    print(f"{'model':10} {'(data, z, y, x)':16} {'loss':>9} {'gradient':>9} {'parameter':>9}")
    start_s = time.perf_counter()
    held, failed, worst = 0, 0, 0.0
    with RankPool(options.ranks) as pool, tempfile.TemporaryDirectory() as folder:
        for kind in options.models:
            path = Path(folder) / f"{kind}.safetensors"
            losses = reference(kind, options.ranks, path)
            for shape in grids:
                results = pool.run(
                    run_rank, options.ranks, shape, kind, losses, path, options.fault, timeout_s=180
                )
                errors = Errors(
                    max((e.loss for e in results), key=_nan_first),
                    max((e.gradient for e in results), key=_nan_first),
                    max((e.parameter for e in results), key=_nan_first),
                    max(results, key=lambda e: _nan_first(e.gradient)).worst_gradient,
                )
                good = errors.within_bars()
                held, failed = held + good, failed + (not good)
                worst = max(worst, errors.gradient, key=_nan_first)
                verdict = "" if good else f"  FAILED, worst in {errors.worst_gradient}"
                print(
                    f"{kind:10} {shape!s:16} {errors.loss:9.1e} {errors.gradient:9.1e} {errors.parameter:9.1e}{verdict}",
                    flush=True,
                )
    print(
        f"parity: {held}/{held + failed} model and grid pairs exact, worst gradient error {worst:.2e}, "
        f"{time.perf_counter() - start_s:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
