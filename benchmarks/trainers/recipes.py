"""What each trainer of Hugging Face trains on: a small model, rows, chats and preferences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROWS = 8  # of a batch, over all ranks
STEPS = 4
VOCABULARY = 96


def model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
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


def tokenizer() -> tuple[list[str], PreTrainedTokenizerFast]:
    """Its words, and itself, with a template of chats."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"w{i}" for i in range(VOCABULARY - 6)]
    ids = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", "<u>", "<a>", *words])}
    made = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}<a> {% generation %}{{ m['content'] }} <eos> {% endgeneration %}"
        "{% else %}<u> {{ m['content'] }} {% endif %}{% endfor %}"
    )
    return words, fast


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
    from trl import SFTConfig, SFTTrainer

    words, fast = tokenizer()
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


def preferences(
    kind: Callable[[Any], Any], folder: str, rows: int, *, lora: bool = False, **options: Any
) -> Any:
    """TRL's `DPOTrainer`: its reference is another model, or the model without adapters."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    words, fast = tokenizer()
    pairs = []
    for row in range(ROWS * 6):
        draw = torch.Generator().manual_seed(row)

        def say(who: str, count: int, draw: torch.Generator = draw) -> list[dict[str, str]]:
            said = torch.randint(0, len(words), (count,), generator=draw)
            return [{"role": who, "content": " ".join(words[i] for i in said)}]

        answers = {"chosen": say("assistant", 4 + row % 7), "rejected": say("assistant", 9 - row % 5)}
        pairs.append({"prompt": say("user", 3 + row % 5), **answers})
    args = DPOConfig(
        **arguments(folder, rows),
        run_name="preferences",
        max_length=32,
        pad_to_multiple_of=4,
        beta=0.5,
        eval_strategy="steps",
        eval_steps=2,
    )
    common: dict[str, Any] = {
        "args": args,
        "train_dataset": Dataset.from_list(pairs[: ROWS * 4]),
        "eval_dataset": Dataset.from_list(pairs[ROWS * 4 :]),
        "processing_class": fast,
    }
    if "model" in options:
        return kind(DPOTrainer)(**common, **options)
    if not lora:
        return kind(DPOTrainer)(model=model(), ref_model=model(seed=1), **common, **options)
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    adapters = adapted()
    config, values = adapters.peft_config["default"], get_peft_model_state_dict(adapters)
    if (
        "grid" in options
    ):  # given values, and a reference without adapters, which TRL has for new adapters alone
        from fourfold import Lora

        options["parallel"] = {"lora": Lora.of_config(config.to_dict(), values)}
        return kind(DPOTrainer)(model=model(), **common, **options)
    made = kind(DPOTrainer)(model=model(), peft_config=config, **common, **options)
    set_peft_model_state_dict(made.model, values)
    return made


MAKERS: dict[str, Callable[..., Any]] = {
    "Trainer": plain,
    "SFTTrainer": lambda *a, **k: chat(*a, packing=False, **k),
    "SFTTrainer, packed": lambda *a, **k: chat(*a, packing=True, **k),
    "Trainer, LoRA": lambda *a, **k: plain(*a, make=adapted, **k),
    "SFTTrainer, LoRA": lambda *a, **k: chat(*a, make=adapted, packing=False, **k),
    "SFTTrainer, packed, LoRA": lambda *a, **k: chat(*a, make=adapted, packing=True, **k),
    "DPOTrainer": preferences,
    "DPOTrainer, LoRA": lambda *a, **k: preferences(*a, lora=True, **k),
}
