"""The loss by chunks of tokens: exact, with a chunk of the logits at a time, and the logits for whoever reads them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GraniteConfig, GraniteForCausalLM

import fourfold as ff
from benchmarks.ranks import RankPool
from fourfold import Grid
from fourfold.parallel.loss import chunked as chunked_loss
from fourfold.parallel.loss.head import LazyLogits
from fourfold.weights.api import evaluating
from tests.models import LLAMA_LIKE, VOCABULARY, assert_shards_close, batch, build, gradients, local_gradients

Shape = tuple[int, int, int, int]
TOKENS = 3  # of a chunk, which does not divide those of a batch
PIECE = 2  # tokens whose cross entropy is computed at a time
ROWS = 10  # of the head's gradient at a time, which do not divide the vocabulary


class Chunks:
    """Chunks of a few tokens; small models would fit into one."""

    def __enter__(self) -> None:
        self._real = chunked_loss.chunk_tokens, chunked_loss.piece_tokens, chunked_loss.gradient_rows
        chunked_loss.chunk_tokens = lambda vocabulary, x, each_bytes: TOKENS  # type: ignore[assignment]
        chunked_loss.piece_tokens = lambda columns: PIECE  # type: ignore[assignment]
        chunked_loss.gradient_rows = lambda features: ROWS  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        chunked_loss.chunk_tokens, chunked_loss.piece_tokens, chunked_loss.gradient_rows = self._real  # type: ignore[assignment]


class Widest(TorchDispatchMode):
    """The most rows of any tensor that is as wide as the logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width, self.rows = width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.ndim >= 2 and out.shape[-1] == self._width and out.is_contiguous():
            self.rows = max(self.rows, out.shape[:-1].numel())
        return out


def labelled() -> tuple[Tensor, Tensor]:
    ids, labels = batch(4, 8)
    labels = labels.clone()
    labels[0, 2:5] = labels[3] = -100
    return ids, labels


def compare(shape: Shape, kind: str, changes: dict[str, Any], options: dict[str, Any]) -> int:
    """Loss, gradients and the loss of an evaluation, compared with one process; the most rows of logits that existed."""
    grid = Grid.create(shape)
    model, stock = build(kind, **changes), build(kind, **changes)
    report = ff.parallelize(model, grid, **options)
    ids, labels = labelled()
    expected = stock(input_ids=ids, labels=labels).loss
    expected.backward()
    rows = grid.local_rows(len(ids))
    x = grid.coordinate("x")
    width = len(range(VOCABULARY)[x * -(-VOCABULARY // grid.x) : (x + 1) * -(-VOCABULARY // grid.x)])
    with Chunks(), Widest(width) as widest:
        for _ in range(2):  # the second step of a schedule that the first one found
            model.zero_grad()
            output = model(input_ids=ids[rows], labels=labels[rows])
            output.loss.backward()
        assert isinstance(output.logits, LazyLogits)
        with evaluating(model):
            evaluated = model(input_ids=ids[rows], labels=labels[rows]).loss
    for loss in (output.loss, evaluated):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert_shards_close(local_gradients(model), gradients(stock), report, grid)
    return widest.rows


@pytest.mark.parametrize(
    ("shape", "kind", "options"),
    [
        ((1, 1, 2, 2), "llama", {"weights": "fsdp2"}),
        ((1, 1, 2, 2), "llama", {"weights": "streamed", "activations": "replicated"}),
        ((1, 2, 1, 2), "gpt2", {"weights": "streamed"}),  # tied
        ((2, 2, 1, 1), "llama", {"weights": "fsdp2"}),
        ((2, 2, 1, 1), "gpt2", {"weights": "streamed"}),
        ((1, 2, 2, 1), "qwen3", {"weights": "fsdp2", "activation_checkpointing": "full"}),
    ],
)
def test_the_loss_by_chunks_is_exact(
    pool: RankPool, shape: Shape, kind: str, options: dict[str, Any]
) -> None:
    for rows in pool.run(compare, 4, shape, kind, {}, options):
        assert rows <= max(TOKENS, shape[2])


def logits_after(shape: Shape) -> tuple[float, float, float]:
    """Logits that are read after the loss: those of the whole way, also after backward, and their gradient flows."""
    grid = Grid.create(shape)
    model = build("llama")
    ff.parallelize(model, grid)
    ids, labels = labelled()
    whole = model(input_ids=ids).logits
    first = model(input_ids=ids, labels=labels)
    error = float((first.logits - whole).abs().max())
    assert first.logits.shape == whole.shape
    second = model(input_ids=ids, labels=labels)
    second.loss.backward()
    late = float((second.logits.detach() - whole).abs().max())
    model.zero_grad()
    third = model(input_ids=ids, labels=labels).logits
    return error, late, float((third * 2).sum() - 2 * whole.sum())


def test_whoever_reads_the_logits_gets_them(pool: RankPool) -> None:
    for errors in pool.run(logits_after, 4, (1, 1, 2, 2)):
        assert max(map(abs, errors)) < 1e-4


def scaled(shape: Shape) -> None:
    """A model that scales its logits before the loss: it reads them, and from then on the head returns them."""
    grid = Grid.create(shape)
    config = GraniteConfig(**LLAMA_LIKE, logits_scaling=3.0)
    torch.manual_seed(0)
    model, stock = GraniteForCausalLM(config), GraniteForCausalLM(config)
    stock.load_state_dict(model.state_dict())
    report = ff.parallelize(model, grid)
    ids, labels = labelled()
    rows = grid.local_rows(len(ids))
    for step in range(2):
        for trained, part in ((stock, slice(None)), (model, rows)):
            trained.zero_grad()
            output = trained(input_ids=ids[part], labels=labels[part])
            output.loss.backward()
        assert not isinstance(output.logits, LazyLogits), step
        assert_shards_close(local_gradients(model), gradients(stock), report, grid)


def test_a_model_that_scales_its_logits(pool: RankPool) -> None:
    pool.run(scaled, 2, (1, 1, 1, 2))
    pool.run(scaled, 2, (1, 2, 1, 1))


def in_bf16(shape: Shape) -> tuple[float, float]:
    """The error of the head's gradient, relative to fp32: by chunks, and of the whole logits."""
    grid = Grid.create(shape)
    ids, labels = labelled()
    stock = build("llama")
    stock(input_ids=ids, labels=labels).loss.backward()
    exact = stock.lm_head.weight.grad
    errors = []
    for is_chunked in (True, False):
        model = build("llama")
        ff.parallelize(model, grid, precision="bf16", weights="fsdp2", chunked_loss=is_chunked)
        rows = grid.local_rows(len(ids))
        with Chunks():
            model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
        found = model.lm_head.weight.grad.full_tensor()
        errors.append(float((found - exact).norm() / exact.norm()))
    return errors[0], errors[1]


def test_bf16_is_as_exact_as_the_whole_logits(pool: RankPool) -> None:
    for chunked, whole in pool.run(in_bf16, 2, (1, 2, 1, 1)):
        assert chunked <= 1.2 * whole


def lose_a_chunk(shape: Shape) -> bool:
    """Is a chunk that is left out found?"""
    real = chunked_loss._token_losses

    def without_the_first(logits: Tensor, labels: Tensor, *rest: Any) -> Any:
        loss = real(logits, labels, *rest)
        logits.masked_fill_((labels == labels[0]).unsqueeze(-1), 0.0)
        return loss

    chunked_loss._token_losses = without_the_first
    try:
        compare(shape, "llama", {}, {"weights": "streamed"})
    except AssertionError:
        return True
    finally:
        chunked_loss._token_losses = real
    return False


def test_a_wrong_gradient_of_a_chunk_is_found(pool: RankPool) -> None:
    assert pool.run(lose_a_chunk, 2, (1, 1, 1, 2)) == [True, True]


def uneven_pieces() -> tuple[float, float]:
    """A vocabulary that x does not divide, and many tokens: ranks of other widths send as much at a time."""
    grid = Grid.create((1, 1, 1, 2))
    widths = [len(range(VOCABULARY)[i::2]) for i in range(2)]
    assert widths[0] != widths[1]
    model, stock = build("llama"), build("llama")
    ff.parallelize(model, grid)
    ids, labels = labelled()
    real = chunked_loss.piece_tokens
    chunked_loss.piece_tokens = lambda columns: 2 if columns == max(widths) else 3  # type: ignore[assignment]
    try:
        found = model(input_ids=ids, labels=labels).loss
    finally:
        chunked_loss.piece_tokens = real
    return float(found.detach()), float(stock(input_ids=ids, labels=labels).loss.detach())


def test_ranks_with_other_widths_of_the_vocabulary_send_equal_pieces(pool: RankPool) -> None:
    for found, wanted in pool.run(uneven_pieces, 2):
        assert found == pytest.approx(wanted, rel=1e-6)
