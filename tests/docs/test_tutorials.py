"""The tutorials of fine-tuning, word by word, with a tiny model."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fourfold.config.edit import with_fields
from tests import prepared
from tests.documented import INSTALLED, ROOT, Code, blocks, commands, run

pytestmark = pytest.mark.nightly

TRL, LORA = "docs/tutorials/fine-tune-trl.md", "docs/tutorials/lora-70b.md"
# All that is not run as it stands on the pages.
INSTEAD = {
    "pip install '.[hf]'": "true",
    "pip install peft": "true",
    "hf download Qwen/Qwen3-8B --local-dir my-model": "cp -r tiny my-model",
    "hf download meta-llama/Llama-3.3-70B-Instruct --local-dir my-model --exclude 'original/*'": "cp -r tiny my-model",
    "torchrun --nproc-per-node 8": "torchrun --nproc-per-node 2",
    "chats.jsonl 1,8,1,1": "chats.jsonl 1,2,1,1",
    "fourfold plan lora-70b.toml --cluster dgx-h100 --gpus 8": "fourfold plan lora-70b.toml --cluster dgx-h100 --gpus 2",
}
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}assistant: {% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a reader has, and the model that stands for the download."""
    words = [text[i : i + 120] for text in prepared.corpus() for i in range(0, len(text), 120)]
    prepared.small_pretrained(tmp_path / "tiny", words)
    config = json.loads((tmp_path / "tiny/config.json").read_text())
    (tmp_path / "tiny/config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    (tmp_path / "tiny/chat_template.jinja").write_text(TEMPLATE)
    chats = [
        [{"role": "user", "content": a}, {"role": "assistant", "content": b}]
        for a, b in zip(words[:300], words[300:600], strict=True)
    ]
    lines = (json.dumps({"messages": chat}) + "\n" for chat in chats)
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def run_here(command: str, folder: Path) -> str:
    for words, others in INSTEAD.items():
        command = command.replace(words, others)
    return run(command, folder, **INSTALLED, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", COLUMNS="150")


def run_page(page: str, folder: Path) -> dict[str, str]:
    """What each command of a page printed; settings that it shows are written into its run config."""
    printed = {}
    for block in blocks(page):
        if block.language == "bash":
            printed |= {command: run_here(command, folder) for command in commands(block)}
        elif block.language == "toml":
            write_settings(block, folder)
    return printed


def write_settings(block: Code, folder: Path) -> None:
    file = folder / "lora-70b.toml"
    file.write_text(with_fields(file.read_text(), tomllib.loads(block.text)))


def test_each_thing_that_is_replaced_is_on_a_page() -> None:
    written = [
        c
        for page in (TRL, LORA)
        for block in blocks(page)
        if block.language == "bash"
        for c in commands(block)
    ]
    assert [words for words in INSTEAD if not any(words in command for command in written)] == []


def test_a_hub_model_is_fine_tuned_and_resumes(folder: Path) -> None:
    pytest.importorskip("trl")
    printed = run_page(TRL, folder)
    (look,) = (said for command, said in printed.items() if "--show" in command)
    assert "«" in look
    first = load_file(folder / "sft/model.safetensors")
    assert not torch.equal(
        first["lm_head.weight"], load_file(folder / "tiny/model.safetensors")["lm_head.weight"]
    )

    before, newest = sorted(
        (folder / "sft").glob("checkpoint-*"), key=lambda p: int(p.name.partition("-")[2])
    )[-2:]
    saved = {path: path.stat().st_mtime_ns for path in before.rglob("*") if path.is_file()}
    shutil.rmtree(newest)
    (folder / "sft/model.safetensors").unlink()
    (train,) = (command for command in printed if command.startswith("torchrun "))
    run_here(train, folder)
    assert newest.is_dir()
    assert {path: path.stat().st_mtime_ns for path in saved} == saved, "it began again"
    for name, weight in load_file(folder / "sft/model.safetensors").items():
        torch.testing.assert_close(weight, first[name], rtol=1e-5, atol=1e-6)


def test_adapters_are_trained_exported_and_merged(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    printed = run_page(LORA, folder)
    (plan,) = (said for command, said in printed.items() if "--size 70b" in command)
    assert "LoRA of rank 16" in plan
    base = AutoModelForCausalLM.from_pretrained(folder / "my-model")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain, merged_logits = base(ids).logits, merged(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, folder / "adapters")(ids).logits
    torch.testing.assert_close(merged_logits, adapted, rtol=1e-4, atol=1e-4)
    assert float((adapted - plain).abs().max()) > 1e-3, "the adapters change nothing"
    assert "lora_" not in " ".join(load_file(folder / "merged/model.safetensors"))
