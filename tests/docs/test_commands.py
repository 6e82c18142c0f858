"""Every command and every example of the README and the docs is run, or read by the parser that would run it."""

import json
import os
import re
import shlex
import tomllib
from contextlib import chdir
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import first_hour
from benchmarks.ranks import RankPool
from fourfold.cli.main import main as fourfold
from fourfold.config.describe import sized_model_config
from fourfold.config.run_file import from_dict, load_run
from fourfold.planner.inputs import cluster
from tests import prepared, shown
from tests.documented import (
    PAGES,
    ROOT,
    Code,
    blocks,
    check,
    commands,
    parse,
    spans,
)

# Commands that are not run here, by their exact words, and who runs them.
ELSEWHERE = {
    "fourfold drill run.toml": "tests/drill/test_drill.py::test_all_scenarios_of_a_drill_succeed",
    "fourfold drill run.toml --fault kill:at=optimizer,rank=1,step=4": "tests/drill/test_drill.py::test_a_drill_detects_a_run_that_does_not_resume_exactly",
    "fourfold drill run.toml --compare": "tests/drill/test_drill.py::test_a_run_on_a_cluster_is_compared_by_its_checkpoints",
    "fourfold plan run.toml --cluster dgx-h100 --gpus 256 --write run.toml": "tests/cli/test_plan.py::test_the_fastest_layout_is_written_into_a_run_config",
    "fourfold plan run.toml --cluster dgx-h100 --gpus 64 --expert-load 1.5": "tests/cli/test_plan.py::test_a_plan_chooses_who_has_experts",
    "fourfold bench run.toml": "tests/bench/test_bench.py::test_the_command_writes_a_page",
    "fourfold dryrun run.toml": "tests/dry_run/test_run.py::test_the_command_takes_a_run_config",
    "fourfold dryrun run.toml --gpus 256 --memory 80": "tests/dry_run/test_run.py::test_the_command_takes_a_run_config",
    "fourfold dryrun tune.toml --gpus 8 --memory 80": "tests/dry_run/test_run.py::test_the_command_takes_a_run_config",
    "fourfold plan --cluster my-cluster.toml --compare-to run.json": "tests/planner/show/test_compare.py::test_a_real_run_can_be_saved_and_compared",
    "fourfold plan --cluster cluster.toml --compare-to run.json": "tests/planner/show/test_compare.py::test_a_real_run_can_be_saved_and_compared",
    **dict.fromkeys(
        (
            "fourfold plan lora-70b.toml --cluster dgx-h100 --gpus 8 --write lora-70b.toml",
            "fourfold dryrun lora-70b.toml --memory 80",
            "fourfold train lora-70b.toml",
            "fourfold export lora-70b/checkpoints adapters",
            "python examples/merge_adapters.py my-model adapters merged",
        ),
        "tests/docs/test_tutorials.py::test_adapters_are_trained_exported_and_merged",
    ),
    """python -c 'from transformers import pipeline; print(pipeline('"'"'text-generation'"'"', '"'"'sft'"'"')([{'"'"'role'"'"': '"'"'user'"'"', '"'"'content'"'"': '"'"'Which port does the service use?'"'"'}], max_new_tokens=32)[0]['"'"'generated_text'"'"'][-1])'""": "tests/docs/test_tutorials.py::test_a_hub_model_is_fine_tuned_and_resumes",
    "HF_HUB_OFFLINE=1 lm_eval --model hf --model_args pretrained=exported,dtype=float32 --tasks support --include_path tasks --device cpu --output_path scores": "tests/export/test_evaluate.py::test_lm_eval_counts_the_answers_of_an_export_as_transformers_does",
}
# Blocks that are a file of the repository, and who runs it.
EXAMPLES = {
    "examples/custom_loop.py": "tests/docs/test_examples.py::test_the_custom_loop_has_the_losses_of_the_stock_loop",
    "examples/custom_module.py": "tests/docs/test_examples.py::test_the_custom_module_trains_like_plain_pytorch",
    "examples/dpo.py": "tests/integrations/test_example.py::test_the_example_of_dpo_aligns_a_model",
    "examples/fabric_loop.py": "tests/integrations/test_lightning.py::test_the_example_trains_as_in_one_process",
    "examples/lightning_module.py": "tests/integrations/test_lightning.py::test_the_example_trains_as_in_one_process",
    "examples/merge_adapters.py": "tests/docs/test_tutorials.py::test_adapters_are_trained_exported_and_merged",
    "examples/sft.py": "tests/docs/test_tutorials.py::test_a_hub_model_is_fine_tuned_and_resumes",
}
# These start ranks on several machines, or on more of this one's than a test should: their words are parsed.
CLUSTER = ("torchrun", "srun", "fourfold launch", "python -m benchmarks.", "python -m fourfold.launch.agent")
# These are the cluster's own, and only it can parse them.
OF_CLUSTERS = ("kubectl", "sbatch", "scancel", "squeue", "torchft_lighthouse")
# Commands of other programs: `benchmarks.first_hour` installs as the pages say, and the others need a network or a person.
OF_OTHERS = (
    ". ",
    "docker build",
    "eval ",
    "hf download",
    "lm_eval",
    "pip install",
    "python3 -m venv",
    "tail -f",
    "tensorboard",
)
LANGUAGES = ("bash", "python", "toml", "text", "json", "yaml", "pycon", "diff", "")
SMALL_RUN = (
    "model.config=small.json",
    "data.sequence_length=16",
    "batch.tokens=64",
    "schedule.warmup_steps=0",
    "engine.precision=fp32",
    "evaluation.sequences=4",
    "logging.every_steps=1",
    "logging.tensorboard=false",
    "engine.checkpointed_blocks=none",  # it has one block
)
# What makes a command small enough for a test; an option that is given twice has its last value.
SMALLER = {
    "plan": ["--simulate", "0"],
    "dryrun": ["--grid", "1,2,1,2", "--global-batch-size", "4", "--seq-len", "64", "--micro-batches", "1"],
    "train": [word for change in SMALL_RUN for word in ("--set", change)],
}
ALIKE = ("plan", "dryrun")  # no matter in which folder, and after what: run once

WITH_CODE = [page for page in PAGES if blocks(page)]
_done: set[str] = set()


def is_path_of_readme(block: Code) -> bool:
    """`benchmarks.first_hour` takes it from the README, and runs it from an empty environment."""
    readme = (ROOT / "README.md").read_text()
    return block.page == "README.md" and any(
        block.text in first_hour.commands(readme, heading) for heading in first_hour.PATHS.values()
    )


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a reader of any page has."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "text").mkdir()
    # Many short documents, so that the usual part of them for validation is not empty.
    words = [text[i : i + 200] for text in prepared.corpus() for i in range(0, len(text), 200)]
    prepared.as_jsonl(words[:1500], folder / "text/part.jsonl")
    (folder / "documents.jsonl").symlink_to(folder / "text/part.jsonl")
    prepared.small_pretrained(folder / "my-model", words)
    (folder / "my-model/chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}\n{{ m['content'] }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    chats = [
        [{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairwise(words[:99])
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (folder / "config.json").write_text(json.dumps(sized_model_config("8b", 32_000)))
    small = sized_model_config("10m", 8192) | {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
    }
    (folder / "small.json").write_text(json.dumps(small))
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "cluster.toml").write_text(cluster.to_toml(cluster.load("dgx-h100")))
    return folder


@pytest.mark.parametrize("page", WITH_CODE)
def test_every_command_runs(page: str, given: Path, tmp_path: Path, pool: RankPool) -> None:
    """Block after block in one folder, as a reader would."""
    for file in given.iterdir():
        (tmp_path / file.name).symlink_to(file)
    trained = 0
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}\nbegin it with ```bash, ```python, ```toml or ```text"
        if block.language == "bash":
            for command in commands(block):
                trained = run(command, block, tmp_path, pool, trained)
        elif block.language == "python":
            run_python(block, tmp_path, pool)
        elif block.language == "toml":
            from_dict(
                {"model": {"config": "a"}, "data": {"sources": [{"path": "b"}]}} | tomllib.loads(block.text)
            )
        else:
            assert not re.search(r"^\$? ?(fourfold|torchrun|python|pip|srun) ", block.text, re.M), (
                f"{block}\nuse ```bash"
            )


def run(command: str, block: Code, folder: Path, pool: RankPool, trained: int) -> int:
    """Run a command, or have it parsed; returns how many steps the page's run has then."""
    is_ours = re.match(r"([A-Z_]+=\S* )*(fourfold|torchrun|srun|python) ", command)
    if is_ours:
        try:
            check(command)
        except ValueError as refusal:
            pytest.fail(f"{block.page}:{block.line}: {command}\n{refusal}")
    needs_cluster = command.startswith(CLUSTER) if is_ours else command.split()[0] in OF_CLUSTERS
    if block.page.startswith("docs/tutorials/") and command.startswith("fourfold launch slurm "):
        command = _as_training(command, folder)
    elif is_path_of_readme(block) or command in ELSEWHERE or needs_cluster or command.startswith(OF_OTHERS):
        return trained
    assert command.startswith("fourfold "), (
        f"{block.page}:{block.line}: {command}\nnobody runs this; give it to a test, and name it in ELSEWHERE"
    )
    words = [*shlex.split(command)[1:], *SMALLER.get(shlex.split(command)[1], [])]
    if "tune.toml" in words and "model.config=small.json" in words:  # its pretrained model is small
        del words[(at := words.index("model.config=small.json")) - 1 : at + 1]
    if words[0] in ALIKE:
        alike = str(sorted((k, str(v)) for k, v in vars(parse(fourfold, words)).items()))
        if alike in _done:
            return trained
        _done.add(alike)
    if words[0] != "train":
        with chdir(folder):
            assert fourfold(words) == 0, f"{block.page}:{block.line}: {command}"
        return trained
    words += ["--set", f"schedule.steps={trained + 1}"]
    with chdir(folder):
        options = parse(fourfold, words)
        config = load_run(options.file, options.set)
    ranks = config.grid.size
    assert pool.run(run_on_rank, ranks, str(folder), words) == [0] * ranks
    metrics = [
        json.loads(line)
        for line in (folder / config.logging.folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in metrics] == list(range(1, trained + 2)), (
        f"{block.page}:{block.line}: {command}"
    )
    described = {span.text for span in spans("docs/reference/metrics.md")}
    assert set(metrics[-1]) <= described, "a metric that docs/reference/metrics.md does not describe"
    return trained + 1


def _as_training(command: str, folder: Path) -> str:
    """Print the job of a tutorial, and train its first step here, on one rank: what follows needs a checkpoint."""
    with chdir(folder):
        assert fourfold([*shlex.split(command)[1:], "--print"]) == 0
        options = parse(fourfold, shlex.split(command)[1:])
    changes = [*options.set, "grid.data=1", "grid.z=1", "grid.y=1", "grid.x=1"]
    return shlex.join(["fourfold", "train", str(options.file), *(f"--set={change}" for change in changes)])


def run_on_rank(folder: str, words: list[str]) -> int:
    with chdir(folder):
        return fourfold(words)


def run_python(block: Code, folder: Path, pool: RankPool) -> None:
    if any(block.text == (ROOT / path).read_text() for path in EXAMPLES):
        return
    pool.run(run_on_names, 1, str(folder), block.text, f"{block.page}:{block.line}")


def run_on_names(folder: str, text: str, name: str) -> None:
    rank = os.environ.pop("RANK")  # a plan is made where no rank runs
    try:
        with chdir(folder):
            exec(compile(text, name, "exec"), shown.names(folder))
    finally:
        os.environ["RANK"] = rank


@pytest.mark.parametrize("place", sorted({*ELSEWHERE.values(), *EXAMPLES.values()}))
def test_who_is_said_to_run_it_exists(place: str) -> None:
    path, name = place.split("::")
    assert f"\ndef {name}(" in (ROOT / path).read_text(), place


def test_nothing_is_listed_that_no_page_has() -> None:
    found = {
        command
        for page in PAGES
        for block in blocks(page)
        if block.language == "bash"
        for command in commands(block)
    }
    assert sorted(set(ELSEWHERE) - found) == []


# -- it can fail ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "fourfold plan config.json --cluster dgx-h100 --devices 256",
            "unrecognized arguments: --devices 256",
        ),
        ("fourfold trian run.toml", "invalid choice: 'trian'"),
        ("fourfold dryrun config.json --grid 64,16,2 --global-batch-size 4 --seq-len 8", "not a grid"),
        (
            "torchrun --nproc-per-node 8 -m fourfold train run.toml --grid 1,2,2,2",
            "unrecognized arguments: --grid",
        ),
        ("fourfold train run.toml --set optimizer.rate=1", "[optimizer] has no field 'rate'"),
        ("torchrun --processes 8 examples/custom_loop.py", "processes"),
        ("torchrun --nproc-per-node 8 examples/quick.py", "there is no examples/quick.py"),
        ("srun --ntasks 8 fourfold train run.toml --steps 3", "unrecognized arguments: --steps 3"),
        ("python -m benchmarks.parity --rank-count 8", "unrecognized arguments: --rank-count 8"),
        ("python -m benchmarks.nothing", "is not a module"),
    ],
)
def test_a_wrong_command_is_found(command: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        check(command)


def test_a_command_that_nobody_runs_is_found(tmp_path: Path) -> None:
    block = blocks("docs/new.md", "```bash\ncurl example.org | sh\n```\n")[0]
    with pytest.raises(AssertionError, match="nobody runs this"):
        run(commands(block)[0], block, tmp_path, pool_that_is_not_needed(), 0)


def pool_that_is_not_needed() -> Any:
    return None


def test_a_planted_option_in_a_page_is_found(tmp_path: Path) -> None:
    text = (ROOT / "docs/how-to/train.md").read_text()
    planted = text.replace("data info data --verify", "data info data --check")
    assert planted != text
    (block, *_) = blocks("docs/how-to/train.md", planted)
    with pytest.raises(pytest.fail.Exception, match="unrecognized arguments: --check"):
        run(commands(block)[1], block, tmp_path, pool_that_is_not_needed(), 0)


@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/lora-70b.md"])
def test_the_plan_on_a_page_is_what_the_command_prints(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    text = (ROOT / page).read_text()
    command = next(line for line in text.splitlines() if line.startswith("fourfold plan --size "))
    shown = text.split(command, 1)[1].split("```text\n", 1)[1].split("```", 1)[0]
    assert fourfold(shlex.split(command)[1:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert len(shown.splitlines()) >= 4
    assert [line for line in shown.splitlines() if line.rstrip() not in printed] == []
