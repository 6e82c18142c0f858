"""What a plan knows of a mixture of experts and who owns them, and of latent attention, from a Hugging Face config."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from fourfold.mesh.axes import Axis
from fourfold.planner.inputs.layout import ExpertsLayout

# Families whose sparse blocks the formulas know.
SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss")


class Experts(NamedTuple):
    """The layers of a model with experts. The other layers, the first ones, have an MLP of `Workload.ffn` features.

    ``shared`` are the inner features of experts that every token has, all together.
    """

    number: int
    chosen: int
    features: int  # inner features of one
    shared: int = 0
    dense_layers: int = 0
    bias: bool = False
    wide_weights: bool = False  # the weights of choices are in fp32, also in bf16

    def rows(self, tokens: float) -> float:
        """Of the tokens that ranks have: one for each choice."""
        return tokens * self.chosen


class Owners(NamedTuple):
    """The ranks that own experts together."""

    axes: tuple[Axis, ...]
    ranks: int
    inner: int  # ranks between neighbours

    @property
    def link(self) -> Axis:
        """The axis that their all-to-all counts for."""
        return "z" if "z" in self.axes else "x"


def load_of(e: Experts, owners: Owners | None, load: float | Literal["worst"]) -> float:
    """Rows of the fullest rank, as a multiple of the mean; "worst": each token sends it as many choices as it has experts for."""
    if owners is None:
        return 1.0
    worst = owners.ranks * min(e.chosen, e.number // owners.ranks) / e.chosen
    return worst if load == "worst" else min(load, worst)


def owners_of(experts: ExpertsLayout, z: int, y: int, x: int) -> Owners | None:
    """None where experts are cut, and gathered over z.

    Example:
        >>> owners_of(("z", "x"), z=4, y=1, x=8)
        Owners(axes=('z', 'x'), ranks=32, inner=1)
    """
    if experts == "cut":
        return None
    sizes = {"z": (z, y * x), "x": (x, 1)}
    axes = tuple(axis for axis in ("z", "x") if axis in experts and sizes[axis][0] > 1)
    if not axes:
        return None
    ranks = 1
    for axis in axes:
        ranks *= sizes[axis][0]
    return Owners(axes, ranks, y * x if axes == ("z",) else y if "z" in axes else 1)


class Latent(NamedTuple):
    """Latent attention (MLA): q, and k and v, are products of few features."""

    q: int  # features; 0: q is a product of the hidden features
    kv: int
    rotated: int  # features of a head's q and k that have positions, and those that have none
    unrotated: int
    value: int  # features of a head's v


def experts_of(config: dict[str, Any], family: str) -> Experts | None:
    """None for a dense model."""
    number = config.get("n_routed_experts") or config.get("num_local_experts") or config.get("num_experts")
    if family not in SPARSE or not number:
        return None
    features = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = int(config.get("n_shared_experts") or 0) * features
    shared = int(config.get("shared_expert_intermediate_size") or shared)
    return Experts(
        int(number),
        int(config["num_experts_per_tok"]),
        int(features),
        shared,
        int(config.get("first_k_dense_replace") or 0) + len(config.get("mlp_only_layers") or ()),
        family == "gpt_oss",
        family in ("deepseek_v3", "glm4_moe"),
    )


def latent_of(config: dict[str, Any], family: str) -> Latent | None:
    """None for attention whose k and v are products of the hidden features."""
    if family != "deepseek_v3":
        return None
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return Latent(int(config.get("q_lora_rank") or 0), *(int(config[name]) for name in names))
