"""Do the trainers that people use train on a grid exactly as in one process?

Each stock trainer runs in one process; then on grids of four and eight ranks, with the same rows in the same order: those of Hugging Face by
`fourfold.integrations.hf.trainer`, Lightning's by its own `ModelParallelStrategy`. Compared: the loss, the norm of the gradient and the loss of evaluation at each step, what `compute_metrics`
returns, and the weights that `save_model` writes. The last row of each saves on its first grid in the middle, and goes on
on another one.

    python -m benchmarks.trainers
    python -m benchmarks.trainers --only Trainer
    python -m benchmarks.trainers --break repeated-rows   # plants a fault: has to fail

The data has a last batch that is not full. Errors are relative to the value, or to the largest entry of a weight.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.ranks import RankError, RankPool

BAR = 1e-5
ROWS = 8  # of a batch, over all ranks
STEPS = 4
VOCABULARY = 96
Shape = tuple[int, int, int, int]
GRIDS: tuple[Shape, ...] = ((1, 1, 2, 2), (1, 2, 1, 2), (2, 2, 1, 1), (1, 2, 2, 2))
FAULTS = ("repeated-rows", "mask", "documents", "optimizer-state", "adapter-sum")


class Outcome(NamedTuple):
    """What a trainer logged, by name, and the weights that it wrote."""

    logs: dict[str, list[float]]
    weights: dict[str, Tensor]


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
    )
    return LlamaForCausalLM(config)


def adapted() -> Any:
    """The same model with PEFT's adapters, whose B is not 0."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=6, lora_alpha=9, target_modules="all-linear", task_type="CAUSAL_LM")
    made = get_peft_model(model(), config)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(generator=drawn).mul_(0.1)
    return made


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens, the first of which are not labels."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCABULARY, (32,), generator=torch.Generator().manual_seed(row))
        labels = ids.clone()
        labels[: row * 7 % 20] = -100
        return {"input_ids": ids, "labels": labels}


def top1(predicted: Any) -> dict[str, float]:
    hits = predicted.predictions[:, :-1].argmax(-1) == predicted.label_ids[:, 1:]
    return {"top1": float(hits.mean()), "rows": float(len(hits))}


def arguments(folder: str, rows: int) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": rows,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "adam_epsilon": 1e-5,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": STEPS // 2,
        "log_level": "error",
        "optim": "adamw_torch",
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
    }


def plain(
    kind: Callable[[Any], Any], folder: str, rows: int, make: Callable[[], Any] = model, **options: Any
) -> Any:
    """`transformers.Trainer`: an epoch of two and a half batches, evaluation of one and a half, with metrics."""
    from transformers import Trainer, TrainingArguments

    evaluated = {"eval_strategy": "steps", "eval_steps": 2}
    return kind(Trainer)(
        model=make(),
        args=TrainingArguments(**arguments(folder, rows), **evaluated),
        train_dataset=Rows(20),
        eval_dataset=Rows(13),
        compute_metrics=top1,
        **options,
    )


def chat(
    kind: Callable[[Any], Any],
    folder: str,
    rows: int,
    make: Callable[[], Any] = model,
    *,
    packing: bool,
    **options: Any,
) -> Any:
    """TRL's `SFTTrainer`: chats, whose assistant's words alone are labels."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from trl import SFTConfig, SFTTrainer

    words = [f"w{i}" for i in range(VOCABULARY - 6)]
    ids = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", "<u>", "<a>", *words])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}<a> {% generation %}{{ m['content'] }} <eos> {% endgeneration %}"
        "{% else %}<u> {{ m['content'] }} {% endif %}{% endfor %}"
    )
    chats = []
    for row in range(160 if packing else 36):
        draw = torch.Generator().manual_seed(row)

        def say(count: int, draw: torch.Generator = draw) -> str:
            return " ".join(words[i] for i in torch.randint(0, len(words), (count,), generator=draw))

        user = {"role": "user", "content": say(3 + row % 5)}
        chats.append({"messages": [user, {"role": "assistant", "content": say(4 + row % 7)}]})
    args = SFTConfig(
        **arguments(folder, rows),
        max_length=32,
        packing=packing,
        assistant_only_loss=True,
        pad_to_multiple_of=4,
        gradient_checkpointing=True,
        dataloader_drop_last=packing,
    )
    return kind(SFTTrainer)(
        model=make(), args=args, train_dataset=Dataset.from_list(chats), processing_class=fast, **options
    )


LIGHTNING = "Lightning"
MAKERS: dict[str, Callable[..., Any]] = {
    "Trainer": plain,
    "SFTTrainer": lambda *a, **k: chat(*a, packing=False, **k),
    "SFTTrainer, packed": lambda *a, **k: chat(*a, packing=True, **k),
    "Trainer, LoRA": lambda *a, **k: plain(*a, make=adapted, **k),
    "SFTTrainer, LoRA": lambda *a, **k: chat(*a, make=adapted, packing=False, **k),
    "SFTTrainer, packed, LoRA": lambda *a, **k: chat(*a, make=adapted, packing=True, **k),
}


def lightning(shape: Shape | None, folder: Path) -> Outcome:
    """Lightning's trainer on its strategy for models that place themselves; without a shape the stock one."""
    import lightning as pl
    from lightning.pytorch.strategies import ModelParallelStrategy

    from examples.lightning_module import OnGrid
    from fourfold import Grid

    seen: dict[str, list[float]] = {"loss": [], "grad_norm": []}

    class Watched(OnGrid):
        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss = super().training_step(batch, _)
            seen["loss"].append(float(loss.detach()))
            return loss

        def configure_gradient_clipping(self, *positional: Any, **options: Any) -> None:
            super().configure_gradient_clipping(*positional, **options)
            seen["grad_norm"].append(float(self.norm))

    module = Watched(model, shape, lr=1e-3)
    parts, part = (1, 0) if shape is None else (shape[0] * shape[1], Grid.create(shape).batch_rank)
    strategy: Any = "auto"
    if shape is not None:
        strategy = ModelParallelStrategy(data_parallel_size=parts, tensor_parallel_size=shape[2] * shape[3])
    trainer = pl.Trainer(
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        strategy=strategy,
        accelerator="cpu",
        devices=1 if shape is None else _ranks(shape),
        use_distributed_sampler=False,  # it would shuffle
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    rows = Rows(64)
    sampler = torch.utils.data.DistributedSampler(rows, parts, part, shuffle=False)
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=ROWS // parts, sampler=sampler))
    return Outcome(seen, module.whole_weights())


def outcome(trainer: Any, folder: Path) -> Outcome:
    from safetensors.torch import load_file

    logs: dict[str, list[float]] = {}
    for entry in trainer.state.log_history:
        for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_top1", "eval_rows"):
            if name in entry:
                logs.setdefault(name, []).append(float(entry[name]))
    trainer.save_model(str(folder))
    (file,) = folder.glob("*.safetensors")  # of a model, or of adapters
    return Outcome(logs, load_file(file))


def alone(name: str) -> Outcome:
    """The stock trainer in one process, beside which there is no other."""
    with tempfile.TemporaryDirectory() as folder, as_launched(0, 1):
        if name == LIGHTNING:
            return lightning(None, Path(folder))
        trainer = MAKERS[name](lambda kind: kind, folder, ROWS)
        trainer.train()
        return outcome(trainer, Path(folder) / "final")


def on_grid(name: str, shape: Shape, folder: str, fault: str | None, resumes: bool) -> Outcome:
    """On a rank: train from the start, or from the checkpoint in the middle."""
    from fourfold import Grid
    from fourfold.integrations.hf import trainer as on_a_grid

    grid = Grid.create(shape, timeout_s=300)
    launched = as_launched(torch.distributed.get_rank(), torch.distributed.get_world_size())
    if name == LIGHTNING:
        with launched:
            return lightning(shape, Path(folder))
    with launched, planted(fault):
        trainer = MAKERS[name](on_a_grid, folder, ROWS // grid.batch_ranks, grid=grid)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}" if resumes else None)
        found = outcome(trainer, Path(folder) / "final")
    return found if torch.distributed.get_rank() == 0 else Outcome(found.logs, {})


@contextmanager
def as_launched(rank: int, ranks: int) -> Iterator[None]:
    """accelerate reads a launcher's variables, and once in a process; a rank of a pool runs other things after it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    names = ("LOCAL_RANK", "RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    before = {name: os.environ.pop(name, None) for name in names}
    if ranks > 1:
        os.environ |= dict(zip(names, map(str, (rank, rank, ranks, ranks)), strict=True))
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """A fault, for as long as it lasts."""
    from fourfold.checkpoint import state
    from fourfold.integrations.hf.accelerator import GridAccelerator
    from fourfold.integrations.hf.trainer import GridTrainer
    from fourfold.parallel import linear

    saved = GridAccelerator.repeated_rows, GridTrainer.compute_loss, state.optimizers.restore
    read_weight = linear.read_weight
    if fault == "repeated-rows":
        GridAccelerator.repeated_rows = lambda self, rows: slice(rows, rows)  # type: ignore[method-assign]
    elif fault == "mask":
        GridTrainer.compute_loss = _with_inputs(labels=lambda labels: labels.roll(1, -1))  # type: ignore[method-assign]
    elif fault == "documents":
        GridTrainer.compute_loss = _with_inputs(  # type: ignore[method-assign]
            position_ids=lambda positions: torch.arange(positions.shape[-1])[None]
        )
    elif fault == "optimizer-state":
        state.optimizers.restore = lambda *a, **k: {}  # type: ignore[assignment]
    elif fault == "adapter-sum":

        def without_sums(module: Any, key: str, axes: Any = (), **options: Any) -> Tensor:
            return read_weight(module, key, () if key.startswith(linear.ADAPTER) else axes, **options)

        linear.read_weight = without_sums
    try:
        yield
    finally:
        linear.read_weight = read_weight
        GridAccelerator.repeated_rows, GridTrainer.compute_loss, state.optimizers.restore = saved  # type: ignore[method-assign]


def _with_inputs(**changes: Callable[[Tensor], Tensor]) -> Any:
    from fourfold.integrations.hf.trainer import GridTrainer

    compute_loss = GridTrainer.compute_loss

    def changed(self: Any, model: Any, inputs: Any, *positional: Any, **options: Any) -> Any:
        inputs = {k: changes[k](v) if k in changes else v for k, v in inputs.items()}
        return compute_loss(self, model, inputs, *positional, **options)

    return changed


def worst_error(found: Outcome, stock: Outcome) -> tuple[float, float]:
    """(of what was logged, of the weights); infinite where something is missing."""
    if {n: len(v) for n, v in found.logs.items()} != {n: len(v) for n, v in stock.logs.items()}:
        return float("inf"), float("inf")
    logged = max(
        abs(a - b) / max(abs(b), 1e-12)
        for name, values in stock.logs.items()
        for a, b in zip(found.logs[name], values, strict=True)
    )
    if set(found.weights) != set(stock.weights):
        return logged, float("inf")
    weights = (
        float((found.weights[n] - w).abs().max() / w.abs().max().clamp(min=1e-12))
        for n, w in stock.weights.items()
    )
    return logged, max(weights)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[*MAKERS, LIGHTNING], choices=[*MAKERS, LIGHTNING])
    parser.add_argument("--grids", type=_shape, nargs="+", default=list(GRIDS))
    parser.add_argument(
        "--break", dest="fault", choices=FAULTS, help="plant a fault: the command has to fail"
    )
    options = parser.parse_args(arguments)
    start_s = time.monotonic()
    good = rows = 0
    with RankPool(8, quiet=True) as pool:
        for name in options.only:
            (stock,) = pool.run(alone, 1, name)
            cases = [(grid, False) for grid in options.grids]
            others = [grid for grid in options.grids[1:] if _ranks(grid) == _ranks(options.grids[0])]
            others = [] if name == LIGHTNING else others
            cases[1:1] = [(grid, True) for grid in others[:1]]  # after the first, which saves
            with tempfile.TemporaryDirectory() as folder:
                for grid, resumes in cases:
                    words = f"{name:24} {grid!s:14} {'resumed' if resumes else '':8}"
                    rows += 1
                    try:
                        found = pool.run(on_grid, _ranks(grid), name, grid, folder, options.fault, resumes)[0]
                    except RankError as error:
                        print(f"{words} failed: {str(error).strip().splitlines()[-1]}", flush=True)
                        continue
                    logged, weights = worst_error(found, stock)
                    is_good = logged <= BAR and weights <= BAR
                    good += is_good
                    print(
                        f"{words} logged {logged:.1e}  weights {weights:.1e}{'' if is_good else '   WRONG'}",
                        flush=True,
                    )
    print(f"trainers: {good}/{rows} as in one process, within {BAR:g}, {time.monotonic() - start_s:.0f} s")
    return 0 if good == rows else 1


def _shape(text: str) -> Shape:
    data, z, y, x = map(int, text.split(","))
    return data, z, y, x


def _ranks(shape: Shape) -> int:
    data, z, y, x = shape
    return data * z * y * x


if __name__ == "__main__":
    sys.exit(main())
