"""The site builds without a warning and without the network, and holds what the code says of itself."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest

import fourfold as ff
from benchmarks.first_hour import commands
from fourfold.config.schema import RunConfig
from tests.documented import ROOT, site

pytest.importorskip("mkdocs", reason="the site is built with the extra docs: pip install -e '.[docs]'")

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

pytestmark = pytest.mark.nightly


def build_site(out: Path, **changes: Any) -> Path:
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(out), strict=True, **changes)
    config.plugins.run_event("startup", command="build", dirty=False)
    build(config)
    config.plugins.run_event("shutdown")
    return out


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    logging.getLogger("mkdocs").setLevel(logging.WARNING)
    return build_site(tmp_path_factory.mktemp("site"))


def text_of(page: Path) -> str:
    return re.sub(r"<[^>]+>", "", page.read_text()).replace("&quot;", '"').replace("&#39;", "'")


def test_nothing_is_fetched_from_elsewhere(built: Path) -> None:
    """A link may lead away; what a page needs to be shown may not come from there."""
    for page in built.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text()):
            assert not re.search(r'(?:src|href)="(?:https?:)?//', tag), (page, tag)
    for sheet in built.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", sheet.read_text()), sheet


def test_the_quick_start_is_that_of_the_readme(built: Path) -> None:
    page = text_of(built / "quick-start.html")
    for line in commands((ROOT / "README.md").read_text()).splitlines():
        assert line in page.replace("&amp;", "&").replace("&gt;", ">").replace("&lt;", "<"), line


def test_every_field_command_and_name_has_its_place(built: Path) -> None:
    fields = text_of(built / "reference/run-config.html")
    for section in RunConfig.model_fields.values():
        for about in getattr(section.annotation, "model_fields", {}).values():
            words = re.sub(r"`", "", about.description).replace("&", "&amp;")
            assert words in fields, about.description
    reference = site("reference")
    shown_commands = text_of(built / "reference/commands.html")
    names = [name for name, _ in reference.leaves(reference.parser_of_fourfold(), "fourfold")]
    assert "fourfold data prepare" in names
    assert [name for name in names if f"{name} " not in shown_commands] == []
    python = text_of(built / "reference/python.html")
    assert [name for name in ff.__all__ if f"ff.{name}" not in python] == []


def test_the_pictures_are_those_that_the_script_draws(built: Path) -> None:
    pictures = site("pictures")
    drawn = {f"{name}.svg": draw().svg() for name, draw in pictures.PICTURES.items()}
    there = {path.name: path.read_text() for path in pictures.FOLDER.iterdir()}
    assert there == drawn, "run `python docs/site/pictures.py`"
    pages = [page.read_text() for page in built.rglob("*.html")]
    for name, svg in drawn.items():
        assert any(svg in page for page in pages), f"{name} is not in any page itself"


def build_page(text: str, folder: Path) -> Path:
    """A site of two pages, with the hooks."""
    docs = folder / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(f"# Home\n\n{text}\n")
    (docs / "axes.md").write_text("# Axes\n\n## The grid\n")
    for linked in ("install.md", "how-to/train.md"):  # by the quick start of the README
        (docs / linked).parent.mkdir(exist_ok=True)
        (docs / linked).write_text("# Linked\n")
    names = ("index.md", "axes.md", "install.md", "how-to/train.md")
    nav = [{name: name} for name in names]
    return build_site(folder / "site", docs_dir=str(docs), nav=nav, extra_css=[])


def test_a_page_with_right_references_builds(tmp_path: Path) -> None:
    right = "[a](axes.md#the-grid) \n\n[a](../README.md#quick-start)"
    assert "fourfold export" in text_of(build_page(right, tmp_path) / "index.html")


@pytest.mark.parametrize(
    "wrong",
    ["[a](nowhere.md)", "[a](axes.md#nowhere)", "[a](../README.md#nowhere)"],
)
def test_a_page_with_a_wrong_reference_fails_the_build(wrong: str, tmp_path: Path) -> None:
    with pytest.raises((Abort, KeyError)):
        build_page(wrong, tmp_path)
