"""Every link of a Markdown file leads to a file and a heading of the repository, in a checkout without a built site."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.documented import FENCE, ROOT

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILES = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *(p for name in ("docs", ".github", "benchmarks") for p in (ROOT / name).rglob("*.md")),
    )
)


@cache
def tracked() -> frozenset[str]:
    """The files that a checkout has; a file that is only on this machine does not count."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"this is not a git checkout: {listed.stderr.strip()}")
    return frozenset(listed.stdout.splitlines())


@cache
def anchors(path: Path) -> frozenset[str]:
    """The headings as GitHub and MkDocs name them."""
    text = FENCE.sub("", path.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return frozenset(
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    )


def wrong_links(path: Path, text: str) -> list[str]:
    found = []
    for target in LINK.findall(FENCE.sub("", text)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or (file.is_file() and str(file.relative_to(ROOT.resolve())) not in tracked()):
            found.append(f"{target}: there is no such file")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            found.append(f"{target}: it has no such heading")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    assert wrong_links(path, path.read_text()) == []


@pytest.mark.parametrize("link", ["[a](docs/nowhere.md)", "[a](docs/install.md#nowhere)", "[a](#nowhere)"])
def test_a_wrong_link_is_found(link: str) -> None:
    assert wrong_links(ROOT / "README.md", link)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    missing = [str(p) for p in pages if p.parts[0] != "decisions" and f": {p}\n" not in navigation]
    assert missing == []
