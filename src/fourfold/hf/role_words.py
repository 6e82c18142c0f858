"""The words for roles, and which of them a name has been given: by the user, by the table of families, or by the model's own plan.

The roles are those of Hugging Face's plans:

    colwise                         a linear from y to x (q, k, v, gate, up)
    packed_colwise                  two of them in one matrix, one after the other (gate and up)
    rowwise                         a linear from x to y (o, down)
    colwise_gather_output           a linear from y to x: the head, and fused projections; nothing is gathered here
    rowwise_split_input             a linear from x to y
    embedding_rowwise               the token embedding: rows on x, features on y
    replicated_with_grad_allreduce  replicated on each rank, used for different heads on each x rank
    mla_kv_a_proj                   a linear from y to all ranks, whose last columns all heads share
    moe_tp_experts                  all experts of a layer: inner features on y and x together, hidden features whole

and a few more that 4D parallelism needs:

    embedding_colwise               another embedding (positions): features on y
    norm, norm_x                    a norm over the hidden features, on y; over those of all heads, on x
    heads                           a parameter with one row for each head, or a linear that gives one value for each channel: rows on x
    channels                        a convolution of each channel by itself, between colwise and rowwise: channels on x
    features                        a parameter with one value for each hidden feature: on y
    latent, colwise_from_latent     linears from y to all ranks, and from there to x (latent attention)
    rowwise_replicated              a linear from x to all ranks, each of which uses what it gives for its own channels
    router                          chooses experts: whole on each rank, reads whole hidden features
    gate                            the same, and what it gives is multiplied with hidden features
    replicated                      replicated on each rank, used for the same values on each
    idle                            replicated on each rank and not used: the towers of a multimodal model

A user passes roles in the same words, `*` standing for one part of a name, at its beginning for any number of parts:
``{"blocks.*.attn.q": "colwise"}``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

from torch import nn

from fourfold.errors import UnsupportedError
from fourfold.hf.anatomy import Anatomy, is_linear, is_norm
from fourfold.hf.experts import is_experts
from fourfold.hf.families import FAMILIES, LATENT_ATTENTION, Family
from fourfold.mesh.axes import Axis
from fourfold.mesh.grid import Grid

GIVEN = "given by the user"

LINEAR_AXES: dict[str, tuple[Axis | None, Axis | None]] = {
    "colwise": ("y", "x"),
    "packed_colwise": ("y", "x"),
    "colwise_gather_output": ("y", "x"),
    "rowwise": ("x", "y"),
    "rowwise_split_input": ("x", "y"),
    "latent": ("y", None),
    "mla_kv_a_proj": ("y", None),
    "colwise_from_latent": (None, "x"),
}
# Roles of linears that stay the model's own, and see a part of their weight: small ones inside of attention.
OF_KEPT_LINEARS = ("heads", "rowwise_replicated", "replicated")
# Roles by kind of module.
OF_EMBEDDINGS = ("embedding_rowwise", "embedding_colwise")
OF_NORMS = ("norm", "norm_x", "replicated", "replicated_with_grad_allreduce", "heads")
OF_PARAMETERS = ("heads", "features", "channels", "replicated", "replicated_with_grad_allreduce")
OF_EXPERTS = ("moe_tp_experts",)
BESIDE_EXPERTS = ("router", "gate")
WORDS = {
    *LINEAR_AXES,
    *OF_KEPT_LINEARS,
    *OF_EMBEDDINGS,
    *OF_NORMS,
    *OF_PARAMETERS,
    *OF_EXPERTS,
    *BESIDE_EXPERTS,
}
# Styles of plans on modules inside experts and around parameters, which need no role of their own.
_WITHOUT_ROLE = {"moe_identity_expert", "local_params"}


def matches(pattern: str, name: str) -> bool:
    """Does a pattern match this module? `*` stands for one part, a leading `*.` for any number of parts."""
    parts = ["[^.]+" if part == "*" else re.escape(part) for part in pattern.split(".")]
    if parts[0] == "[^.]+":
        parts[0] = ".+"
    return re.fullmatch(r"\.".join(parts), name) is not None


def family_of(model: nn.Module) -> Family:
    config = getattr(model, "config", None)
    kinds = [getattr(config, "model_type", None)]
    if config is not None and hasattr(config, "get_text_config"):
        kinds.append(getattr(config.get_text_config(), "model_type", None))
    for kind in kinds:
        if kind in FAMILIES:
            return FAMILIES[kind]
    return Family()


class RoleWords:
    """Of one model."""

    def __init__(self, model: nn.Module, grid: Grid, given: Mapping[str, str]) -> None:
        self.model, self.grid, self.given = model, grid, given
        self.family = family_of(model)
        self.plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
        self.anatomy = Anatomy(model)

    def word(self, name: str) -> tuple[str | None, str]:
        """The role that a name has been given, and by whom."""
        last = name.rsplit(".", 1)[-1]
        for roles, why in (
            (self.given, GIVEN),
            (self.family.roles, "the table of families"),
            (self.plan, "the model's own plan"),
        ):
            for pattern, word in roles.items():
                if matches(pattern, name):
                    return LATENT_ATTENTION.get(last, word) if roles is self.plan else word, why
        parent = self.anatomy.modules.get(name.rsplit(".", 1)[0]) if "." in name else None
        if parent is not None and hasattr(parent, "kv_a_proj_with_mqa"):
            return LATENT_ATTENTION.get(last), ""
        return None, ""

    def is_experts(self, name: str, module: nn.Module) -> bool:
        return is_experts(module) or self.word(name)[0] in OF_EXPERTS

    def is_norm(self, name: str, module: nn.Module) -> bool:
        if is_norm(module):
            return True
        given = next((word for pattern, word in self.given.items() if matches(pattern, name)), None)
        return given in ("norm", "norm_x") and set(module._parameters) <= {"weight", "bias"}

    def _holders(self, beside: Collection[str]) -> set[str]:
        """What can have a role: modules with parameters, norms, and bare parameters."""
        names = set()
        for name, module in self.anatomy.modules.items():
            if isinstance(module, nn.Embedding) or is_linear(module) or self.is_norm(name, module):
                names.add(name)
            elif module._parameters or self.is_experts(name, module) or name in beside:
                names |= {name, *(f"{name}.{key}" if name else key for key in module._parameters)}
        return names

    def check_fit(self, name: str, module: object, word: str | None, fitting: tuple[str, ...]) -> None:
        """A role given by the user that does not exist for this kind of module is a mistake, not an unsupported model."""
        if word is not None and word not in fitting and any(matches(p, name) for p in self.given):
            raise ValueError(
                f"role {word!r} was given for {name}, but does not fit the type {type(module).__name__}; use one of "
                f"{', '.join(fitting)}"
            )

    def check_words(self, beside: Collection[str]) -> None:
        """Is each role that the user gave one for a module that there is? ``beside``: routers and gates."""
        holders = self._holders(beside)
        for pattern, word in self.given.items():
            if word not in WORDS:
                near = difflib.get_close_matches(word, sorted(WORDS), n=1)
                hint = f"did you mean {near[0]!r}" if near else f"use one of {', '.join(sorted(WORDS))}"
                raise ValueError(f"role {word!r} of {pattern!r} is not known; {hint}")
            if word in ("norm", "norm_x"):
                self._check_norms(pattern, word)
            if not any(matches(pattern, name) for name in holders):
                near = difflib.get_close_matches(pattern, sorted(holders), n=1, cutoff=0.3)
                hint = (
                    f"did you mean {near[0]!r}" if near else "dict(model.named_modules()) shows what there is"
                )
                everything = (*self.anatomy.modules, *(n for n, _ in self.model.named_parameters()))
                there = next((name for name in everything if matches(pattern, name)), None)
                raise ValueError(
                    f"a role was given for {pattern!r}, but none of the {len(self.anatomy.modules)} modules of "
                    f"{type(self.model).__name__} has that name; {hint}"
                    if there is None
                    else f"a role was given for {pattern!r}, but {there} cannot have one: roles are for modules that hold "
                    f"parameters; {hint}"
                )

    def _check_norms(self, pattern: str, word: str) -> None:
        for name, module in self.anatomy.modules.items():
            others = set(module._parameters) - {"weight", "bias"}
            if others and matches(pattern, name):
                raise ValueError(
                    f"role {word!r} was given for {name}, which has a parameter {min(others)!r}; those of a norm are 'weight' and "
                    "'bias': rename it"
                )

    def check_styles(self) -> None:
        """Report an unsupported style of the model's own plan before any other problem."""
        for pattern, word in self.plan.items():
            if word not in WORDS | _WITHOUT_ROLE and not any(matches(p, pattern) for p in self.given):
                name = next((n for n in self.anatomy.modules if matches(pattern, n)), None)
                if name is not None:
                    raise self.missing_style(name, word)

    def no_role(self, name: str, module: nn.Module, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"{name} ({type(module).__name__}) is {what} for which {type(self.model).__name__} has no role, so how it acts "
            f"on features sharded over y={self.grid.y} and x={self.grid.x} is not known; pass roles={{{name!r}: ...}} if you "
            "know, or use x=1 and y=1"
        )

    def missing_style(self, name: str, word: str) -> UnsupportedError:
        return UnsupportedError(
            f"{name}: plan style {word!r} is not supported on y={self.grid.y}, x={self.grid.x}; use x=1 and y=1 "
            "(z and data alone need no roles)"
        )
