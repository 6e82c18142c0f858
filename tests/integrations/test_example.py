"""The example of TRL's DPOTrainer on a grid runs as the page shows it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import prepared

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_the_example_of_dpo_aligns_a_model(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    prepared.small_pretrained(tmp_path / "my-model", ["a question", "an answer"] * 100)
    pair = {"prompt": "a question", "chosen": " an answer" * 20, "rejected": " a question" * 10}
    (tmp_path / "preferences.jsonl").write_text((json.dumps(pair) + "\n") * 4)
    run("dpo.py", "preferences.jsonl", tmp_path)


def run(example: str, data: str, folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    command += [str(ROOT / "examples" / example), "my-model", data, "1,2,1,2"]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src"}
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder / example.removesuffix(".py"))
