"""Pages that are made from the code and from recorded results are what they would be if made now."""

import re
import shlex
import shutil
from pathlib import Path

from benchmarks.record import FOLDER, file_of
from tests.documented import ROOT, check, site


def test_generated_pages_are_up_to_date() -> None:
    assert list(site("write").outdated()) == [], "run `make reference`"


def test_every_check_is_a_benchmark() -> None:
    for checks in site("results").CHECKS.values():
        for one in checks:
            check(f"python -m benchmarks.{one.benchmark}")


def test_a_record_is_named_by_its_command() -> None:
    assert file_of(["parity", "--ranks", "8"]) == "parity-ranks-8.json"
    names = {file_of(one.benchmark.split()) for checks in site("results").CHECKS.values() for one in checks}
    assert {path.name for path in FOLDER.glob("*.json")} <= names, "a record that no check shows"


def test_the_nightly_checks_are_those_of_the_nightly_run() -> None:
    (loop,) = re.findall(r"^for benchmark in (.+); do$", (ROOT / ".ci/nightly").read_text(), re.M)
    nightly = {
        one.benchmark for checks in site("results").CHECKS.values() for one in checks if one.tier == "nightly"
    }
    assert nightly == set(shlex.split(loop))


def test_a_changed_or_missing_page_is_found(tmp_path: Path) -> None:
    for folder in ("reference", "verification"):
        shutil.copytree(ROOT / "docs" / folder, tmp_path / folder)
    changed, missing = tmp_path / "reference/commands.md", tmp_path / "verification/index.md"
    changed.write_text(changed.read_text().replace("fourfold train", "fourfold trian"))
    missing.unlink()
    assert set(site("write").outdated(tmp_path)) == {changed, missing}
