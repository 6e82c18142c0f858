"""The examples in docstrings and the README are run."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fourfold as ff
from benchmarks.quickstart import ROOT, script

MODULES = sorted(m.name for m in pkgutil.walk_packages(ff.__path__, "fourfold."))
# They make a world of their own, or need none; all others are shown on a rank.
ALONE = ("fourfold.cli", "fourfold.dry_run", "fourfold.launch", "fourfold.planner")


def run_examples(name: str, folder: str) -> tuple[int, list[str]]:
    """The examples of a module on a world of one rank, beside a small parallel model and a batch."""
    torch.manual_seed(0)
    config = small_config()
    grid = ff.Grid.create((1, 1, 1, 1))
    model = LlamaForCausalLM(config)
    report = ff.parallelize(model, grid)
    ids = torch.randint(131, (2, 8))
    given = {
        "grid": grid,
        "model": model,
        "report": report,
        "ids": ids,
        "items": 14,
        "folder": Path(folder),
        "config": config,
        "LlamaForCausalLM": LlamaForCausalLM,
    }
    return examples_of(name, given)


def small_config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=131
    )


def examples_of(name: str, given: dict[str, object]) -> tuple[int, list[str]]:
    module = importlib.import_module(name)
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    examples = 0
    for test in doctest.DocTestFinder().find(module, extraglobs=given):
        examples += len(test.examples)
        runner.run(test, out=said.append)
    return examples, said


@pytest.mark.limit(300)
def test_every_example_in_a_docstring_runs(pool, tmp_path):
    examples = 0
    for name in MODULES:
        if name.startswith(ALONE):
            count, said = examples_of(name, {"config": small_config()})
        else:
            count, said = pool.run(run_examples, 1, name, str(tmp_path))[0]
        assert not said, "\n".join(said)
        examples += count
    assert examples > 20


def test_every_public_function_has_a_docstring():
    assert [name for name in ff.__all__ if not (getattr(ff, name).__doc__ or "").strip()] == []


def test_the_readme_shows_the_quick_start_script_as_it_is():
    assert script((ROOT / "README.md").read_text()) == (ROOT / "examples/quickstart.py").read_text()
