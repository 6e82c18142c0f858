"""The examples in docstrings, the README and the docs are run."""

import difflib
import doctest
import importlib
import pkgutil
import re
import runpy
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fourfold as ff
from benchmarks.ranks import RankPool
from tests import shown
from tests.documented import ROOT, blocks

MODULES = sorted(m.name for m in pkgutil.walk_packages(ff.__path__, "fourfold."))
# They make a world of their own, or need none; all others are shown on a rank.
ALONE = ("fourfold.cli", "fourfold.dry_run", "fourfold.launch", "fourfold.planner")


def run_examples(name: str, folder: str) -> tuple[int, list[str]]:
    """The examples of a module on a world of one rank, beside a small parallel model and a batch."""
    return examples_of(name, shown.names(folder))


def examples_of(name: str, given: dict[str, object]) -> tuple[int, list[str]]:
    module = importlib.import_module(name)
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    examples = 0
    for test in doctest.DocTestFinder().find(module, extraglobs=given):
        examples += len(test.examples)
        runner.run(test, out=said.append)
    return examples, said


def test_every_example_in_a_docstring_runs(pool, tmp_path):
    examples = 0
    for name in MODULES:
        if name.startswith(ALONE):
            count, said = examples_of(name, {"config": shown.small_config()})
        else:
            count, said = pool.run(run_examples, 1, name, str(tmp_path))[0]
        assert not said, "\n".join(said)
        examples += count
    assert examples > 20


def test_every_public_function_has_a_docstring():
    assert [name for name in ff.__all__ if not (getattr(ff, name).__doc__ or "").strip()] == []


# -- a custom loop --------------------------------------------------------------------------------------------------

STOCK_LOOP, CUSTOM_LOOP = ROOT / "examples/stock_loop.py", ROOT / "examples/custom_loop.py"


def printed_losses(script: str) -> list[float]:
    with redirect_stdout(StringIO()) as printed:
        exec(compile(script, "example", "exec"), {})
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed.getvalue())]


def custom_losses() -> list[float]:
    """The script on 4 ranks, whose process group is not its own to destroy."""
    script = CUSTOM_LOOP.read_text().replace("(1, 2, 2, 2)", "(1, 1, 2, 2)")
    return printed_losses(script.replace("dist.destroy_process_group()", ""))


def test_the_custom_loop_has_the_losses_of_the_stock_loop(pool: RankPool) -> None:
    expected = printed_losses(STOCK_LOOP.read_text())
    assert len(expected) == 10
    assert expected[-1] < expected[0] - 0.5
    losses, *_ = pool.run(custom_losses, 4)
    assert losses == pytest.approx(expected, abs=2e-4)  # four digits are printed


def test_the_readme_shows_what_changes_in_a_loop() -> None:
    (shown_there,) = (b.text for b in blocks("README.md") if b.language == "diff")
    stock, custom = (path.read_text().splitlines() for path in (STOCK_LOOP, CUSTOM_LOOP))
    lines = list(difflib.unified_diff(stock, custom, lineterm="", n=1))[2:]
    assert shown_there == "".join(f"{'@@' if line.startswith('@@') else line}\n" for line in lines)


def test_the_page_shows_the_custom_loop_as_it_is() -> None:
    assert CUSTOM_LOOP.read_text() in [b.text for b in blocks("docs/tutorials/own-loop.md")]


@pytest.mark.nightly
def test_the_comparison_of_plans_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples/compare_plans.py"))
    printed = capsys.readouterr().out
    assert len(re.findall(r"step +[\d.]+ s  MFU +[\d.]+ %", printed)) >= 10


# -- a custom module ------------------------------------------------------------------------------------------------

CUSTOM_MODULE = ROOT / "examples/custom_module.py"


def custom_module() -> dict[str, Any]:
    return runpy.run_path(str(CUSTOM_MODULE))


def losses_on(shape: tuple[int, int, int, int], attention: str = "Attention") -> list[float]:
    names = custom_module()
    names["Attention"].__name__ = attention
    return names["train"](ff.Grid.create(shape))


def plain_losses(steps: int = 5) -> list[float]:
    """The same weights, in the model as it is written, with the loss and the optimizer of PyTorch."""
    names = custom_module()
    with torch.device("meta"):
        drawn = names["Model"]()
    ff.parallelize(drawn, ff.Grid.create((1, 1, 1, 1)), roles=names["ROLES"], seed=0)
    model = names["Model"]()
    model.load_state_dict({name: p.detach().to_local() for name, p in drawn.named_parameters()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(names["VOCABULARY"], (8, names["LENGTH"]), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_custom_module_trains_like_plain_pytorch(pool: RankPool) -> None:
    (expected,) = pool.run(plain_losses, 1)
    assert expected[-1] < expected[0] - 0.5
    for shape in ((1, 1, 2, 2), (2, 2, 1, 1)):
        for losses in pool.run(losses_on, 4, shape):
            assert losses == pytest.approx(expected, rel=1e-5)
    for losses in pool.run(losses_on, 2, (1, 1, 1, 2), "SelfAttn"):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_a_custom_attention_that_is_not_called_so_is_rejected(pool: RankPool) -> None:
    said = "blocks.0.attention, a Mixer, has num_heads=8.* if it is attention, call its class MixerAttention"
    with pytest.raises(Exception, match=said):
        pool.run(losses_on, 2, (1, 1, 1, 2), "Mixer")


def test_the_page_shows_the_custom_module_as_it_is() -> None:
    (shown_there,) = (b.text for b in blocks("docs/tutorials/own-module.md") if b.language == "python")
    assert shown_there == CUSTOM_MODULE.read_text()
