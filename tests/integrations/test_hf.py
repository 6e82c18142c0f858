"""Trainers of Hugging Face on a grid: what their arguments mean, and that they train as in one process."""

import copy
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from benchmarks.ranks import RankError, RankPool
from benchmarks.trainers import runs
from benchmarks.trainers.faults import FAULTS
from benchmarks.trainers.outcome import BAR, worst_error
from fourfold.errors import UnsupportedError
from fourfold.integrations.hf import GridAccelerator, trainer
from fourfold.integrations.hf.arguments import DPO_FIELDS, FIELDS, translate
from fourfold.mesh.axes import AXES
from fourfold.mesh.grid import Grid
from tests.models import build

FIRST, SECOND = (1, 2, 1, 2), (1, 1, 2, 2)


class OnPaper:
    """The sizes of a grid."""

    x = y = 2
    batch_ranks = 4

    def __str__(self) -> str:
        return f"({', '.join(AXES)})"


GRID: Any = OnPaper()


def given(**changes: Any) -> TrainingArguments:
    args = TrainingArguments(output_dir="out", use_cpu=True, report_to=[])
    for name, value in changes.items():
        setattr(args, name, value)
    return args


def test_every_field_has_a_verdict() -> None:
    assert sorted({f.name for f in fields(TrainingArguments)} - set(FIELDS)) == []


@pytest.mark.nightly
@pytest.mark.parametrize(("config", "known"), [("SFTConfig", FIELDS), ("DPOConfig", FIELDS | DPO_FIELDS)])
def test_every_field_of_trl_has_a_verdict(config: str, known: dict[str, Any]) -> None:
    trl = pytest.importorskip("trl")
    assert sorted({f.name for f in fields(getattr(trl, config))} - set(known)) == []


def test_the_defaults_are_taken() -> None:
    args, options = translate(given(), GRID)
    assert options == {}
    assert args.data_seed == args.seed == 42
    assert args.accelerator_config.dispatch_batches is False


def refusal_of_shared_sequences() -> str:
    grid = Grid.create((1, 2, 1, 1), sequence_ranks=2)
    try:
        trainer(Trainer)(model=build("llama"), args=given(), grid=grid)
    except UnsupportedError as error:
        return str(error)
    return ""


def test_sequences_that_ranks_share_are_refused(pool: RankPool) -> None:
    for said in pool.run(refusal_of_shared_sequences, 2):
        assert said.startswith("sequence_ranks=2 is not supported in trainers of other libraries")


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.verdict == "refused"])
def test_a_refused_field_is_named_with_the_way_out(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name}='another'") as error:
        translate(given(**{name: "another"}), GRID)
    assert FIELDS[name].words in str(error.value)
    for value in FIELDS[name].allowed:
        translate(given(**{name: value}), GRID)


class DPOConfig(TrainingArguments):
    """Known by the name of TRL's."""


@pytest.mark.parametrize("name", [name for name, field in DPO_FIELDS.items() if field.verdict == "refused"])
def test_a_refused_field_of_dpo_is_named_with_the_way_out(name: str) -> None:
    args = DPOConfig(output_dir="out", use_cpu=True, report_to=[])
    setattr(args, name, "another")
    with pytest.raises(UnsupportedError, match=f"{name}='another'") as error:
        translate(args, GRID)
    assert DPO_FIELDS[name].words in str(error.value)
    for value in DPO_FIELDS[name].allowed:
        setattr(args, name, value)
        translate(args, GRID)


def test_a_loss_that_is_not_a_mean_over_pairs_needs_the_whole_batch() -> None:
    args = DPOConfig(output_dir="out", use_cpu=True, report_to=[])
    args.loss_type = ["sigmoid", "sft"]
    with pytest.raises(UnsupportedError, match=r"loss_type=.*sft is not a mean over pairs.*data\*z=4"):
        translate(args, GRID)
    args.loss_type = ["sigmoid", "ipo"]
    translate(args, GRID)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_a_launcher_that_places_models_itself_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = given()
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    with pytest.raises(UnsupportedError, match=f"ACCELERATE_USE_{kind}=true.*plain `accelerate launch`"):
        trainer(Trainer)(model=object(), args=args, grid=(1, 1, 1, 1))


def test_what_is_translated_is_off_for_the_trainer() -> None:
    args = given(bf16=True, gradient_checkpointing=True, torch_compile=True, pad_to_multiple_of=6)
    before = copy.copy(vars(args))
    translated, options = translate(args, GRID)
    assert options == {"precision": "bf16", "activation_checkpointing": "full", "compile": True}
    assert (translated.bf16, translated.gradient_checkpointing, translated.torch_compile) == (False,) * 3
    assert translated.pad_to_multiple_of == 8  # of x * y = 4
    assert vars(args) == before
    selective = given(activation_checkpointing=True, activation_checkpointing_kwargs={"selective": True})
    assert translate(selective, GRID)[1] == {"activation_checkpointing": "selective"}


class OwnLoss(Trainer):
    def compute_loss(self, *positional: Any, **options: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (OwnLoss, {}, "OwnLoss computes a loss of its own"),
        (Trainer, {"compute_loss_func": print}, "compute_loss_func"),
        (Trainer, {"model_init": print}, "model_init"),
        (Trainer, {"optimizers": (print, None)}, "optimizer_cls_and_kwargs"),
    ],
)
def test_what_would_be_wrong_on_a_grid_is_refused(kind: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        trainer(kind)(model=object(), args=given(), grid=(1, 1, 1, 1), **options)


def test_only_trainers_are_put_on_a_grid() -> None:
    with pytest.raises(ValueError, match="Grid is not a subclass"):
        trainer(Grid)  # type: ignore[arg-type]


def test_a_trainer_trains_evaluates_saves_and_resumes_as_in_one_process(
    pool: RankPool, tmp_path: Path
) -> None:
    (stock,) = pool.run(runs.alone, 1, "Trainer")
    for shape, resumes in ((FIRST, False), (SECOND, True)):
        found = pool.run(runs.on_grid, 4, "Trainer", shape, str(tmp_path), None, resumes)[0]
        assert max(worst_error(found, stock)) <= BAR


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "name"), [(fault, name) for fault, names in FAULTS.items() for name in names]
)
def test_a_planted_fault_is_found(fault: str, name: str, pool: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    (stock,) = pool.run(runs.alone, 1, name)
    errors = []
    for shape, resumes in ((FIRST, False), (SECOND, True)):
        try:
            found = pool.run(runs.on_grid, 4, name, shape, str(tmp_path), fault, resumes)[0]
        except RankError:
            errors.append(float("inf"))
        else:
            errors.append(max(worst_error(found, stock)))
    assert max(errors) > BAR


def stream_on_a_grid(drop_last: bool) -> int:
    from torch.utils.data import DataLoader

    with runs.as_launched(torch.distributed.get_rank(), torch.distributed.get_world_size()):
        accelerator = GridAccelerator(Grid.create((1, 2, 1, 1)), cpu=True)
        loader = accelerator.prepare(DataLoader(Stream(), batch_size=2, drop_last=drop_last))
        return sum(int(rows.sum()) for rows in loader)


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(1, 11))


def test_rows_of_a_stream_do_not_count_twice(pool: RankPool) -> None:
    # A dispatcher would read on rank 0 alone; ranks take batches in turns.
    assert sum(pool.run(stream_on_a_grid, 2, True)) == sum(range(1, 9))
    with pytest.raises(RankError, match="dataloader_drop_last=True"):
        pool.run(stream_on_a_grid, 2, False)
