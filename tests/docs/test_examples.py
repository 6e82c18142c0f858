"""The examples in docstrings, the README and the docs are run."""

import doctest
import importlib
import pkgutil
import runpy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fourfold as ff
from benchmarks.quickstart import ROOT, script
from benchmarks.ranks import RankPool
from tests import shown
from tests.documented import blocks

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


def test_the_readme_shows_the_quick_start_script_as_it_is():
    assert script((ROOT / "README.md").read_text()) == (ROOT / "examples/quickstart.py").read_text()


# -- the example of an own model ------------------------------------------------------------------------------------

OWN_MODEL = ROOT / "examples/own_model.py"


def own_model() -> dict[str, Any]:
    return runpy.run_path(str(OWN_MODEL))


def losses_on(shape: tuple[int, int, int, int]) -> list[float]:
    return own_model()["train"](ff.Grid.create(shape))


def plain_losses(steps: int = 5) -> list[float]:
    """The same weights, in the model as it is written, with the loss and the optimizer of PyTorch."""
    names = own_model()
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


def test_the_example_of_an_own_model_trains_like_plain_pytorch(pool: RankPool) -> None:
    (expected,) = pool.run(plain_losses, 1)
    assert expected[-1] < expected[0] - 0.5
    for shape in ((1, 1, 2, 2), (2, 2, 1, 1)):
        for losses in pool.run(losses_on, 4, shape):
            assert losses == pytest.approx(expected, rel=1e-5)


def test_the_page_shows_the_example_of_an_own_model_as_it_is() -> None:
    (shown_there,) = (b.text for b in blocks("docs/own-model.md") if b.language == "python")
    assert shown_there == OWN_MODEL.read_text()
