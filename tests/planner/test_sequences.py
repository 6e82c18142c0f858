"""Plans with sequences that several ranks share: what is tried and refused, and formulas that are those of dry runs."""

from typing import Any

import pytest
from transformers import LlamaConfig

from fourfold.dry_run.run import dryrun
from fourfold.planner.cost.sequences import moved_by_block
from fourfold.planner.cost.step import Prices, estimate_with
from fourfold.planner.inputs.cluster import preset
from fourfold.planner.inputs.layout import Layout
from fourfold.planner.inputs.workload import from_config
from fourfold.planner.plan import plan
from fourfold.planner.search import ways_to_share

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
BY_TOKENS: dict[str, Any] = {"activations": "sequence-parallel"}
MILLION = 2**20


def prices(length: int) -> Prices:
    return Prices(from_config(LLAMA_8B), preset("dgx-h100"), length)


def test_a_million_tokens_are_faster_on_ranks_that_share_them() -> None:
    given = {"sequences": 1, "length": MILLION, "quiet": True}
    # Otherwise the heads of a sequence are on ranks of several nodes.
    alone = plan(LLAMA_8B, "dgx-h100", 64, **given).best
    found = plan(LLAMA_8B, "dgx-h100", 64, sequence_ranks="auto", **given)
    best = found.best
    assert best.layout.sequence_ranks > 1
    assert best.layout.z % best.layout.sequence_ranks == 0
    assert f"{best.layout.sequence_ranks} ranks a sequence" in str(best.layout)
    assert best.limited_by == "attention"
    assert best.step_s < 0.8 * alone.step_s
    fixed = plan(LLAMA_8B, "dgx-h100", 64, sequence_ranks=8, **given)
    assert {e.layout.sequence_ranks for e in fixed.ranked} == {8}
    whole = plan(LLAMA_8B, "dgx-h100", 64, sequences=64, length=8192, quiet=True)
    assert {e.layout.sequence_ranks for e in whole.ranked} == {1}


def test_as_few_ranks_share_a_sequence_as_allow_so_small_a_micro_batch() -> None:
    w = from_config(LLAMA_8B)
    assert ways_to_share(w, (1, 8, 1, 1), 8, 4096, "auto") == [(1, [1]), (2, [2]), (4, [4]), (8, [8])]
    assert ways_to_share(w, (2, 4, 1, 1), 2, 4096, "auto") == [(4, [1])]
    assert ways_to_share(w, (2, 4, 1, 1), 2, 4096, 4) == [(4, [1])]
    assert ways_to_share(w, (1, 4, 1, 1), 2, 4, "auto") == [(2, [1])]  # four tokens have no eight chunks
    assert "no number of ranks of z=1" in str(ways_to_share(w, (8, 1, 1, 1), 1, 4096, "auto"))
    bloom = from_config({**LLAMA_8B, "model_type": "falcon"})
    assert "falcon does not use transformers' interface" in str(
        ways_to_share(bloom, (1, 8, 1, 1), 1, 4096, "auto")
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precision": "fp32"}, "fp32 on cuda cannot be planned; use bf16 on GPUs"),
        ({"activation_offloading": True}, "activation_offloading cannot be planned"),
        ({"float8": "rowwise_with_gw_hp"}, "float8='rowwise_with_gw_hp' cannot be planned"),
        ({"model": {**LLAMA_8B, "model_type": "gemma2"}}, "gemma2 has no kernel for shared sequences"),
        ({"model": {**LLAMA_8B, "rope_parameters": {"rope_type": "dynamic"}}}, "rotations"),
    ],
)
def test_what_has_no_formulas_is_refused(changes: dict[str, Any], words: str) -> None:
    given = {"model": LLAMA_8B, "sequences": 8, "length": 8192, "sequence_ranks": 2, "quiet": True} | changes
    with pytest.raises(ValueError, match=words):
        plan(given.pop("model"), "dgx-h100", 8, **given)


SMALL = LlamaConfig(
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=4000,
)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(1, 4, 1, 2, 1, "full", **BY_TOKENS, sequence_ranks=2),
        pytest.param(Layout(1, 4, 1, 1, 1, "selective", sequence_ranks=4), marks=pytest.mark.nightly),
        pytest.param(Layout(1, 2, 2, 4, 1, "none", **BY_TOKENS, sequence_ranks=2), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_bytes_of_keys_and_values_are_those_of_the_dry_run(layout: Layout) -> None:
    run = dryrun(
        SMALL,
        layout.grid,
        sequences=4,
        length=512,
        sequence_ranks=layout.sequence_ranks,
        activations=layout.activations,
        activation_checkpointing=layout.activation_checkpointing,
        weights=layout.weights,
    )
    moved = moved_by_block(from_config(SMALL.to_dict()), layout, 4 * 512 / layout.z, 2)
    gathers = 3 if layout.activation_checkpointing == "full" else 2
    found = {"all_gather": 0.0, "reduce_scatter": 0.0}
    for start in run.collectives:
        if start.purpose == "keys-values":
            assert start.ranks == layout.sequence_ranks
            found[start.kind] += start.payload_bytes
    assert found == {"all_gather": 4 * gathers * moved.gathered, "reduce_scatter": 4 * moved.scattered}


def test_shared_sequences_cost_their_traffic_and_no_more_attention() -> None:
    """Eight ranks with an eighth of each of eight sequences, and eight ranks with a sequence each."""
    alone = Layout(1, 8, 1, 8, 1, "selective", **BY_TOKENS)
    shared = Layout(1, 8, 1, 8, 1, "selective", **BY_TOKENS, sequence_ranks=8)
    shares = []
    for length in (32768, MILLION):
        one, other = (estimate_with(prices(length), layout, 8) for layout in (alone, shared))
        assert other.compute_s["attention"] == one.compute_s["attention"]
        sent_s = other.exposed_s["z"] - one.exposed_s["z"]
        shares.append(sent_s / other.compute_s["attention"])
        assert other.link_s["z"] - one.link_s["z"] == pytest.approx(sent_s)
    # Attention grows with the square of the length, its keys and values with the length.
    assert shares[1] == pytest.approx(shares[0] / 32, rel=0.05)
    assert 0 < shares[1] < 0.03


@pytest.mark.nightly
def test_formulas_are_near_the_simulation() -> None:
    found = plan(
        LLAMA_8B, "dgx-h100", 64, sequences=1, length=MILLION, sequence_ranks="auto", simulate=1, quiet=True
    )
    best = found.best
    assert best.is_simulated
    assert best.formula_s == pytest.approx(best.step_s, rel=0.1)
