"""Planning by formulas starts at once: nothing on its way imports torch."""

import subprocess
import sys

import pytest

import fourfold


@pytest.mark.parametrize(
    "module", ["fourfold", "fourfold.planner.search", "fourfold.planner.show.tables", "fourfold.planner.show.page", "fourfold.cli.main"]
)  # fmt: skip
def test_no_torch(module):
    check = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_every_public_name_is_there():
    for name in fourfold.__all__:
        assert getattr(fourfold, name).__name__ == name
        assert name in dir(fourfold)


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'parallelise'"):
        _ = fourfold.parallelise
