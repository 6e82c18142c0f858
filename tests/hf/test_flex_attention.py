"""FlexAttention of packed rows, by its formulas on CPU: equal to documents one by one, and to transformers' attention with a mask."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn.attention import flex_attention as pytorch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.ranks import RankPool
from fourfold import Grid, parallelize
from fourfold.dry_run.recorder import replaced
from fourfold.errors import UnsupportedError
from fourfold.hf import flex_attention as flex
from fourfold.hf import packed_attention
from fourfold.hf.flex_attention import BLOCK, document_mask
from fourfold.hf.packed_attention import FLEX, NAME, set_attention, use_packed_attention
from fourfold.parallel import compiled
from tests.hf.test_packed_attention import WINDOW, one_by_one, positions, tokens
from tests.models import LLAMA_LIKE, VOCABULARY, assert_shards_close, gradients, local_gradients

WINDOWS: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
# Large scores and a small soft cap, which shows.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {
        "head_dim": 16,
        "attn_logit_softcapping": 0.5,
        "query_pre_attn_scalar": 1,
        "initializer_range": 0.1,
    }
    | WINDOWS,
    "gpt_oss": {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1} | WINDOWS,
    "granite_swa": {"head_dim": 16} | WINDOWS,
}


def small(family: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(LLAMA_LIKE | FAMILIES.get(family, {}) | changes))
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks") and not parameter.is_meta:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@contextmanager
def formulas() -> Iterator[None]:
    """The formulas of FlexAttention have gradients on CPU; PyTorch rejects them because its kernel there has none."""
    with replaced(pytorch, "_validate_device", lambda *_: None):
        yield


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with formulas():
        yield


# -- documents and windows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 100, BLOCK, 200])
@pytest.mark.parametrize("length", [5, 2 * BLOCK, 500])
def test_blocks_are_those_of_a_whole_mask(length: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(length)
    rows = []
    for most in (10, 150, 1000):
        lengths = torch.randint(1, most, (length,), generator=generator).tolist()
        rows.append(torch.cat([torch.arange(n) for n in lengths])[:length])
    mask = document_mask(torch.stack(rows), window)
    whole = pytorch.create_block_mask(
        mask.mask_mod, len(rows), None, length, length, device="cpu", BLOCK_SIZE=BLOCK
    )
    assert torch.equal(mask.to_dense(), whole.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(whole, name)), name
    for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices"):
        assert torch.equal(getattr(mask, name), getattr(whole, name)), name


def test_the_host_reads_nothing() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(positions())
        assert document_mask(fake, WINDOW).shape == (3, 1, 18, 18)
        with pytest.raises(DataDependentOutputException):
            fake.max().item()


# -- values and gradients ---------------------------------------------------------------------------------------------


def values(model: nn.Module, logits: Tensor) -> list[Tensor]:
    """The logits, and the gradients of a function of them."""
    weight = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(4))
    model.zero_grad()
    (logits @ weight).square().sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def packed(model: nn.Module, at: Tensor | None = None) -> list[Tensor]:
    at = positions() if at is None else at
    return values(model, model(input_ids=tokens(), position_ids=at, use_cache=False).logits)


def differences(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, of the largest entry of each tensor."""
    scale = max(float(b.abs().max()) for b in expected[1:])
    return max(
        float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3 * scale)
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_documents_one_by_one_and_a_mask(family: str, on_cpu: None) -> None:
    with torch.device("meta"):
        note = use_packed_attention(small(family), "auto", "cuda", "bf16")
    assert "FlexAttention inside packed documents (it passes" in note
    model = small(family)
    alone = values(model, one_by_one(model, tokens()))
    # GPT-OSS does not tell transformers' masks where documents begin (5.23).
    at = torch.arange(tokens().shape[1]).expand_as(tokens()) if family == "gpt_oss" else positions()
    masked = packed(model, at)
    set_attention(model, FLEX)
    assert differences(packed(model), alone) < 1e-5
    assert differences(packed(model, at), masked) < 1e-5


def _without(name: str) -> Callable[..., Tensor]:
    real = flex.attend

    def attend(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, **given: Any) -> Tensor:
        if name == "documents":
            positions = torch.arange(positions.shape[1]).expand_as(positions)
        return real(query, key, value, positions, **given | {name: None} if name in given else given)

    return attend


@pytest.mark.parametrize(
    ("family", "left_out"),
    [("gemma2", "documents"), ("gemma2", "window"), ("gemma2", "softcap"), ("gpt_oss", "sinks")],
)
def test_what_is_left_out_shows(family: str, left_out: str, on_cpu: None) -> None:
    model = small(family)
    set_attention(model, FLEX)
    right = packed(model)[:2]  # the logits, and a gradient that does not go through a sink
    with replaced(packed_attention, "attend", _without(left_out)):
        assert differences(packed(model)[:2], right) > 1e-3


def test_a_model_that_varlen_can_do_may_have_it_too(on_cpu: None) -> None:
    with torch.device("meta"):
        model = small("llama", head_dim=16)
    assert "by the bounds" in use_packed_attention(model, "auto", "cuda", "bf16")
    assert model.config._attn_implementation == NAME  # type: ignore[union-attr]
    set_attention(model, "sdpa")
    note = use_packed_attention(model, "flex", "cuda", "bf16", is_compiled=True)
    assert note == "attention: FlexAttention inside packed documents (engine.attention = 'flex')"
    model = small("llama", num_key_value_heads=1)
    alone = values(model, one_by_one(model, tokens()))
    set_attention(model, FLEX)
    assert differences(packed(model), alone) < 1e-5


@pytest.mark.parametrize(
    ("family", "changes", "target", "precision", "why"),
    [
        ("gemma2", {}, "cpu", "bf16", "it has no gradients on CPUs"),
        ("gemma2", {}, "cuda", "fp32", "it is used in bf16 alone"),
        ("gemma2", {"attention_dropout": 0.1}, "cuda", "bf16", "it has no dropout"),
        ("gemma2", {"head_dim": 8}, "cuda", "bf16", "no kernel for heads of 8 features"),
        ("gemma2", {"head_dim": 512}, "cuda", "bf16", "no kernel for heads of 512 features"),
        ("mimo_v2_flash", {}, "cuda", "bf16", "transformers does not allow it for this model"),
        ("doge", {"head_dim": 16}, "cuda", "bf16", "it has a mask of its own"),
    ],
)
def test_models_that_need_another_attention_keep_the_mask(
    family: str, changes: dict[str, Any], target: str, precision: str, why: str
) -> None:
    with torch.device("meta"):
        model = small(family, **changes)
    before = model.config._attn_implementation  # type: ignore[union-attr]
    note = use_packed_attention(model, "auto", target, precision)
    assert "a mask of length x length" in note
    assert target == "cpu" or why in note
    with pytest.raises(UnsupportedError, match=f"FlexAttention: .*{why}.* use engine.attention = 'masked'"):
        use_packed_attention(model, "flex", target, precision)
    assert model.config._attn_implementation == before  # type: ignore[union-attr]


# -- on a grid --------------------------------------------------------------------------------------------------------


def on_a_grid(shape: tuple[int, int, int, int], family: str, options: dict[str, Any]) -> tuple[int, int]:
    """(graphs, breaks); raises if gradients differ from those of transformers' mask in one process."""
    compiled.BACKEND = "aot_eager"
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # As on CUDA it is compiled, also where blocks are not: its formulas are wrong in a recomputed region that is not.
    graph = torch.compile(pytorch.flex_attention, backend="aot_eager", fullgraph=True, dynamic=False)
    grid = Grid.create(shape)
    # Two layers of each kind, which share a graph.
    layers = {"num_hidden_layers": 4, "layer_types": WINDOWS["layer_types"] * 2}
    stock, model = small(family, **layers), small(family, **layers)
    set_attention(model, FLEX)
    ids = tokens()[[0, 1, 2, 0]][:, :16]
    rows = grid.local_rows(4)
    with formulas(), replaced(flex, "flex_attention", graph):
        report = parallelize(model, grid, **options)
        for order in ([1, 1, 2, 1], [0, 1, 2, 0]):  # other documents, in the same graphs
            at = positions()[order][:, :16]
            if family == "gpt_oss":  # as above
                at = torch.arange(16).expand_as(at)
            model.zero_grad()
            model(input_ids=ids[rows], position_ids=at[rows], labels=ids[rows]).loss.backward()
    stock(input_ids=ids, position_ids=at, labels=ids, use_cache=False).loss.backward()
    assert_shards_close(local_gradients(model), gradients(stock), report, grid)
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shape", "family", "options", "expected"),
    [
        ((1, 1, 1, 2), "gemma2", {"weights": "fsdp2", "activation_checkpointing": "selective"}, 2),
        # Of attention in the first forward, which is not compiled, and of blocks.
        ((1, 1, 2, 1), "gemma2", {"compile": True, "activation_checkpointing": "selective"}, 4),
        # Without gradients in the forward before half-batches, and with them.
        ((1, 1, 1, 2), "gemma2", {"weights": "streamed", "activation_checkpointing": "full"}, 4),
        ((1, 2, 1, 1), "gpt_oss", {"weights": "fsdp2", "activation_checkpointing": "full"}, 2),
        ((1, 2, 1, 1), "granite_swa", {"compile": True, "activation_checkpointing": "full"}, 4),
    ],
)  # fmt: skip
def test_packed_rows_on_a_grid(
    pool: RankPool, shape: tuple[int, int, int, int], family: str, options: dict[str, Any], expected: int
) -> None:
    for graphs, breaks in pool.run(on_a_grid, 2, shape, family, options):
        assert graphs == expected  # with a window, and without
        assert breaks == 0
