"""The model of a run, parallel on its grid: from a configuration with random init, or from safetensors."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fourfold import untrusted_input
from fourfold.config.schema import EngineSection, ExpertsSection, LoraSection, ModelSection
from fourfold.hf.packed_attention import use_packed_attention
from fourfold.mesh.grid import Grid
from fourfold.parallel.experts.choice import Experts
from fourfold.parallel.lora import ALL_LINEAR, Lora
from fourfold.parallel.parallelize import parallelize
from fourfold.parallel.report import Report
from fourfold.planner.inputs.layout import undivided_axis
from fourfold.weights.overlap import Overlap

logger = logging.getLogger(__name__)


def build_model(
    model: ModelSection,
    engine: EngineSection,
    grid: Grid,
    seed: int,
    length: int,
    lora: LoraSection | None = None,
    experts: ExpertsSection | None = None,
) -> tuple[nn.Module, Report]:
    """Build on the meta device; each rank initialises or reads only its own shards.

    ``length``: the tokens of a sequence that a rank has. If tensor ranks do not divide it, activations cannot be sharded by tokens.
    """
    activations = engine.activations
    undivided = undivided_axis(length, grid.y, grid.x)
    if activations == "auto" and undivided is not None:
        logger.warning(
            "%s=%d does not divide the %d tokens of a sequence that a rank has: activations are replicated",
            *undivided,
            length,
        )
        activations = "replicated"
    with torch.device("meta"):
        # Master weights are fp32, also if config.json says that the weights are stored in a smaller dtype.
        module: nn.Module = AutoModelForCausalLM.from_config(model_config(model), dtype=torch.float32)
    # Routers in compiled blocks cannot be read.
    compile = False if experts is not None and experts.reads_routers else engine.compile
    attention = None
    if grid.sequence_ranks == 1:  # otherwise `parallelize` sets it
        attention = use_packed_attention(
            module, engine.attention, grid.target, engine.precision, is_compiled=bool(compile)
        )
    report = parallelize(
        module,
        grid,
        precision=engine.precision,
        activations=activations,
        activation_checkpointing=engine.activation_checkpointing,  # type: ignore[arg-type]  # not "auto" any more
        checkpointed_blocks=engine.checkpointed_blocks,
        accumulation=engine.accumulation,  # type: ignore[arg-type]
        weights=engine.weights,
        compile=compile,
        activation_offloading=engine.activation_offloading,
        float8=engine.float8,
        lora=adapters_of(lora) if lora is not None else None,
        experts=axes_of(engine.experts),
        overlap=Overlap(keep_bytes=engine.keep_weights_bytes, keep_inputs=engine.keep_inputs),
        checkpoint=_local_folder(model.pretrained) if model.pretrained is not None else None,
        seed=seed,
    )
    return module, report if attention is None else report.with_note(attention)


def axes_of(experts: Literal["auto", "cut"] | list[Literal["z", "x"]]) -> Experts:
    """The experts of a run config, as `parallelize` takes them."""
    return tuple(experts) if isinstance(experts, list) else experts


def adapters_of(lora: LoraSection) -> Lora | None:
    """The adapters of a run config, as `parallelize` takes them."""
    if not lora.rank:
        return None
    return Lora(
        lora.rank,
        lora.alpha,
        lora.targets or ALL_LINEAR,
        dropout=lora.dropout,
        quantization=lora.quantization,
        adapter=lora.adapter,
    )


def model_config(model: ModelSection) -> Any:
    """The Hugging Face configuration in a file, in a folder or of a hub id."""
    where = model.config or model.pretrained
    assert where is not None
    try:
        return untrusted_input.load_model_config(untrusted_input.find_model_config(where))
    except ValueError as error:
        raise ValueError(f"model.{'config' if model.config else 'pretrained'}: {error}") from None


def _local_folder(name: Path) -> Path:
    """The folder of pretrained weights; a hub id is downloaded by huggingface_hub, or taken from its cache."""
    if name.exists():
        return name
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"]))
