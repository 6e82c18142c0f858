"""lm_eval, in an environment of its own, judges an export as transformers does, with the files and the command of the page."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import prepared
from tests.documented import INSTALLED, blocks, commands, run

PAGE = "docs/how-to/evaluate.md"
QUESTIONS = 40


def of_page(word: str) -> list[str]:
    """The shell commands of the block that has this word."""
    return next(commands(b) for b in blocks(PAGE) if b.language == "bash" and word in b.text)


def exported(folder: Path, words: list[str]) -> None:
    """A step of a tiny model, exported."""
    prepared.small_pretrained(folder / "my-model", words)
    prepared.as_jsonl(words, folder / "text.jsonl")
    small = "--set engine.precision=fp32 --set schedule.steps=2 --set schedule.warmup_steps=0 --set optimizer.lr=0.01"
    for command in (
        "fourfold data prepare text text.jsonl --tokenizer my-model",
        "fourfold init run.toml --pretrained my-model --data text",
        f"fourfold train run.toml --ranks 1 {small}",
        "fourfold export run/checkpoints exported",
    ):
        run(command, folder, **INSTALLED)


def questions(words: list[str]) -> list[dict[str, Any]]:
    draw = random.Random(0)
    made = []
    for _ in range(QUESTIONS):
        begin, *choices = (draw.choice(words).split() for _ in range(4))
        choices = [" ".join(choice[: draw.randint(1, 4)]) for choice in choices]
        made.append({"question": " ".join(begin[:5]), "choices": choices, "answer": draw.randrange(3)})
    return made


def right_choices(model: Any, tokenizer: Any, asked: list[dict[str, Any]]) -> list[bool]:
    """Is the right choice of each question the likeliest one after it?"""
    found = []
    for each in asked:
        logs = []
        for choice in each["choices"]:
            known = len(tokenizer(each["question"]).input_ids)
            ids = torch.tensor([tokenizer(f"{each['question']} {choice}").input_ids])
            with torch.no_grad():
                log_probs = model(ids).logits[0, :-1].log_softmax(-1)
            logs.append(float(log_probs[torch.arange(known - 1, ids.shape[1] - 1), ids[0, known:]].sum()))
        found.append(max(range(len(logs)), key=logs.__getitem__) == each["answer"])
    return found


@pytest.mark.nightly
def test_lm_eval_counts_the_answers_of_an_export_as_transformers_does(tmp_path: Path) -> None:
    words = [text[i : i + 200] for text in prepared.corpus(8) for i in range(0, len(text), 200)]
    words = [text for text in words if len(text.split()) > 8]
    exported(tmp_path, words)
    asked = questions(words)
    (tmp_path / "tasks").mkdir()
    (task,) = (block.text for block in blocks(PAGE) if block.language == "yaml")
    (tmp_path / "tasks/support.yaml").write_text(task)
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))

    run(" && ".join(of_page("python3 -m venv")), tmp_path)
    (judge,) = of_page("--include_path")
    run(
        f". lm-eval-env/bin/activate && {judge}", tmp_path, HF_HOME=str(tmp_path / "hub"), OMP_NUM_THREADS="1"
    )
    (file,) = (tmp_path / "scores").rglob("results_*.json")
    accuracy = json.loads(file.read_text())["results"]["support"]["acc,none"]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    right = right_choices(model, AutoTokenizer.from_pretrained(tmp_path / "exported"), asked)
    assert 0 < sum(right) < QUESTIONS
    assert accuracy == pytest.approx(sum(right) / QUESTIONS)
