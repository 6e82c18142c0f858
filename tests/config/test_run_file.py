"""The run config: every error names its field and the remedy, every field has a description."""

import re
import tomllib
from itertools import pairwise

import pytest
from pydantic import BaseModel

from fourfold.config import run_file
from fourfold.config.describe import SIZES, reference, starting_file
from fourfold.config.run_file import ConfigError
from fourfold.config.schema import RunConfig, ScheduleSection
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
        ("optimizer.lr=-1", r"optimizer\.lr \(it is -1\).*greater than 0"),
        ("optimizer.name=sgd", r"optimizer\.name \(it is 'sgd'\).*'adamw' or 'muon'"),
        (
            "batch.tokens=1000",
            r"batch\.tokens=1000 is not a multiple of data\.sequence_length=1024; use 1024",
        ),
        ("grid.z=3", r"are 512 sequences, which do not divide over data\*z = 3 ranks; use 525312"),
        ("grid.data=128", r"evaluation\.sequences=64 does not divide over data\*z = 128 ranks; use 128"),
        ("seed.first=1", r"'seed\.first=1'.*seed is not a section"),
        ("data.sources.0.weight=2", r"data\.sources is not a section.*data\.sources=\.\.\."),
        ("schedule.warmup_steps=2000", r"2000, more than steps=1000"),
        ("schedule.kind=wsd", r"decay_steps, which is 0"),
        (
            "schedule.decay_steps=5",
            r"decay_steps=5 is for kind='wsd', and this is kind='cosine'; set it to 0",
        ),
        ("grid.auto=true", r"needs cluster"),
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
    text = starting_file(size, model="model/config.json", data="text")
    run = run_file.from_dict(tomllib.loads(text))
    assert run.optimizer.lr == SIZES[size].lr
    for section in sections(RunConfig):
        for name in section.model_fields:
            assert name in text


def test_learning_rate_schedules():
    cosine = ScheduleSection(steps=100, warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate_factor(cosine, step) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    steady = ScheduleSection(steps=100, warmup_steps=10, kind="wsd", decay_steps=20, min_lr_ratio=0.0)
    rates = [learning_rate_factor(steady, step) for step in range(100)]
    assert set(rates[9:80]) == {1.0}
    assert rates[-1] == pytest.approx(0.0)
    assert all(a > b for a, b in pairwise(rates[79:]))
    at_once = ScheduleSection(steps=10, warmup_steps=0, kind="wsd", decay_steps=1, min_lr_ratio=0.0)
    assert [learning_rate_factor(at_once, step) for step in (8, 9)] == [1.0, 0.0]
