"""The workload: sizes of a transformer, its parameters and FLOPs, from a Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fourfold.planner.inputs.experts import SPARSE, Experts, Latent, experts_of, latent_of
from fourfold.untrusted_input import read_json
from fourfold.weights.quantization import BYTES_PER_NUMBER, Quantization

# Families whose MLP has a gate (three matrices) and those that have none (two); others are rejected.
_GATED = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo", "olmo2", "olmo3", "phi3",
    "granite", "cohere", "cohere2", "stablelm", "smollm3", "glm", "glm4", "helium", "ernie4_5", "seed_oss",
    "ministral", "exaone4", "hunyuan_v1_dense",
)  # fmt: skip
_UNGATED = ("gpt2", "gpt_neox", "gptj", "gpt_neo", "opt", "bloom", "phi", "starcoder2", "gpt_bigcode", "mpt",
            "persimmon", "nemotron", "arcee", "biogpt", "codegen", "falcon")  # fmt: skip
# Families that multiply q, k and v in one matrix, and those whose norms of q and k look at all heads of a rank.
_FUSED_QKV = ("phi3", "gpt2", "gpt_bigcode", "gpt_neox", "bloom", "mpt", "persimmon", "falcon")
_NORMS_ALL_HEADS = ("olmo2", "olmo3", "olmoe")
# Families whose positions are not in q and k.
_NOT_ROTATED = ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "biogpt", "bloom", "mpt")
# The names of each size in several families.
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocabulary": ("vocab_size",),
    "positions": ("n_positions",),
    "activation": ("hidden_act", "activation_function", "hidden_activation"),
}
# Tensors that autograd keeps of an MLP without a gate: by default the input and output of its activation function. Where
# PyTorch has no single operator for it, also what is between; a function whose gradient needs only its result keeps one.
_COPIES = {"relu": 1, "relu2": 2, "gelu_new": 5, "gelu_fast": 7}


class KeptMore(NamedTuple):
    """What autograd keeps of a block beyond a block of Llama or GPT-2, by width: (tensors in fp32, in the precision of the work)."""

    hidden: tuple[float, float] = (0, 0)
    q: tuple[float, float] = (0, 0)
    kv: tuple[float, float] = (0, 0)
    ffn: tuple[float, float] = (0, 0)
    scores: tuple[float, float] = (0, 0)  # heads x length: attention that is not fused


# Measured with dry runs (`tests/planner/cost/test_memory.py`). Most have more norms: of q and k, or after attention and the MLP.
_NORMS_OF_Q_AND_K = KeptMore(q=(1, 1), kv=(1, 1))
_KEPT_MORE = {
    "qwen3": _NORMS_OF_Q_AND_K,
    "qwen3_moe": _NORMS_OF_Q_AND_K,
    "olmoe": _NORMS_OF_Q_AND_K,
    "hunyuan_v1_dense": _NORMS_OF_Q_AND_K,
    "exaone4": _NORMS_OF_Q_AND_K,
    "gemma": KeptMore(hidden=(2, -2)),
    "gemma3_text": KeptMore(hidden=(6, -2), q=(2, 0), kv=(2, 0)),
    "gemma2": KeptMore(hidden=(6, -2), q=(0, 2), kv=(0, -2), scores=(2, 0)),
    "gptj": KeptMore(hidden=(2, -4), scores=(2, -1)),
    "codegen": KeptMore(hidden=(0, -4), scores=(2, -1)),
    "cohere": KeptMore(hidden=(2, -4)),
    "cohere2": KeptMore(hidden=(2, -4)),
    "phi": KeptMore(hidden=(0, -1)),
    "bloom": KeptMore(scores=(2, -1)),
    "mpt": KeptMore(hidden=(-2, 0), scores=(2, -1)),
    "glm": KeptMore(q=(0, 1)),
    "glm4": KeptMore(hidden=(2, 2), q=(0, 1)),
    "olmo": KeptMore(hidden=(0, -2)),
    "olmo2": KeptMore(hidden=(2, -2), q=(2, 0), kv=(2, 0)),
    "olmo3": KeptMore(hidden=(2, -2), q=(2, 0), kv=(2, 0)),
    "stablelm": KeptMore(hidden=(-2, 1)),
    "helium": KeptMore(hidden=(2, -2)),
    "persimmon": KeptMore(hidden=(-2, 1)),
    "nemotron": KeptMore(hidden=(-2, 0), q=(0, 1)),
    "biogpt": KeptMore(hidden=(-2, 0)),
    "gpt_neo": KeptMore(hidden=(-2, 1), scores=(2, -1)),
    "falcon": KeptMore(hidden=(5, -5)),
}
# Of families whose attention is FlexAttention on GPUs (`hf/flex_attention.py`), for its soft cap: what is kept with it.
_KEPT_BY_FLEX = {"gemma2": KeptMore(hidden=(6, -2))}
# Families with a norm of the MLP's output, which a selective block keeps, then.
_NORM_AFTER_MLP = ("exaone4", "gemma2", "gemma3_text", "glm4", "olmo2", "olmo3")
# Families that scale, cap or add to the logits after the head, so that the loss is not by chunks: what there is of each logit at its peak,
# in the precision of the work, besides its exponential and its gradient.
_WHOLE_LOGITS = dict.fromkeys(("granite", "cohere", "cohere2", "gptj", "opt", "phi", "codegen"), 1) | {
    "gemma2": 2
}


# Families whose attention does not use transformers' interface.
_OWN_ATTENTION = ("biogpt", "bloom", "falcon", "gptj", "gpt_neo", "mpt", "stablelm")


@dataclass(frozen=True)
class Workload:
    """A decoder. Embedding and head are one matrix if ``tied``."""

    name: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    qkv_bias: bool = False
    bias: bool = False  # every other linear of a block, and the norms
    positions: int = 0  # learned position embeddings
    activation: str = ""  # the function of an MLP, as transformers names it
    fused_qkv: bool = False  # q, k and v are one matrix
    norms_all_heads: bool = False  # q and k have norms over the heads of a rank together
    rotates: bool = True  # positions are in q and k, which are made anew by it
    kept_more: KeptMore | None = None
    kept_by_flex: KeptMore | None = None  # the same with FlexAttention, where the family needs it
    is_flex: bool = False  # its attention is FlexAttention
    norm_after_mlp: bool = False
    whole_logits: int = (
        0  # tensors of all logits in the precision of the work, where the loss is not by chunks
    )
    lora_rank: int = 0  # of the adapters that are trained instead of the weights; 0: the weights are trained
    quantization: Quantization = "none"  # of the weights of linears in blocks, where adapters are trained
    experts: Experts | None = None  # of the blocks after the dense ones
    latent: Latent | None = None
    not_shared: str = (
        ""  # why ranks cannot share its sequences, or why that has no formulas; empty if they can
    )

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.name}: num_attention_heads={self.heads} is not a multiple of num_key_value_heads={self.kv_heads}; "
                "correct the config"
            )

    def attended(self, attention: str, target: str, precision: str) -> Workload:
        """With the attention that a run has for this ``engine.attention`` on devices of this type (`hf/packed_attention.py`).

        Example:
            >>> capped = Workload("", 8, 8, 1, 1, 1, 8, 8, kept_by_flex=KeptMore())
            >>> [capped.attended("auto", target, "bf16").is_flex for target in ("cuda", "cpu")]
            [True, False]
        """
        is_wanted = attention == "flex" or (attention == "auto" and self.kept_by_flex is not None)
        if not is_wanted or target != "cuda" or precision != "bf16":
            return self
        return replace(self, is_flex=True, kept_more=self.kept_by_flex or self.kept_more)

    def adapted(self, rank: int, quantization: Quantization = "none") -> Workload:
        """With adapters of this rank (LoRA) that are trained instead of the weights; 0: as it is."""
        if not rank and quantization != "none":
            raise ValueError(
                f"quantization={quantization!r} is for the frozen weights of adapters; give a rank of LoRA"
            )
        return replace(self, lora_rank=rank, quantization=quantization) if rank else self

    def weight_bytes(self, work_bytes: int) -> float:
        """Of each element of a block's matrices, stored where they are frozen, and sent."""
        return BYTES_PER_NUMBER if self.quantization == "nf4" else work_bytes

    # -- sizes ---------------------------------------------------------------------------------------------------

    @property
    def q_features(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_features(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def o_features(self) -> int:
        """Of attention's output."""
        return self.heads * self.latent.value if self.latent is not None else self.q_features

    @property
    def dense(self) -> Workload:
        """With its dense blocks alone."""
        layers = self.experts.dense_layers if self.experts is not None else self.layers
        return replace(self, experts=None, layers=layers)

    @property
    def sparse_layers(self) -> int:
        return 0 if self.experts is None else self.layers - self.experts.dense_layers

    @property
    def activation_copies(self) -> int:
        """How many tensors of inner features autograd keeps of an MLP."""
        if self.gated:
            return 4  # gate, up, the activation and the product
        return _COPIES.get(self.activation, 2)

    @property
    def attention_matrices(self) -> tuple[int, ...]:
        """Elements of q, k, v, o; with latent attention those of its five matrices."""
        h = self.hidden
        if self.latent is None:
            q, kv = h * self.q_features, h * self.kv_features
            return (q, kv, kv, q)
        at = self.latent
        of_q = (h * at.q, at.q * self.q_features) if at.q else (h * self.q_features,)
        of_kv = (h * (at.kv + at.rotated), at.kv * self.heads * (at.unrotated + at.value))
        return (*of_q, *of_kv, h * self.o_features)

    @property
    def expert_elements(self) -> int:
        """Of all experts of a block, those that all tokens share left out."""
        if self.experts is None:
            return 0
        e = self.experts
        biases = (2 if self.gated else 1) * e.features + self.hidden if e.bias else 0
        return e.number * ((3 if self.gated else 2) * self.hidden * e.features + biases)

    @property
    def block_matrices(self) -> tuple[int, ...]:
        """Elements of attention's matrices, and of (gate,) up, down; or of router, shared experts and experts."""
        count = 3 if self.gated else 2
        if self.experts is None:
            return (*self.attention_matrices, *[self.hidden * self.ffn] * count)
        e = self.experts
        shared = [self.hidden * e.shared] * (count if e.shared else 0)
        return (*self.attention_matrices, self.hidden * e.number, *shared, self.expert_elements)

    @property
    def block_vectors(self) -> int:
        """Elements of norms and biases of a block."""
        count = 2 * self.hidden * (2 if self.bias else 1)
        if self.bias or self.qkv_bias:
            count += self.q_features + 2 * self.kv_features
        if self.bias:
            count += 2 * self.hidden + self.ffn * (2 if self.gated else 1)
        if self.latent is not None:
            count += self.latent.q + self.latent.kv
        return count

    @property
    def table(self) -> int:
        """Elements of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        outside = self.table * (1 if self.tied else 2) + self.positions * self.hidden
        blocks = self.layers * (sum(self.block_matrices) + self.block_vectors)
        if self.experts is not None:
            blocks += self.experts.dense_layers * (sum(self.dense.block_matrices) - sum(self.block_matrices))
        return blocks + outside + self.hidden * (2 if self.bias else 1)

    def divides_heads(self, parts: int) -> bool:
        """Can attention be sharded into this many parts with whole heads each? (`parallel/sequence_roles.py`)"""
        if self.heads % parts or self.norms_all_heads:
            return False
        return self.kv_heads % parts == 0 or (parts % self.kv_heads == 0 and not self.fused_qkv)

    # -- work ----------------------------------------------------------------------------------------------------

    def block_forward_flops_per_token(self, length: int) -> float:
        """Forward FLOPs of one block for one token: matmuls and attention; of experts those that it chooses, and the mean of all blocks.

        Attention is counted whole, not halved for what a causal mask leaves out, as Megatron (arXiv 2104.04473 eq. 3) and
        PaLM count it.
        """
        attention = 2.0 * length * (self.q_features + self.o_features)
        if self.experts is None:
            return 2.0 * sum(self.block_matrices) + attention
        e = self.experts
        *others, _ = self.block_matrices
        sparse = sum(others) + e.chosen / e.number * self.expert_elements
        share = e.dense_layers / self.layers
        return 2.0 * (share * sum(self.dense.block_matrices) + (1 - share) * sparse) + attention

    def model_flops(self, tokens: float, length: int) -> float:
        """FLOPs of forward and backward: what MFU counts."""
        head = 2.0 * self.table
        every = 3.0 * tokens * (self.layers * self.block_forward_flops_per_token(length) + head)
        if not self.lora_rank:
            return every
        # Frozen weights have no gradients: two of three products of each linear. Those of adapters are not counted.
        return every - tokens * (self.layers * 2.0 * sum(self.block_matrices) + head)

    def hardware_flops(self, tokens: float, length: int, *, again: float) -> float:
        """The same with the forwards that recomputation does again, of that many blocks: what HFU counts.

        Work that ranks along y repeat (attention's core) is in neither.
        """
        return self.model_flops(tokens, length) + tokens * again * self.block_forward_flops_per_token(length)

    def share_before_last_product(self, length: int) -> float:
        """Of a block's forward FLOPs: what precedes its last linear."""
        last = self.ffn if self.experts is None else self.experts.chosen * self.experts.features
        return 1.0 - 2.0 * self.hidden * last / self.block_forward_flops_per_token(length)


def from_config(config: dict[str, Any] | str | Path, name: str | None = None) -> Workload:
    """The workload of a Hugging Face ``config.json``, given as a dict or a path.

    Example:
        >>> llama = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        ...          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
        >>> from_config(llama).parameters
        8030261248
    """
    if not isinstance(config, dict):
        path = Path(config)
        if not path.exists():
            raise ValueError(
                f"there is no config {path}; give the path of a Hugging Face config.json, or a dict"
            )
        name, config = name or path.stem, read_json(path)
    assert isinstance(config, dict)
    if "text_config" in config:
        config = {**config, **config["text_config"]}
    family = str(config.get("model_type", ""))
    _check_family(family, config)
    if any(_first(config, size) is None for size in ("hidden", "layers", "heads", "vocabulary")):
        config = _with_defaults(family, config)
    hidden, layers, heads = (_integer(config, n) for n in ("hidden", "layers", "heads"))
    ffn = _first(config, "ffn")
    ffn = 4 * hidden if ffn is None else int(ffn)
    kv_heads = _kv_heads(config, family, heads)
    head_dim = config.get("head_dim")
    latent = latent_of(config, family)
    if latent is not None:
        head_dim = latent.rotated + latent.unrotated
    is_gpt2 = family in ("gpt2", "gpt_bigcode")
    return Workload(
        name=name or str(config.get("_name_or_path") or family or "model"),
        hidden=hidden,
        ffn=ffn,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads if head_dim is None else int(head_dim),
        vocabulary=_integer(config, "vocabulary"),
        gated=family not in _UNGATED,
        tied=bool(config.get("tie_word_embeddings", is_gpt2 or family.startswith("gemma"))),
        qkv_bias=bool(config.get("attention_bias", family in ("qwen2", "qwen2_moe", "gpt_oss"))),
        bias=family in ("gpt2", "gpt_neox", "opt", "bloom", "phi", "starcoder2", "gpt_bigcode", "gptj"),
        positions=int(_first(config, "positions") or 0) if is_gpt2 else 0,
        activation=str(_first(config, "activation") or ("gelu_new" if is_gpt2 else "")),
        fused_qkv=family in _FUSED_QKV,
        norms_all_heads=family in _NORMS_ALL_HEADS,
        rotates=family not in _NOT_ROTATED,
        kept_more=_KEPT_MORE.get(family),
        kept_by_flex=_KEPT_BY_FLEX.get(family),
        norm_after_mlp=family in _NORM_AFTER_MLP,
        whole_logits=_WHOLE_LOGITS.get(family, 0),
        experts=experts_of(config, family),
        latent=latent,
        not_shared=_why_not_shared(family, config),
    )


def _why_not_shared(family: str, config: dict[str, Any]) -> str:
    """The rules of `parallel/context/model.py`, and what has no kernel there."""
    if family in _OWN_ATTENTION:
        return f"the attention of {family} does not use transformers' interface"
    if family in SPARSE:
        return f"the formulas of {family} do not know shared sequences"
    if family in _KEPT_BY_FLEX or (family in _KEPT_MORE and any(_KEPT_MORE[family].scores)):
        return f"the attention of {family} has no kernel for shared sequences"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rule = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    return (
        f"its rotations ({rule}) depend on the longest position of a batch"
        if rule in ("dynamic", "longrope")
        else ""
    )


def _kv_heads(config: dict[str, Any], family: str, heads: int) -> int:
    """In the words of each family."""
    if family == "gpt_bigcode":
        return 1 if config.get("multi_query", True) else heads
    if family == "falcon":
        if config.get("new_decoder_architecture"):
            return int(config.get("num_kv_heads") or heads)
        return 1 if config.get("multi_query", True) else heads
    found = config.get("num_key_value_heads")
    return heads if found is None else int(found)


def _check_family(family: str, config: dict[str, Any]) -> None:
    if family in SPARSE:
        if config.get("decoder_sparse_step", 1) != 1:
            raise ValueError(
                f"{family} has decoder_sparse_step={config['decoder_sparse_step']}, and the planner's formulas know models whose dense "
                "blocks come first; follow a step of it on a grid with `fourfold dryrun`"
            )
        return
    experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if experts:
        raise ValueError(
            f"{family or 'this model'} has {experts} experts, and the planner's formulas know those of {', '.join(SPARSE)}; follow a step of "
            "it on a grid with `fourfold dryrun`, or give a config of its nearest relative"
        )
    if family not in _GATED and family not in _UNGATED:
        raise ValueError(
            f"model_type {family!r} is not one of the {len(_GATED) + len(_UNGATED) + len(SPARSE)} families whose block the planner knows; "
            "give the model_type of the nearest one ('llama' for a gated MLP, 'gpt2' for a plain one), or a Workload"
        )


def _with_defaults(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """With the values of its class in transformers, which a config.json may leave out."""
    from transformers import AutoConfig  # takes a second, and most need it not

    try:
        return {**AutoConfig.for_model(family).to_dict(), **config}
    except ValueError:  # of a family that it does not know
        return config


def _first(config: dict[str, Any], size: str) -> Any:
    return next((config[key] for key in _NAMES[size] if config.get(key) is not None), None)


def _integer(config: dict[str, Any], size: str) -> int:
    value = _first(config, size)
    if not isinstance(value, int) or value < 1:
        raise ValueError(
            f"the config has {value!r} for {' or '.join(_NAMES[size])}; it has to be a whole number of at least 1"
        )
    return value
