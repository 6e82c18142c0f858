"""What mkdocs does in addition to turning Markdown into pages: sections of the README, pictures, the list of decisions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def on_config(config: Any) -> Any:
    """List every decision in the navigation, by its title."""
    decisions = sorted((ROOT / "docs/decisions").glob("*.md"))
    entries = [{_title(path): f"decisions/{path.name}"} for path in decisions]
    for section in config.nav:
        for pages in section.values():
            if isinstance(pages, list):
                pages[:] = [{"Decisions": entries} if "Decisions" in page else page for page in pages]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace a line that is only a link to a heading of the README by the text below that heading."""
    depth = page.file.src_uri.count("/")
    link = r"^\[[^\]]+\]\((?:\.\./)+README\.md#([\w-]+)\)$"
    markdown = re.sub(link, lambda found: readme_section(found[1], "../" * depth), markdown, flags=re.M)
    # Files of the repository are not pages of the site: keep their names, without a link.
    return re.sub(rf"\[([^\]]+)\]\((?:\.\./){{{depth + 1}}}[\w./-]+(?:#[\w-]+)?\)", r"\1", markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Put pictures into the page itself, where its switch between light and dark reaches them."""
    return re.sub(r'<p><img alt="[^"]*" src="(?:\.\./)*pictures/(\w+)\.svg" ?/?></p>', _inline, html)


def _inline(found: re.Match[str]) -> str:
    svg = (ROOT / "docs/pictures" / f"{found[1]}.svg").read_text()
    return f'<div class="ff-figure">{svg}</div>'


def _title(path: Path) -> str:
    return path.read_text().split("\n", 1)[0].removeprefix("# ")


def readme_section(anchor: str, to_docs: str = "") -> str:
    """The text below a heading of the README, its links seen from a page that reaches docs/ by ``to_docs``."""
    parts = re.split(r"^## (.+)$", (ROOT / "README.md").read_text(), flags=re.M)
    anchors = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in parts[1::2]]
    sections = dict(zip(anchors, parts[2::2], strict=True))
    if anchor not in sections:
        raise KeyError(f"README.md has no heading #{anchor}; it has {', '.join(sections)}")

    def link(found: re.Match[str]) -> str:
        words, target = found.groups()
        if target.startswith("docs/"):
            return f"[{words}]({to_docs}{target.removeprefix('docs/')})"
        return found[0] if target.startswith("http") else words

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", link, sections[anchor].strip())
