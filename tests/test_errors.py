"""Every wrong request raises an error with the name, both numbers and the remedy, on all ranks, before any of them waits.

The requests of `WRONG` are made on eight ranks in one run. Each says what its error must name; where the way out is
cheap it is followed too. Between two requests the ranks meet, so one that errs on some ranks only is found out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

from benchmarks.ranks import RankPool
from tests.wrong_models import DECODER
from tests.wrong_requests import RANKS, WRONG


def write_checkpoints(folder: Path) -> None:
    torch.manual_seed(0)
    state = LlamaForCausalLM(LlamaConfig(**DECODER)).state_dict()
    lacking = {name: tensor for name, tensor in state.items() if not name.endswith("up_proj.weight")}
    for name, tensors in (("sound", state), ("lacks", lacking)):
        (folder / name).mkdir()
        save_file(
            {key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name / "model.safetensors"
        )
    (folder / "pickled").mkdir()
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"never read")


def meet() -> None:
    dist.all_reduce(torch.zeros(()))


def make_requests(folder: Path) -> dict[str, tuple[str, str]]:
    """For each request the error that it raised, and that of its remedy: type and text, or nothing."""
    os.chdir(folder)
    raised = {}
    for name, wrong in WRONG.items():
        answers = []
        for attempt in (wrong.request, wrong.instead):
            answer = ""
            try:
                if attempt is not None:
                    attempt()
            except Exception as error:
                answer = f"{type(error).__name__}|{error}"
            answers.append(answer)
            meet()
        raised[name] = (answers[0], answers[1])
    return raised


@pytest.fixture(scope="module")
def raised(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, str]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoints(folder)
    return pool.run(make_requests, RANKS, folder, timeout_s=300)


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_both_numbers_and_the_remedy(name: str, raised: list[dict[str, tuple[str, str]]]) -> None:
    kind, _, text = raised[0][name][0].partition("|")
    assert kind in ("UnsupportedError", "ValueError"), f"{kind}: {text}"
    for pattern in WRONG[name].says:
        assert re.search(pattern, text), f"{pattern!r} is not in: {text}"


@pytest.mark.parametrize("name", [name for name, wrong in WRONG.items() if wrong.instead is not None])
def test_the_remedy_works(name: str, raised: list[dict[str, tuple[str, str]]]) -> None:
    assert raised[0][name][1] == ""


@pytest.mark.parametrize("name", WRONG)
def test_all_ranks_raise_the_same_error(name: str, raised: list[dict[str, tuple[str, str]]]) -> None:
    assert len({rank[name] for rank in raised}) == 1
