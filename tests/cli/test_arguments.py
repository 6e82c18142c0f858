"""Arguments of several commands: values that cannot be right are rejected before anything is read."""

import re

import pytest
from transformers import Qwen3MoeConfig

from fourfold.cli.main import main


@pytest.mark.parametrize("count", ["0", "-2", "1.5", "many"])
@pytest.mark.parametrize(
    "words",
    [
        ["plan", "config.json", "--cluster", "dgx-h100", "--rows"],
        ["dryrun", "config.json", "--grid", "1,1,1,1", "--seq-len"],
        ["launch", "slurm", "run.toml", "--nodes"],
    ],
    ids=lambda words: words[0],
)
def test_a_count_below_1_is_rejected(words, count, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*words[:-1], f"{words[-1]}={count}"])
    assert stopped.value.code == 2
    assert (
        f"argument {words[-1]}: {count} is not allowed; use a whole number of at least 1"
        in capsys.readouterr().err
    )


def test_axes_that_own_experts(tmp_path, capsys):
    config = tmp_path / "config.json"
    Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=64,
        architectures=["Qwen3MoeForCausalLM"],
    ).to_json_file(config)
    batch = ["--global-batch-size", "4", "--seq-len", "8", "--target", "cpu"]
    assert main(["dryrun", str(config), "--grid", "1,2,1,1", *batch, "--experts", "z"]) == 0
    shown = capsys.readouterr().out
    assert "experts: owned over z=2, 2 of 4 on each rank" in shown
    assert "dispatch" in shown
    # By a group of both axes; tokens of the x ranks are theirs alone.
    assert main(["dryrun", str(config), "--grid", "1,2,1,2", *batch, "--experts", "z,x"]) == 0
    shown = capsys.readouterr().out
    assert "experts: owned over z=2 and x=2, 1 of 4 on each rank" in shown
    assert re.search(r"zx\W+all_to_all\W+dispatch", shown)
    assert main(["dryrun", str(config), "--grid", "1,2,1,1", *batch, "--experts", "y"]) != 0
    assert "use ('z',), ('x',) or ('z', 'x')" in capsys.readouterr().err
