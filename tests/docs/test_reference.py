"""Pages that are made from the code and from recorded results are what they would be if made now."""

import re
import shlex

from benchmarks.record import FOLDER, file_of
from tests.documented import ROOT, check, site


def test_the_reference_pages_are_what_the_code_says() -> None:
    assert site("reference").outdated() == [], "run `make reference`"


def test_the_verification_pages_are_what_was_recorded() -> None:
    assert site("results").outdated() == [], "run `make reference`"


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


def test_a_changed_page_is_found(monkeypatch, tmp_path) -> None:
    reference = site("reference")
    for name, text in reference.pages().items():
        (tmp_path / name).write_text(text.replace("fourfold train", "fourfold trian"))
    monkeypatch.setattr(reference, "FOLDER", tmp_path)
    assert "commands.md" in reference.outdated()
