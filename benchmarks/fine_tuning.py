"""Does fine-tuning teach a task, and equally on every grid? A small Llama learns to write dates in words.

The model is pretrained here, on a calendar of two centuries. Then it is fine-tuned on chats, of which only the
answers are learned: they write a date in words. All weights are trained, and then adapters alone (LoRA); each by
`fourfold train` on two grids, and by stock PyTorch or PEFT in one process. The exported models answer with transformers, greedily, for 200 days that neither the calendar
nor the chats have. Compared are the losses at every step, and how many answers are exact.

    python -m benchmarks.fine_tuning
    python -m benchmarks.fine_tuning --break mask    # plants a fault: has to fail
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.learn import fourfold, largest_difference, report, trained
from benchmarks.ranks import RankPool
from benchmarks.run_toml import to_toml
from benchmarks.stock import Stock
from fourfold.config.run_file import load_run
from fourfold.data.manifest import DatasetManifest
from fourfold.data.samples import NO_LABEL, Samples

BEFORE, AFTER = 0.05, 0.9  # the share of exact answers: at most before, at least after
# The losses of the first steps, relatively; the others may differ as in `benchmarks.learn`, because training amplifies rounding: two runs of stock
# PyTorch on this task, whose weights differed by 1e-7, were up to 1e-3 apart with adapters within 70 steps, and 7e-7 within 20.
EARLY, EARLY_APART = 20, 1e-5
LENGTH = 128
EXAMINED, CHATS, ENTRIES = 200, 4000, 40_000
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}\n{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
# Bytes of the file that says which tokens the loss counts, by the fault.
FAULTS = {"mask": bytes([1, 0]), "everything": bytes([1, 1])}


# -- the task ---------------------------------------------------------------------------------------------------------


def days() -> list[date]:
    """All days of two centuries, in an order that is always the same."""
    first, last = date(1900, 1, 1), date(2099, 12, 31)
    found = [first + timedelta(days=n) for n in range((last - first).days + 1)]
    random.Random(0).shuffle(found)
    return found


def entry(day: date) -> str:
    """A document of pretraining: it has what the chats ask for, and goes on."""
    return f"{day.isoformat()}\n{answer(day)}\n{day:%A}"


def question(day: date) -> str:
    return f"Write {day.isoformat()} in words."


def answer(day: date) -> str:
    return f"{day:%B} {day.day}, {day.year}"


def prompt(day: date) -> list[dict[str, str]]:
    return [{"role": "user", "content": question(day)}]


def chat(day: date) -> dict[str, Any]:
    return {"messages": [*prompt(day), {"role": "assistant", "content": answer(day)}]}


def exact_answers(model: Any, tokenizer: Any, asked: Sequence[date]) -> float:
    """The share of days that a model of transformers answers exactly, and ends there."""
    prompts = [
        (tokenizer.apply_chat_template(prompt(day), add_generation_prompt=True)["input_ids"], day)
        for day in asked
    ]
    exact = 0
    model.eval()
    for length, group in groupby(sorted(prompts, key=lambda p: len(p[0])), key=lambda p: len(p[0])):
        ids, alike = zip(*group, strict=True)
        written = model.generate(
            torch.tensor(ids),
            attention_mask=torch.ones(len(ids), length, dtype=torch.long),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )
        for row, day in zip(written[:, length:].tolist(), alike, strict=True):
            text, ended, _ = tokenizer.decode(row).partition(tokenizer.eos_token)
            exact += bool(ended) and text == answer(day)
    return exact / len(asked)


# -- data and run configs ---------------------------------------------------------------------------------------------


def prepare(pool: RankPool, folder: Path, options: argparse.Namespace) -> None:
    """A calendar, and the model that learns it: `base`. Then chats, with its tokenizer."""
    drawn = days()[EXAMINED:]
    chats, entries = drawn[: options.chats], drawn[options.chats :][: options.entries]
    as_lines(folder / "entries.jsonl", [{"text": entry(day)} for day in entries])
    as_lines(folder / "chats.jsonl", [chat(day) for day in chats])
    (folder / "template.jinja").write_text(TEMPLATE)
    words = ["--train-tokenizer", str(options.vocabulary), "--validation", "0.02", "--processes", "1"]
    fourfold("data", "prepare", f"{folder}/text", f"{folder}/entries.jsonl", *words)
    file = write_run(folder / "pretrain", random_init(folder, options), folder / "text", options.steps, 3e-3)
    _, loss = trained(pool, file, "1,2,1,1")
    print(f"pretrained for {options.steps} steps: validation loss {loss:.4f}", flush=True)
    fourfold("export", f"{file.parent}/checkpoints 1,2,1,1", f"{folder}/base")
    words = [
        "--chats",
        "--chat-template",
        f"{folder}/template.jinja",
        "--validation",
        "0.02",
        "--processes",
        "1",
    ]
    fourfold(
        "data", "prepare", f"{folder}/chats", f"{folder}/chats.jsonl", "--tokenizer", f"{folder}/base", *words
    )


def as_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def random_init(folder: Path, options: argparse.Namespace) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        vocab_size=DatasetManifest.load(folder / "text").tokenizer.vocab_size,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "start")
    return folder / "start"


def write_run(
    folder: Path, model: Path, data: Path, steps: int, lr: float, adapter: Path | None = None, rank: int = 0
) -> Path:
    sections: dict[str, Any] = {
        "seed": 0,
        "model": {"pretrained": model},
        "data": {"sources": [{"path": data}], "sequence_length": LENGTH},
        "batch": {"tokens": 32 * LENGTH},
        "optimizer": {"lr": lr, "weight_decay": 0.0},
        "schedule": {"steps": steps, "warmup_steps": steps // 10, "min_lr_ratio": 0.0},
        "engine": {"precision": "fp32"},
        "checkpoints": {"folder": folder / "checkpoints", "every_steps": steps},
        "evaluation": {"sequences": 16, "every_steps": steps},
        "logging": {"every_steps": 1, "tensorboard": False},
        "reliability": {"skip_bad_steps": False},  # stock PyTorch does not skip any
    }
    if adapter is not None:
        sections["lora"] = {"rank": rank, "alpha": 2.0 * rank, "adapter": adapter}
    folder.mkdir()
    file = folder / "run.toml"
    file.write_text(to_toml(sections))
    return file


def new_adapter(folder: Path, rank: int) -> Path:
    """Adapters of PEFT with its first values."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    get_peft_model(model, config).save_pretrained(folder / "adapter")
    return folder / "adapter"


def learned_tokens(folder: Path) -> tuple[int, int]:
    """(labels of the prepared chats, tokens of their answers with the token that ends each)."""
    labels = sum(
        int((samples[row].labels != NO_LABEL).sum())
        for samples in (Samples(folder / "chats", split, LENGTH) for split in ("train", "validation"))
        for row in range(len(samples))
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "chats/tokenizer")
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text().splitlines()]
    return labels, sum(len(tokenizer(messages[-1]["content"]).input_ids) + 1 for messages in chats)


def plant(fault: str, folder: Path) -> None:
    """Change which tokens of the prepared chats the loss counts."""
    for path in (folder / "chats").rglob("*.loss"):
        path.write_bytes(path.read_bytes().translate(FAULTS[fault] + bytes(range(2, 256))))


# -- both ways to fine-tune -------------------------------------------------------------------------------------------


def tuned(pool: RankPool, folder: Path, file: Path, options: argparse.Namespace, before: float) -> bool:
    """Fine-tune in one process and on each grid; do losses and exact answers agree, and has it learned?"""
    run = load_run(file)
    tokenizer = AutoTokenizer.from_pretrained(folder / "chats/tokenizer")
    start_s = time.perf_counter()
    if adapter := run.lora.adapter:
        stock, name = Stock(run, lambda model: peft(model, adapter)), "stock PEFT"
    else:
        stock, name = Stock(run), "stock PyTorch"
    curves, validation = {name: dict(stock.losses())}, {name: stock.validation_loss()}
    answers = {name: exact_answers(stock.model, tokenizer, options.examined)}
    print(f"{name}: {time.perf_counter() - start_s:.0f} s", flush=True)
    for grid in options.grids:
        start_s = time.perf_counter()
        curves[grid], validation[grid] = trained(pool, file, grid)
        exported = file.parent / f"exported {grid}"
        fourfold("export", f"{file.parent}/checkpoints {grid}", str(exported))
        answers[grid] = exact_answers(load(folder / "base", exported), tokenizer, options.examined)
        print(f"{grid}: {time.perf_counter() - start_s:.0f} s", flush=True)
    is_close = report(curves, validation)
    early, at = largest_difference(curves, EARLY)
    print(f"of the first {EARLY} steps: {early:.2e} at step {at} (threshold {EARLY_APART})")
    said = ", ".join(f"{share:.1%} ({name})" for name, share in answers.items())
    print(f"exact answers: before {before:.1%}, after {said}", flush=True)
    return (
        is_close
        and early < EARLY_APART
        and len(set(answers.values())) == 1
        and min(answers.values()) >= AFTER
    )


def load(base: Path, exported: Path) -> Any:
    """A model of transformers, from a folder with all weights, or from the base and PEFT's adapters."""
    if (exported / "config.json").exists():
        return AutoModelForCausalLM.from_pretrained(exported)
    return peft(AutoModelForCausalLM.from_pretrained(base), exported)


def peft(model: Any, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter, is_trainable=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=400)
    parser.add_argument("--entries", type=int, default=ENTRIES)
    parser.add_argument("--chats", type=int, default=CHATS)
    parser.add_argument("--steps", type=int, default=150, help="steps of pretraining")
    parser.add_argument("--tuning-steps", type=int, default=100, help="steps of fine-tuning")
    parser.add_argument("--rank", type=int, default=16, help="the rank of the adapters")
    parser.add_argument("--only", nargs="+", choices=("full", "lora"), default=["full", "lora"])
    parser.add_argument(
        "--grids", nargs="+", default=["1,2,1,2", "1,1,2,2"], metavar="D,Z,Y,X", help="grids to train on"
    )
    parser.add_argument(
        "--break", dest="fault", choices=sorted(FAULTS), help="plant a fault: the command has to fail"
    )
    options = parser.parse_args(arguments)
    options.examined = days()[:EXAMINED]
    with tempfile.TemporaryDirectory() as name, RankPool() as pool:
        folder = Path(name)
        prepare(pool, folder, options)
        if options.fault:
            plant(options.fault, folder)
        labels, of_answers = learned_tokens(folder)
        print(f"the loss counts {labels:,} tokens of the chats; their answers have {of_answers:,}")
        tokenizer = AutoTokenizer.from_pretrained(folder / "chats/tokenizer")
        before = exact_answers(
            AutoModelForCausalLM.from_pretrained(folder / "base"), tokenizer, options.examined
        )
        holds = [before <= BEFORE, labels == of_answers]
        chats, steps = folder / "chats", options.tuning_steps
        if "full" in options.only:
            file = write_run(folder / "full", folder / "base", chats, steps, 1e-3)
            holds.append(tuned(pool, folder, file, options, before))
        if "lora" in options.only:
            adapter = new_adapter(folder, options.rank)
            file = write_run(folder / "lora", folder / "base", chats, steps, 5e-3, adapter, options.rank)
            holds.append(tuned(pool, folder, file, options, before))
    print(f"fine-tuning: {'holds' if all(holds) else 'does NOT hold'}")
    return 0 if all(holds) else 1


if __name__ == "__main__":
    sys.exit(main())
