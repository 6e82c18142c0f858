"""Clusters: presets load, files come back as they went, mistakes are named."""

import tomllib

import pytest

from fourfold.planner.inputs.cluster import from_dict, load, preset, presets, to_toml


@pytest.mark.parametrize("name", presets())
def test_a_preset_loads_and_survives_a_file(name, tmp_path):
    cluster = preset(name)
    assert cluster.source
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(cluster))
    assert load(path) == cluster


def test_an_unknown_name_gives_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'perlmutter-40g'"):
        preset("perlmuter-40")


def test_an_unknown_word_in_a_file_gives_the_nearest():
    text = to_toml(preset("dgx-h100")).replace("node_gbps", "node_gbsp")
    with pytest.raises(ValueError, match="did you mean 'node_gbps'"):
        from_dict(tomllib.loads(text))


def test_a_number_that_is_missing_is_named():
    values = tomllib.loads(to_toml(preset("dgx-h100")))
    del values["device"]["memory_tbps"]
    with pytest.raises(ValueError, match="memory_tbps"):
        from_dict(values)


def test_a_matmul_faster_than_the_data_sheet_is_refused():
    values = tomllib.loads(to_toml(preset("dgx-h100")))
    values["device"]["best_tflops"] = 2000.0
    with pytest.raises(ValueError, match=r"2000\.0 TFLOP/s, more than its data sheet's 989"):
        from_dict(values)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.toml"):
        load(tmp_path / "none.toml")


def test_every_preset_says_what_it_assumes():
    assert all(preset(name).assumed for name in presets())
