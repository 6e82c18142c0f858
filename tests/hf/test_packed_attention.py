"""Attention of packed rows: equal to that of each document by itself, on CPU and by the contract of varlen_attn."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.ranks import RankPool
from fourfold import Grid, parallelize
from fourfold.errors import UnsupportedError
from fourfold.hf import packed_attention as packing
from fourfold.hf.packed_attention import cumulative_lengths, set_attention, use_packed_attention
from tests.models import LLAMA_LIKE, VOCABULARY, assert_shards_close, build, gradients, local_gradients

LENGTHS = ((5, 1, 9, 3), (18,), (2, 16))  # of the documents in each row
WINDOW = 4
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmo3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neox": {},
    "phi3": {"sliding_window": WINDOW},
}


def positions() -> Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, positions().shape, generator=torch.Generator().manual_seed(3))


def small(family: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(LLAMA_LIKE | FAMILIES.get(family, {}) | changes))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def one_by_one(model: nn.Module, ids: Tensor) -> Tensor:
    """The logits of each document in a row of its own."""
    rows = []
    for row, lengths in zip(ids, LENGTHS, strict=True):
        documents = row.split(list(lengths))
        rows.append(torch.cat([model(input_ids=d[None], use_cache=False).logits[0] for d in documents]))
    return torch.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_documents_one_by_one(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_QUERIES", 3)  # several blocks of a window
    model = small(family)
    weight = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(4))
    results = []
    for is_packed in (False, True):
        model.zero_grad()
        if is_packed:
            assert "by the bounds" in use_packed_attention(model.to("meta"), "varlen", "cpu", "fp32")
            model = small(family)
            set_attention(model, packing.NAME)
            logits = model(input_ids=tokens(), position_ids=positions(), use_cache=False).logits
        else:
            logits = one_by_one(model, tokens())
        (logits @ weight).square().sum().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def reference_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """`varlen_attn` in the words of PyTorch's documentation: [tokens, heads, features], (W, 0) is a causal window."""
    assert cu_seq_q.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert int(cu_seq_q[-1]) == len(query) == len(key)
    assert max_q == max_k == int(cu_seq_q.diff().max())
    left, right = window_size
    assert right == 0
    assert enable_gqa == (query.shape[1] != key.shape[1])
    out = []
    for begin, end in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False):
        q, k, v = (t[begin:end].transpose(0, 1)[None] for t in (query, key, value))
        ago = torch.arange(end - begin).unsqueeze(1) - torch.arange(end - begin)
        mask = (ago >= 0) & ((ago <= left) | (left < 0))
        out.append(
            scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)[0].transpose(0, 1)
        )
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_the_call_of_varlen_attn(monkeypatch: pytest.MonkeyPatch, window: int | None, kv_heads: int) -> None:
    monkeypatch.setattr(packing, "varlen_attn", reference_varlen)
    rows, length = positions().shape
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(rows, 4, length, 8, generator=generator)
    key, value = (torch.randn(rows, kv_heads, length, 8, generator=generator) for _ in range(2))
    module = nn.Module()
    module.num_key_value_groups = 4 // kv_heads  # type: ignore[assignment]
    expected = packing._by_document(module, query, key, value, 0.0, 0.3, window, positions())
    found = packing._varlen(query, key, value, 0.3, window, *cumulative_lengths(positions()))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("family", "changes", "target", "why"),
    [
        ("gemma2", {"head_dim": 8}, "cpu", "it passes softcap"),
        ("bloom", {"n_head": 4}, "cpu", "does not use transformers' attention interface"),
        ("llama", {"attention_dropout": 0.1}, "cuda", "no dropout"),
        ("llama", {"head_dim": 512}, "cuda", "heads of 512"),
    ],
)
def test_models_that_need_another_attention_keep_the_mask(
    family: str, changes: dict[str, Any], target: str, why: str
) -> None:
    with torch.device("meta"):
        model = small(family, **changes)
    before = model.config._attn_implementation  # type: ignore[union-attr]
    note = use_packed_attention(model, "auto", target, "bf16")
    assert "a mask of length x length" in note
    assert why in note
    with pytest.raises(UnsupportedError, match=why):
        use_packed_attention(model, "varlen", target, "bf16")
    assert model.config._attn_implementation == before  # type: ignore[union-attr]


def test_one_graph_takes_any_number_of_documents() -> None:
    """As a block that is compiled gets them on CUDA; the kernel itself has no CPU version, so the graph is not run."""
    graphs = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return lambda *_: [torch.zeros(2, 16, 2, 8, dtype=torch.bfloat16)]

    @torch.compile(fullgraph=True, dynamic=False, backend=backend)
    def attend(query: Tensor, given: dict[str, Any]) -> Tensor:
        documents = given["cu_seq_lens_q"], given["max_length_q"]
        return packing._varlen(query, query, query, None, None, *documents)

    query = torch.randn(2, 2, 16, 8, dtype=torch.bfloat16)
    for rows in (((4, 4, 4, 4), (10, 6)), ((9, 7), (8, 8)), ((16,), (16,)), ((3, 3, 10), (11, 5))):
        starts = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
        attend(query, packing.document_bounds(*cumulative_lengths(starts)))
    assert len(graphs) == 1


def test_compiled_blocks_on_cpu_have_a_mask() -> None:
    model = small("llama")
    why = "one document after another cannot be in the one graph of a compiled block"
    assert why in use_packed_attention(model, "auto", "cpu", "bf16", is_compiled=True)
    with pytest.raises(UnsupportedError, match=why):
        use_packed_attention(model, "varlen", "cpu", "bf16", is_compiled=True)


def on_a_grid(shape: tuple[int, int, int, int], options: dict[str, Any]) -> None:
    grid = Grid.create(shape)
    model = build("llama")
    set_attention(model, packing.NAME)
    report = parallelize(model, grid, **options)
    stock = build("llama")
    ids = tokens()[[0, 1, 2, 0]][:, :16]
    packed = positions()[[0, 1, 2, 0]][:, :16]
    rows = grid.local_rows(4)
    model(input_ids=ids[rows], position_ids=packed[rows], labels=ids[rows]).loss.backward()
    stock(
        input_ids=ids, position_ids=packed, labels=ids, use_cache=False
    ).loss.backward()  # with transformers' mask
    assert_shards_close(local_gradients(model), gradients(stock), report, grid)


@pytest.mark.parametrize("weights", ["streamed", "fsdp2"])
def test_packed_rows_on_a_grid(pool: RankPool, weights: str) -> None:
    pool.run(on_a_grid, 4, (1, 1, 2, 2), {"weights": weights, "activation_checkpointing": "full"})
    pool.run(on_a_grid, 4, (2, 1, 1, 2), {"weights": weights})
