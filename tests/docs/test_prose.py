"""Commands, options, functions and fields that prose names between two backticks are there."""

import ast
import inspect
import re
from operator import attrgetter

import pytest

import fourfold as ff
from fourfold.config.schema import RunConfig
from tests.documented import PAGES, check, is_name_of_a_command, options_of_all, spans

# Options that pages name, of programs that are none of ours.
OF_OTHERS = {
    "--apply_chat_template": "lm_eval",
    "--build-arg": "docker",
    "--enable-lora": "vllm",
    "--model_args": "lm_eval",
    "--requeue": "sbatch",
    "--heartbeat_timeout_ms": "torchft_lighthouse",
    "--ntasks-per-node": "srun",
    "--numa-binding": "torchrun",
    "--rdzv-endpoint": "torchrun",
    "--rdzv-conf": "torchrun",
}


def wrong_with(span: str, options: set[str]) -> str | None:
    """Why what stands between two backticks is none of ours, if it looks as if it were."""
    words = span.split()
    try:
        if words[0] == "fourfold" and is_name_of_a_command(words[1:]):
            return None
        if span.startswith(("fourfold ", "torchrun -", "python -m benchmarks", "python -m fourfold")):
            check(span)
        elif words[0].startswith("--"):
            named = {word.split("=")[0].rstrip(",") for word in words if word.startswith("--")}
            unknown = sorted(named - options - set(OF_OTHERS))
            return f"no command has {unknown[0]}" if unknown else None
        elif re.match(r"(with )?ff\.\w+\(", span):
            check_calls(span)
        elif found := re.fullmatch(r"([a-z]+)\.([a-z_]+)(=.*)?", span):
            section = RunConfig.model_fields.get(found[1])
            # `grid` and `model` are names of Python, too, and what these have is not in the file.
            known = getattr(section.annotation, "model_fields", {}) if section else {}
            if known and found[2] not in known and found[1] not in ("grid", "model"):
                return f"[{found[1]}] has no field {found[2]}"
    except (ValueError, SyntaxError, AttributeError) as error:
        return str(error)
    return None


def check_calls(text: str) -> None:
    """Names and keywords of each call of `ff`, against the functions themselves."""
    for node in ast.walk(ast.parse(text.replace(", ...}", "}"))):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if re.fullmatch(r"ff\.\w+", name) and name[3:] not in ff.__all__:
            raise ValueError(f"fourfold has no {name[3:]}")
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and called.startswith("ff."):
            known = inspect.signature(attrgetter(called[3:])(ff)).parameters
            unknown = [k.arg for k in node.keywords if k.arg not in known]
            if unknown:
                raise ValueError(f"{called} takes no {unknown[0]}")


@pytest.fixture(scope="module")
def options() -> set[str]:
    return set(options_of_all())


def test_what_prose_names_exists(options: set[str]) -> None:
    wrong = [
        (str(span), why) for page in PAGES for span in spans(page) if (why := wrong_with(span.text, options))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "span",
    [
        "fourfold checkpoint list runs",
        "fourfold report --gpus",
        "--no-such-option 3",
        "ff.parallelize(model, grid, recompute='full')",
        "with ff.measure(grid) as report: ...",
        "optimizer.learning_rate=3",
        "python -m benchmarks.parity --fast",
    ],
)
def test_a_wrong_name_in_prose_is_found(span: str, options: set[str]) -> None:
    assert wrong_with(span, options) is not None
