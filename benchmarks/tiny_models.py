"""A tiny random model of every family: the same code as the large one, built in a second, on a CPU.

`python -m benchmarks.tiny_models [name ...]` builds each, runs it forward and backward, and prints a table.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import time
from dataclasses import dataclass

import torch
import transformers.models
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.tiny_configs import (
    CHOSEN,
    EXPERTS,
    EXTRA_FAMILIES,
    FIRST_ORDINARY_TOKEN,
    OVERRIDES,
    set_experts,
    tiny_config,
)

# In order of preference, among the classes a family's modelling file defines.
HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForBlockDiffusion")

# Where no such class exists, or the first is not the text model.
MODEL_CLASSES = {
    "embedding_gemma2": "EmbeddingGemma2TextModel",
    "muse_glimmer_assistant": "MuseGlimmerAssistantModel",
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
MODEL_ARGUMENTS = {"higgs_audio_v2": {"use_text_head": True}}


class UnsupportedFamily(ValueError):
    """No model of the family maps token ids to a loss."""


@dataclass(frozen=True)
class Family:
    """One row: a folder of `transformers.models`, or `folder:variant`."""

    name: str
    config_class: str  # the config that carries the plan; of several, the text decoder's
    plan_styles: tuple[str, ...]  # the styles of its `base_model_tp_plan`, sorted; none without a plan

    @property
    def folder(self) -> str:
        return self.name.partition(":")[0]


@functools.cache
def families() -> list[Family]:
    """Every family whose config has a `base_model_tp_plan`, then the plain decoders that have none, and variants."""
    folders = [package.name for package in pkgutil.iter_modules(transformers.models.__path__)]
    planned = [_row(folder) for folder in folders if folder not in EXTRA_FAMILIES]
    return [row for row in planned if row is not None] + [find_family(name) for name in EXTRA_FAMILIES]


@functools.cache
def find_family(name: str) -> Family:
    """One of `families`; of the others not even the config is imported, which takes half a minute for all."""
    row = _row(name)
    if row is None:
        raise ValueError(
            f"{name!r} is not a family with a tensor-parallel plan, nor one of EXTRA_FAMILIES (benchmarks/tiny_configs.py); add it there"
        )
    return row


def tiny_model(
    family: Family, *, seed: int = 0, experts: int = EXPERTS, chosen: int = CHOSEN
) -> PreTrainedModel:
    """A model of `family` with seeded random weights: fp32, on the CPU, in train mode, all dropouts zero."""
    model_class, config_class = _model_and_config_class(family)
    config = tiny_config(config_class, OVERRIDES.get(family.name, {}))
    set_experts(config, experts, chosen)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class._from_config(config, dtype=torch.float32, **MODEL_ARGUMENTS.get(family.name, {}))
    _disturb_parameters(model, seed)
    return model.train()


def tiny_batch(
    model: PreTrainedModel, batch_size: int = 4, seq: int = 16, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Keyword arguments of `model`: ordinary token ids, labels, and what else its forward needs.

    A model without a loss of its own (`diffusion_gemma`, `embedding_gemma2`, `muse_glimmer_assistant`) gets no labels.
    """
    generator = torch.Generator().manual_seed(seed)

    def random_ids() -> torch.Tensor:
        vocab = model.config.get_text_config().vocab_size
        return torch.randint(FIRST_ORDINARY_TOKEN, vocab, (batch_size, seq), generator=generator)

    def random_features(length: int, features: int) -> torch.Tensor:
        return torch.randn(batch_size, length, features, generator=generator)

    config = model.config
    match config.model_type:
        case "muse_glimmer_assistant":  # drafts a block from embeddings and hidden states of another model
            context = random_features(seq, config.hidden_size * len(config.target_layer_ids))
            return {
                "noise_embeds": random_features(seq, config.hidden_size),
                "context_hidden_states": context,
            }
        case "embedding_gemma2_text":
            return {"input_ids": random_ids()}
        case "diffusion_gemma":
            return {"input_ids": random_ids(), "decoder_input_ids": random_ids()}
        case "voxtral_realtime":
            audio = random_features(seq * config.downsample_factor, config.audio_config.hidden_size)
            return {"input_ids": random_ids(), "labels": random_ids(), "encoder_inputs_embeds": audio}
    return {"input_ids": random_ids(), "labels": random_ids()}


def tiny_loss(model: PreTrainedModel, batch: dict[str, torch.Tensor], seed: int = 0) -> torch.Tensor:
    """The model's own loss; of a model without one, a fixed random projection of its logits or hidden states."""
    output = model(**batch)
    if "labels" in batch:
        return output.loss
    features = output.logits if "logits" in output else output.last_hidden_state
    generator = torch.Generator().manual_seed(seed)
    return (features * torch.randn(features.shape, generator=generator)).mean()


def _model_and_config_class(family: Family) -> tuple[type[PreTrainedModel], type[PreTrainedConfig]]:
    modeling = importlib.import_module(f"transformers.models.{family.folder}.modeling_{family.folder}")
    config_class = next(c for c in _config_classes(family.folder) if c.__name__ == family.config_class)
    if family.name in MODEL_CLASSES:
        model_class = getattr(modeling, MODEL_CLASSES[family.name])
        return model_class, model_class.config_class
    causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config_class.model_type)
    if causal_lm:
        return getattr(modeling, causal_lm), config_class
    for head in HEADS:
        for name, model_class in vars(modeling).items():
            if name.endswith(head) and model_class.__module__ == modeling.__name__:
                return model_class, model_class.config_class
    raise UnsupportedFamily(
        f"{family.name}: {modeling.__name__} has no class ending in one of {', '.join(HEADS)}"
    )


def _row(name: str) -> Family | None:
    classes = _config_classes(name.partition(":")[0])
    if name in EXTRA_FAMILIES:
        config_class = next(c for c in classes if c.__name__ == EXTRA_FAMILIES[name])
    else:
        planned = [c for c in classes if c.base_model_tp_plan and ":" not in name]
        if not planned:
            return None
        config_class = min(planned, key=_distance_from_text_decoder)
    styles = (config_class.base_model_tp_plan or {}).values()
    return Family(name, config_class.__name__, tuple(sorted(set(styles))))


def _config_classes(folder: str) -> list[type[PreTrainedConfig]]:
    """The config classes the folder defines."""
    try:
        module = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    except ModuleNotFoundError:
        return []
    return [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, PreTrainedConfig) and c.__module__ == module.__name__
    ]


def _distance_from_text_decoder(config_class: type[PreTrainedConfig]) -> tuple[bool, bool, bool, str]:
    """Sorts a folder's configs: those of a causal LM first, then those called text, then the shortest name."""
    name = config_class.__name__
    is_composite = bool(config_class.sub_configs)
    has_causal_lm = config_class.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return is_composite, not has_causal_lm, not name.endswith("TextConfig"), name


def _disturb_parameters(model: PreTrainedModel, seed: int) -> None:
    """Adds a little noise everywhere: a gate or scale that starts at zero would hide what is behind it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)


def _check(family: Family) -> str:
    model = tiny_model(family)
    loss = tiny_loss(model, tiny_batch(model))
    if not torch.isfinite(loss):
        raise ValueError(f"loss is {loss}")
    loss.backward()
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    idle = [n for n, p in parameters.items() if p.grad is None or not p.grad.any()]
    row = (
        f"{type(model).__name__}: loss {loss:.4f}, {len(parameters) - len(idle)}/{len(parameters)} gradients"
    )
    return row + (f", none for {' '.join(idle[:4])}" if idle else "")


def main(names: list[str]) -> None:
    outcomes: dict[str, int] = {"ok": 0, "unsupported": 0, "error": 0}
    start_s = time.perf_counter()
    for member in families():
        if names and member.name not in names:
            continue
        family_start_s = time.perf_counter()
        try:
            outcome, row = "ok", _check(member)
        except UnsupportedFamily as error:
            outcome, row = "unsupported", str(error)
        except Exception as error:  # a row of the table, not the end of it
            outcome, row = "error", f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        outcomes[outcome] += 1
        print(
            f"{member.name:24} {outcome:11} {time.perf_counter() - family_start_s:5.1f} s  {row}", flush=True
        )
    print(
        ", ".join(f"{n} {outcome}" for outcome, n in outcomes.items()),
        f"in {time.perf_counter() - start_s:.0f} s",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
