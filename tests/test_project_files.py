"""Files that GitHub, Docker, pre-commit and a release read: they parse, and name what exists."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import fourfold

ROOT = Path(__file__).parents[1]


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == fourfold.__version__
    assert read_yaml("CITATION.cff")["version"] == fourfold.__version__
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == "Unreleased"
    assert headings[1] == fourfold.__version__


def test_the_citation_has_what_the_format_requires() -> None:
    citation = read_yaml("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert len(citation["references"]) == 2
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= set(reference)


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda p: p.name
)
def test_an_issue_form_has_what_github_requires(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert isinstance(form["blank_issues_enabled"], bool)
        return
    assert {"name", "description", "body"} <= set(form)
    for field in form["body"]:
        assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert field["attributes"]["label"]
    identifiers = [field["id"] for field in form["body"]]
    assert len(set(identifiers)) == len(identifiers)


def test_the_hooks_run_programs_and_files_of_the_project() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    for repository in read_yaml(".pre-commit-config.yaml")["repos"]:
        for hook in repository["hooks"]:
            program, *words = hook["entry"].split()
            name = program.removeprefix(".venv/bin/")
            assert name == "python" or name in tools, hook
            assert all((ROOT / word).exists() for word in words if word.endswith(".py")), hook


def docker_instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) of each line of a Dockerfile, continued lines joined."""
    lines = (line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#"))
    return [(word, rest) for word, _, rest in (line.strip().partition(" ") for line in lines)]


def test_the_dockerfile_is_valid() -> None:
    instructions = docker_instructions((ROOT / "Dockerfile").read_text())
    known = {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "USER", "ENTRYPOINT", "CMD", "ENV"}
    assert {word for word, _ in instructions} <= known
    stages = [rest.split(" AS ")[1] for word, rest in instructions if word == "FROM" and " AS " in rest]
    assert sorted(stages) == ["cpu", "cuda"]
    assert instructions[0] == ("ARG", "BASE=cuda"), "BASE is used by FROM, so it comes before the first one"
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for word, rest in instructions:
        if word == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() and f"!{source}" in ignored for source in sources), rest


def test_the_image_has_the_torch_that_the_package_needs() -> None:
    pinned = set(re.findall(r"torch==(\S+)|pytorch/pytorch:([\d.]+)", (ROOT / "Dockerfile").read_text()))
    assert {a or b for a, b in pinned} == {"2.13.0"}
