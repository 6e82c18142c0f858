import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from fourfold.hf import init_recorder as initialize
from fourfold.hf.init_recorder import record_initialization, restore_buffers
from fourfold.hf.init_replay import InitReplay, Step, fill_

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": COMMON | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0}},
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "qwen3": COMMON,
    "gemma": COMMON,
    "gemma2": COMMON,
    "gemma3_text": COMMON
    | {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": LINEAR_ROPE,
        },
    },
    "gpt_neox": COMMON,
    "phi3": COMMON,
    "olmo2": COMMON,
    "cohere": COMMON,
    "bloom": {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "opt": COMMON | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "mpt": {"vocab_size": 96, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "falcon": {key: value for key, value in COMMON.items() if key != "head_dim"},
    "mixtral": COMMON,
    "bert": COMMON | {"is_decoder": True},
    "mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}


def build(family: str, **changes: Any) -> PreTrainedModel:
    # The models choose token ids outside a small vocabulary by default.
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**(ids | FAMILIES[family] | changes)))


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def everything(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


def whole(replay: InitReplay, name: str = "w", seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full(replay.shape, math.nan, dtype=dtype)
    fill_(out, replay, everything(replay.shape), name=name, seed=seed)
    return out


RANDOM_STEPS = [
    Step("normal_", (0.5, 2.0)),
    Step("uniform_", (-1.0, 3.0)),
    Step("trunc_normal_", (0.0, 1.0, -2.0, 2.0)),
    Step("trunc_normal_", (0.0, 1.0, 1.5, 4.0)),
]


@st.composite
def replays(draw: st.DrawFn) -> InitReplay:
    shape = draw(
        st.one_of(
            st.tuples(st.integers(1, 150_000)),
            st.tuples(st.integers(1, 600), st.integers(1, 600)),
            st.tuples(st.integers(1, 6), st.integers(1, 40_000)),
            st.tuples(st.integers(1, 9), st.integers(1, 90), st.integers(1, 300)),
            st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(1, 5), st.integers(1, 5)),
        )
    )
    steps = [draw(st.sampled_from(RANDOM_STEPS))]
    if draw(st.booleans()):
        start, stop = sorted((draw(st.integers(0, shape[0])), draw(st.integers(0, shape[0]))))
        values = torch.arange((stop - start) * math.prod(shape[1:])).float().view(stop - start, *shape[1:])
        extra = [
            Step("fill_", (0.0,)),
            Step("normal_", (9.0, 1.0)),
            Step("mul_", (3.0,)),
            Step("copy_", values=values),
        ]
        chosen = draw(st.sampled_from(extra))
        steps.append(Step(chosen.op, chosen.arguments, (start, stop), chosen.values))
    if draw(st.booleans()):
        steps += [Step("div_", (7.0,)), Step("add_", (0.1,)), Step("clamp_", (-0.2, 0.2))]
    return InitReplay(shape, tuple(steps))


@given(replay=replays(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_slices_of_any_tiling_are_slices_of_the_full_tensor(replay: InitReplay, data: st.DataObject) -> None:
    expected = whole(replay)
    assert not expected.isnan().any()
    cuts = [
        sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2), label="cuts")})
        for n in replay.shape
    ]
    for corners in itertools.product(*(list(itertools.pairwise(c)) for c in cuts)):
        index = tuple(slice(lo, hi) for lo, hi in corners)
        out = torch.full_like(expected[index], math.nan)
        fill_(out, replay, index, name="w", seed=0)
        assert torch.equal(out, expected[index])


def test_values_depend_on_seed_and_name_and_differ_between_tiles() -> None:
    replay = InitReplay((600, 600), (Step("normal_", (0.0, 1.0)),))
    first = whole(replay)
    assert torch.equal(first, whole(replay))
    assert not torch.equal(first, whole(replay, seed=1))
    assert not torch.equal(first, whole(replay, name="v"))
    assert first.unique().numel() > 0.98 * first.numel()


def test_the_target_may_have_any_dtype_and_strides_and_be_empty() -> None:
    replay = InitReplay((300, 500), (Step("normal_", (0.0, 1.0)),))
    expected = whole(replay)
    assert torch.equal(whole(replay, dtype=torch.bfloat16), expected.bfloat16())
    transposed = torch.empty(40, 20).t()
    fill_(transposed, replay, (slice(250, 270), slice(240, 280)), name="w", seed=0)
    assert torch.equal(transposed, expected[250:270, 240:280])
    fill_(torch.empty(0, 500), replay, (slice(7, 7), slice(0, 500)), name="w", seed=0)
    assert whole(InitReplay((), (Step("fill_", (3.0,)),))) == 3


@pytest.mark.parametrize(
    ("shape", "index"),
    [((4, 5), (slice(0, 4), slice(0, 6))), ((4, 5), (slice(0, 4),)), ((3, 5), (slice(0, 4), slice(0, 5)))],
)
def test_a_slice_that_does_not_fit_is_rejected(shape: tuple[int, ...], index: tuple[slice, ...]) -> None:
    with pytest.raises(ValueError, match="of w"):
        fill_(torch.empty(shape), InitReplay((4, 5), (Step("fill_", (0.0,)),)), index, name="w", seed=0)


def assert_same_distribution(name: str, ours: Tensor, stock: Tensor) -> None:
    """The same number of zeros and ones, and the same mean and standard deviation within a few standard errors."""
    assert ours.shape == stock.shape
    for constant in (0.0, 1.0):  # a normal draw is exactly zero now and then
        assert abs(int((ours == constant).sum()) - int((stock == constant).sum())) <= (
            2 if stock.std() > 0 else 0
        ), name
    std = float(stock.std(correction=0))
    error = std / math.sqrt(stock.numel()) + 1e-7
    assert float(ours.std(correction=0)) == pytest.approx(std, abs=6 * error), name
    assert float(ours.mean()) == pytest.approx(float(stock.mean()), abs=9 * error), name


@pytest.mark.parametrize("family", FAMILIES)
def test_filled_weights_are_distributed_like_those_of_the_stock_model(family: str) -> None:
    torch.manual_seed(0)
    stock = build(family)
    replays = record_initialization(on_meta(lambda: build(family)))
    assert replays.keys() == dict(stock.named_parameters()).keys()
    for name, parameter in stock.named_parameters():
        assert_same_distribution(name, whole(replays[name], name), parameter.detach())


def test_gpt2_residual_projections_are_scaled_by_depth() -> None:
    replays = record_initialization(on_meta(lambda: build("gpt2")))
    assert replays["transformer.h.1.mlp.c_fc.weight"].steps == (Step("normal_", (0.0, 0.02)),)
    for name in ("attn", "mlp"):
        (step,) = replays[f"transformer.h.1.{name}.c_proj.weight"].steps
        assert step.arguments == pytest.approx((0.0, 0.02 / math.sqrt(2 * 3)))


@pytest.mark.parametrize("tied", [False, True])
def test_the_padding_row_is_zero_whether_or_not_the_head_is_tied(tied: bool) -> None:
    replays = record_initialization(on_meta(lambda: build("llama", tie_word_embeddings=tied)))
    assert ("lm_head.weight" in replays) is not tied
    embedding = whole(replays["model.embed_tokens.weight"])
    assert embedding.count_nonzero(dim=1).eq(0).nonzero().tolist() == [[5]]


def test_recording_leaves_no_trace() -> None:
    model = on_meta(lambda: build("llama", tie_word_embeddings=True))
    flagged = model.get_submodule("model.layers.0")
    flagged._is_hf_initialized = True
    parameters = dict(model.named_parameters(remove_duplicate=False))
    random_state, trunc_normal_ = torch.get_rng_state(), nn.init._no_grad_trunc_normal_
    replays = record_initialization(model)
    assert "model.layers.0.mlp.up_proj.weight" in replays
    assert [m for m in model.modules() if "_is_hf_initialized" in vars(m)] == [flagged]
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(torch.get_rng_state(), random_state)
    assert nn.init._no_grad_trunc_normal_ is trunc_normal_


def test_every_recording_is_the_same_whatever_the_random_state() -> None:
    def bias() -> Tensor:
        return whole(
            record_initialization(on_meta(lambda: build("mamba")))["backbone.layers.0.mixer.dt_proj.bias"]
        )

    torch.manual_seed(1)
    first = bias()
    torch.manual_seed(2)
    assert torch.equal(first, bias())


def test_plain_modules_are_initialized_by_reset_parameters() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Embedding(500, 40, padding_idx=3),
            nn.Linear(40, 300),
            nn.Conv1d(30, 20, 3),
            nn.LayerNorm(40),
            nn.MultiheadAttention(40, 4),
            nn.GRU(40, 40),
        )

    stock = make()
    replays = record_initialization(on_meta(make))
    for name, parameter in stock.named_parameters():
        assert_same_distribution(name, whole(replays[name], name), parameter.detach())


class Custom(nn.Module):
    """A weight, and a way to initialise it."""

    def __init__(self, rule: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(24, 10))
        self.rule = rule
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.rule(self.weight)


def rows_one_by_one(weight: Tensor) -> None:
    weight[:20].normal_(5, 0.1)
    weight[20:] = 3
    weight[22] = torch.arange(10.0, device=weight.device)


def scaled(weight: Tensor) -> None:
    weight.data.uniform_(-1, 1).mul_(0.5).sub_(2).clamp_(max=-1.75)
    weight /= 4


@pytest.mark.parametrize(
    "rule",
    [
        lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.01, b=0.04),
        lambda w: nn.init.xavier_normal_(w),
        lambda w: w.copy_(torch.linspace(1, 2, 10)),
        rows_one_by_one,
        scaled,
    ],
    ids=["trunc_normal", "xavier", "copy", "rows", "scaled"],
)
def test_custom_rules_are_recorded(rule: Callable[[Tensor], object]) -> None:
    torch.manual_seed(0)
    stock = Custom(rule).weight.detach()
    ours = whole(record_initialization(on_meta(lambda: Custom(rule)))["weight"])
    assert_same_distribution("weight", ours, stock)
    deterministic = torch.equal(Custom(rule).weight, stock)
    assert torch.equal(ours, stock) or not deterministic
    assert ours.min() == pytest.approx(float(stock.min()), abs=0.2)
    assert ours.max() == pytest.approx(float(stock.max()), abs=0.2)


WITHOUT_RECIPE: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "orthogonal": (nn.init.orthogonal_, "copy_ takes values that are computed"),
    "eye": (nn.init.eye_, "eye"),
    "sparse": (lambda w: nn.init.sparse_(w, 0.1), "index_put_"),
    "erfinv": (lambda w: w.uniform_(-0.9, 0.9).erfinv_(), "erfinv_"),
    "floor": (lambda w: w.uniform_(-9, 9).div_(2, rounding_mode="floor"), "div_"),
    "computed": (lambda w: w.copy_(w.uniform_(1, 16).log()), "copy_ takes values that are computed"),
    "column": (lambda w: nn.init.zeros_(w)[:, 3].fill_(1), "not whole rows"),
}
UNSET = "no _init_weights or reset_parameters sets it"
IMPOSSIBLE: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "part": (lambda w: w[:20].zero_(), UNSET),
    "nothing": (lambda w: None, UNSET),
    "column only": (lambda w: w[:, 3].fill_(1), "not set"),
}


@pytest.mark.parametrize("rule", [rule for rule, _ in WITHOUT_RECIPE.values()], ids=WITHOUT_RECIPE.keys())
def test_a_small_parameter_that_cannot_be_replayed_is_computed(rule: Callable[[Tensor], object]) -> None:
    torch.manual_seed(3)
    stock = Custom(rule).weight
    assert torch.equal(whole(record_initialization(on_meta(lambda: Custom(rule)), seed=3)["weight"]), stock)


@pytest.mark.parametrize("case", WITHOUT_RECIPE | IMPOSSIBLE)
def test_what_cannot_be_recorded_is_named(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case in WITHOUT_RECIPE:
        monkeypatch.setattr(initialize, "MAX_COMPUTED_ELEMENTS", 24 * 10 - 1)
    rule, reason = (WITHOUT_RECIPE | IMPOSSIBLE)[case]
    model = nn.Module()
    model.block = on_meta(lambda: Custom(rule))
    with pytest.raises(ValueError, match="load a checkpoint instead") as error:
        record_initialization(model)
    assert "block.weight [24, 10]" in str(error.value)
    assert reason in str(error.value)


def test_an_initialization_that_reads_large_weights_is_rejected() -> None:
    model = on_meta(lambda: Custom(lambda w: None))
    model.rule = lambda w: w.normal_() if w.sum().item() else None
    with pytest.raises(ValueError, match=r"Custom cannot run without weights .*; load a checkpoint instead"):
        record_initialization(model)


def test_a_later_fill_replaces_what_could_not_be_recorded() -> None:
    model = on_meta(lambda: Custom(lambda w: nn.init.ones_(nn.init.orthogonal_(w))))
    assert record_initialization(model)["weight"].steps == (Step("fill_", (1.0,)),)


def test_a_model_with_weights_is_not_changed() -> None:
    model = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200))
    model[1].running_mean.fill_(7)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    replays = record_initialization(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert_same_distribution("0.weight", whole(replays["0.weight"]), before["0.weight"])


def spoil(model: nn.Module) -> None:
    for buffer in model.buffers():
        buffer.fill_(math.nan if buffer.is_floating_point() else 77)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_restored_and_parameters_not_changed(family: str) -> None:
    stock = build(family)
    model = on_meta(lambda: build(family)).to_empty(device="cpu")
    spoil(model)
    random_state = torch.get_rng_state()
    restore_buffers(model, "cpu")
    buffers = dict(model.named_buffers())
    assert buffers.keys() == dict(stock.named_buffers()).keys()
    for name, buffer in stock.named_buffers():
        assert buffer.dtype == buffers[name].dtype
        assert torch.equal(buffer, buffers[name]), name
    assert all((parameter == 7).all() for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not [m for m in model.modules() if "_is_hf_initialized" in vars(m)]


def test_buffers_are_made_on_the_device_while_parameters_stay_on_meta() -> None:
    model = on_meta(lambda: build("gemma3_text"))
    restore_buffers(model, "cpu")
    assert all(parameter.is_meta for parameter in model.parameters())
    for name, buffer in build("gemma3_text").named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name


def test_buffers_that_nothing_sets_are_named_unless_a_checkpoint_holds_them() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).to("meta")
    model[1].register_buffer("mask", torch.ones(3, device="meta"))
    model.to_empty(device="cpu")
    with pytest.raises(ValueError, match=r"cannot restore 1\.mask of Sequential"):
        restore_buffers(model, "cpu")
    spoil(model)
    restore_buffers(model, "cpu", from_checkpoint={"1.mask"})
    assert model[0].running_mean.eq(0).all()
    assert model[0].running_var.eq(1).all()
    assert model[0].num_batches_tracked == 0


def test_a_tensor_left_on_meta_outside_the_buffers_is_named() -> None:
    model = nn.Linear(2, 2, device="meta")
    model.scale = torch.ones(2, device="meta")
    with pytest.raises(ValueError, match=r"cannot restore scale \(a tensor, but not a buffer\)"):
        restore_buffers(model.to_empty(device="cpu"), "cpu")
