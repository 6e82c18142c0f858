"""Write the pages that are made from the code (reference.py) and from recorded benchmarks (results.py).

Without an option it writes those that are out of date; `make reference` calls it.

    python docs/site/write.py
    python docs/site/write.py --check    write nothing, fail if a page is out of date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent
# Of this folder, which is not a package, and of the repository, for the benchmarks.
sys.path[:0] = [str(DOCS / "site"), str(DOCS.parent)]

import reference  # noqa: E402
import results  # noqa: E402


def outdated(docs: Path = DOCS) -> dict[Path, str]:
    """The pages below a folder that are not what they would be if made now, and what they would be."""
    made = {docs / name: text for name, text in (reference.pages() | results.pages()).items()}
    return {path: text for path, text in made.items() if not path.exists() or path.read_text() != text}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a page is out of date")
    options = parser.parse_args(arguments)
    old = outdated()
    for path, text in old.items():
        if not options.check:
            path.write_text(text)
        print(f"{'out of date' if options.check else 'wrote'}: {path}")
    return 1 if old and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
