"""The run config: every error names its field and the remedy, every field has a description."""

import re
import tomllib
from itertools import pairwise

import pytest
from pydantic import BaseModel

from fourfold.config import run_file
from fourfold.config.describe import SIZES, fine_tuning, pretraining, reference, starting_file
from fourfold.config.edit import with_fields
from fourfold.config.run_file import ConfigError
from fourfold.config.schema import RunConfig, ScheduleSection
from fourfold.train.loop.model import axes_of
from fourfold.train.loop.optimizers import learning_rate_factor

MINIMAL = {"model": {"config": "config.json"}, "data": {"sources": [{"path": "text"}]}}


def changed(*changes: str) -> RunConfig:
    values = {"seed": 1, **{key: dict(value) for key, value in MINIMAL.items()}}
    for change in changes:
        run_file.apply(values, change)
    return run_file.from_dict(values)


def sections(section: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [f.annotation for f in section.model_fields.values()]
    return [
        section,
        *(
            s
            for kind in inner
            if isinstance(kind, type) and issubclass(kind, BaseModel)
            for s in sections(kind)
        ),
    ]


def test_every_alias_names_a_field():
    for alias, name in run_file._ALIASES.items():
        *section, field = name.split(".")
        fields = run_file.fields_at(section)
        assert field in fields
        assert alias not in fields, f"{alias} is a field itself"
        assert alias == alias.lower().replace("-", "_")


def test_a_minimal_file_is_valid():
    run = changed()
    assert run.sequences * run.data.sequence_length == run.batch.tokens
    assert run.optimizer.name == "adamw"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("optimizer.lrr=1e-3", r"\[optimizer\] has no field 'lrr'; did you mean 'lr'\?"),
        (
            "optimizer.learning_rate=1e-3",
            r"\[optimizer\] has no field 'learning_rate'; did you mean 'optimizer\.lr'\?",
        ),
        ("train-iters=3", r"the file has no field 'train-iters'; did you mean 'schedule\.steps'\?"),
        ("optimizer.zzz=3", r"\[optimizer\] has no field 'zzz'; it has name, lr"),
        ("shedule.steps=3", r"the file has no field 'shedule'; did you mean 'schedule'\?"),
        ("training.steps=3", r"the file has no field 'training'; did you mean 'schedule\.steps'\?"),
        ("lr=1e-4", r"did you mean 'optimizer.lr'\?"),
        ("optimizer.lr=-1", r"optimizer\.lr \(it is -1\).*greater than 0"),
        ("optimizer.name=sgd", r"optimizer\.name \(it is 'sgd'\).*'adamw', 'adamw-bf16' or 'muon'"),
        (
            "batch.tokens=1000",
            r"batch\.tokens=1000 is not a multiple of data\.sequence_length=1024; use 1024",
        ),
        ("grid.z=3", r"are 512 sequences, which do not divide over data\*z = 3 ranks; use 525312"),
        ("seed.first=1", r"'seed\.first=1'.*seed is not a section"),
        ("data.sources.0.weight=2", r"data\.sources is not a section.*data\.sources=\.\.\."),
        ("schedule.warmup_steps=2000", r"2000, more than steps=1000"),
        ("schedule.kind=wsd", r"decay_steps, which is 0"),
        (
            "schedule.decay_steps=5",
            r"decay_steps=5 is for kind='wsd', and this is kind='cosine'; set it to 0",
        ),
        ("grid.auto=true", r"\[grid\] has no field 'auto'"),
        ("optimizer.lr=none", r"optimizer\.lr \(it is 'none'\)"),
        ("model.pretrained=llama", r"either config .* or pretrained"),
        (
            "data.sources=[{path='a', wieght=2}]",
            r"\[data\.sources\.0\] has no field 'wieght'; did you mean 'weight'",
        ),
        ("data.sources=[]", r"data\.sources"),
        (
            "engine.activations='sequence-parallel' grid.x=3",
            r"grid.x=3 does not divide data.sequence_length=\d+; use \d+, or 'auto'",
        ),
        (
            "experts.bias_rate=0.1 engine.compile=true",
            r"experts\.bias_rate with engine\.compile=true.*set engine\.compile to false",
        ),
        (
            "experts.load_metrics=true reliability.torchft_lighthouse='http://head:1' grid.z=1",
            r"experts\.load_metrics with reliability\.torchft_lighthouse",
        ),
        (
            "experts.bias_rate=0.1 lora.rank=4 model.pretrained=a model.config=none",
            r"experts\.bias_rate=0\.1 with lora\.rank=4.*set bias_rate to 0",
        ),
        ("router_aux_loss_coef=0.1", r"did you mean 'experts\.aux_loss_coef'\?"),
    ],
)
def test_an_error_names_the_field_and_the_remedy(change, words):
    with pytest.raises(ConfigError, match=words):
        changed(*re.split(r" (?=\w+\.)", change))


def test_a_missing_section_is_named():
    with pytest.raises(ConfigError, match=r"data is missing"):
        run_file.from_dict({"model": MINIMAL["model"]})


def test_command_line_changes_override_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'seed = 1\n[model]\nconfig = "c.json"\n[data]\nsources = [{path = "t"}]\n[optimizer]\nlr = 1e-3\n'
    )
    run = run_file.load_run(path, ["optimizer.lr=3e-4", "grid.x=2", "checkpoints.every_steps=5"])
    assert (run.seed, run.optimizer.lr, run.grid.x, run.checkpoints.every_steps) == (1, 3e-4, 2, 5)
    with pytest.raises(ConfigError, match="sets nothing"):
        run_file.load_run(path, ["optimizer.lr"])


def test_a_missing_file_points_to_init(tmp_path):
    with pytest.raises(ConfigError, match="fourfold init"):
        run_file.load_run(tmp_path / "none.toml")


def test_every_field_has_a_description():
    for section in sections(RunConfig):
        for name, field in section.model_fields.items():
            if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
                assert field.description, f"{section.__name__}.{name}"
                assert field.description.endswith("."), field.description
    assert "| `lr` | `0.0003` |" in reference()


@pytest.mark.parametrize("size", list(SIZES))
def test_a_starting_file_is_valid_and_has_every_field(size):
    chosen = {"model.config": "model/config.json", "data.sources": [{"path": "text"}], **pretraining(size)}
    text = starting_file("A run.", chosen)
    run = run_file.from_dict(tomllib.loads(text))
    assert run.grid.auto
    assert run.optimizer.lr == SIZES[size].lr
    for section in sections(RunConfig):
        for name in section.model_fields:
            assert name in text


@pytest.mark.parametrize("size", list(SIZES))
def test_fine_tuning_goes_once_through_the_text(size):
    chosen = fine_tuning(size, positions=2048, train_tokens=10_000_000)
    text = starting_file("A run.", {"model.pretrained": "m", "data.sources": [{"path": "t"}], **chosen})
    run = run_file.from_dict(tomllib.loads(text))
    assert run.data.sequence_length == 2048
    assert 0 <= 10_000_000 - run.schedule.steps * run.batch.tokens < run.batch.tokens
    assert run.optimizer.lr <= SIZES[size].lr / 5


def test_a_grid_without_sizes_is_chosen():
    assert changed().grid.auto
    assert changed("grid=auto").grid.auto
    assert changed("grid.cluster=dgx-h100").grid.auto
    for axis in ("data", "z", "y", "x"):
        assert not changed(f"grid.{axis}=1").grid.auto
    chosen = changed().grid.model_copy(update={"z": 1})
    assert not chosen.auto


def test_none_empties_a_field_that_can_be_empty():
    run = changed("optimizer.grad_clip_norm=none", "checkpoints.every_steps=none")
    assert (run.optimizer.grad_clip_norm, run.checkpoints.every_steps) == (None, None)
    assert changed("engine.activation_checkpointing=none").engine.activation_checkpointing == "none"


def test_experts_are_gathered_or_owned_by_axes():
    assert changed().engine.experts == "auto"
    assert changed("engine.experts=cut").engine.experts == "cut"
    assert axes_of(changed('engine.experts=["z"]').engine.experts) == ("z",)
    assert axes_of(changed('engine.experts=["z", "x"]').engine.experts) == ("z", "x")
    with pytest.raises(ValueError, match="experts"):
        changed('engine.experts=["y"]')


def test_fields_are_changed_in_place():
    chosen = {"model.config": "c", "data.sources": [{"path": "t"}], **pretraining("8b")}
    text = starting_file("A run.", chosen)
    changes = {"grid": {"data": 2, "z": 4, "y": 1, "x": 8}, "engine": {"activation_checkpointing": "none"}}
    edited = with_fields(text, changes)
    run = run_file.from_dict(tomllib.loads(edited))
    assert (run.shape, run.engine.activation_checkpointing) == ((2, 4, 1, 8), "none")
    before, after = text.splitlines(), edited.splitlines()
    assert len(before) == len(after)
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 5
    assert with_fields("seed = 1\n", {"grid": {"z": 2}}) == "seed = 1\n\n[grid]\nz = 2\n"


@pytest.mark.parametrize("text", ["grid = {z = 1}\n", "grid.z = 1\n", "[grid]\nx = 1\n[grid.more]\nz = 2\n"])
def test_a_file_that_cannot_be_edited_stays_as_it_is(text):
    """Rather an error than a file that says something else; the last one can be edited."""
    if "more" in text:
        assert tomllib.loads(with_fields(text, {"grid": {"z": 4}}))["grid"]["z"] == 4
        return
    with pytest.raises(ConfigError, match="section"):
        with_fields(text, {"grid": {"z": 4}})


def test_learning_rate_schedules():
    cosine = ScheduleSection(steps=100, warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate_factor(cosine, step) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, rel=0.01)
    steady = ScheduleSection(steps=100, warmup_steps=10, kind="wsd", decay_steps=20, min_lr_ratio=0.0)
    rates = [learning_rate_factor(steady, step) for step in range(100)]
    assert set(rates[9:81]) == {1.0}
    assert rates[-1] == pytest.approx(1 / 20)  # no step is in vain
    assert all(a > b for a, b in pairwise(rates[80:]))
    at_once = ScheduleSection(steps=10, warmup_steps=0, kind="wsd", decay_steps=1, min_lr_ratio=0.0)
    assert [learning_rate_factor(at_once, step) for step in (8, 9)] == [1.0, 1.0]
