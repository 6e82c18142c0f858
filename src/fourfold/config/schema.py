"""The schema of a run config: one TOML file, with a description of every field.

The JSON schema, the reference page of the docs and the comments of a starting file are made from the docstrings.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from fourfold.mesh.axes import AXES, divisors
from fourfold.optim.kinds import Optimizer, check_beta2
from fourfold.planner.inputs.layout import undivided_axis

Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A section of the file; unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def none_is_a_word(cls, given: Any) -> Any:
        """TOML has no null: in a field that can be empty, "none" means it."""
        if not isinstance(given, dict):
            return given
        empty = {
            name: None
            for name, about in cls.model_fields.items()
            if given.get(name) == "none" and type(None) in get_args(about.annotation)
        }
        return {**given, **empty}


class ModelSection(Section):
    """The model: an unmodified Hugging Face architecture."""

    config: Path | None = None
    """A config.json, its folder, or a hub id: start from random init."""
    pretrained: Path | None = None
    """A folder with config.json and safetensors, or a hub id: start from these weights."""

    @model_validator(mode="after")
    def exactly_one_is_given(self) -> ModelSection:
        if (self.config is None) == (self.pretrained is None):
            raise ValueError(
                "give either config (random init) or pretrained (weights to start from), not both"
            )
        return self


class Source(Section):
    """A data set prepared by `fourfold data prepare`."""

    path: Path
    """The folder of the prepared data set."""
    weight: PositiveFloat = 1.0
    """The fraction of samples from this source, relative to the weights of the others."""


class DataSection(Section):
    """The training text, as prepared data sets."""

    sources: tuple[Source, ...] = Field(min_length=1)
    """Data sets, each with its weight."""
    sequence_length: PositiveInt = 1024
    """Tokens per sample."""
    prefetch_batches: Annotated[int, Field(ge=0)] = 2
    """Batches that a background thread prefetches."""


class GridSection(Section):
    """The sizes of the four grid axes, whose product is the number of ranks.

    If no size is set, a layout is chosen when the run starts, for the ranks that it has: the planner's fastest one if
    `cluster` is set, all ranks on z otherwise.
    """

    cluster: str | None = None
    """The cluster that the planner chooses for: a preset's name, or the TOML file that `fourfold calibrate` wrote."""
    data: PositiveInt = 1
    """Data parallel (DP): ranks that split the batch and hold the same weights."""
    z: PositiveInt = 1
    """FSDP: ranks that split the batch and the storage of every weight."""
    y: PositiveInt = 1
    """The second tensor parallel axis (TP2): ranks that split the hidden features."""
    x: PositiveInt = 1
    """Tensor parallel (TP): ranks that split heads and inner features."""

    @model_validator(mode="before")
    @classmethod
    def auto_sets_no_size(cls, given: Any) -> Any:
        return {} if given == "auto" else given

    @property
    def auto(self) -> bool:
        """Is the layout chosen when the run starts?"""
        return not self.model_fields_set & set(AXES)

    @property
    def size(self) -> int:
        return self.data * self.z * self.y * self.x


class OptimizerSection(Section):
    """The optimizer and what happens to gradients before it."""

    name: Optimizer = "adamw"
    """AdamW; with its two moments in bf16, which halves their memory; or Muon for the matrices of the blocks with AdamW for the rest."""
    lr: PositiveFloat = 3e-4
    """The learning rate after warm-up; Muon scales it to updates of AdamW's size."""
    momentum: Fraction = 0.95
    """Muon's momentum; AdamW has none."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    eps: PositiveFloat = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay of matrices; norms and biases have none."""
    grad_clip_norm: PositiveFloat | None = 1.0
    """Clip gradients to this norm; none: no clipping."""

    @model_validator(mode="after")
    def moments_move(self) -> OptimizerSection:
        if self.name == "adamw-bf16":
            check_beta2(self.betas[1])
        return self


class ScheduleSection(Section):
    """The number of steps and the learning-rate schedule."""

    steps: PositiveInt = 1000
    """Steps of the run."""
    warmup_steps: Annotated[int, Field(ge=0)] = 100
    """Steps over which the learning rate rises from 0."""
    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    """After warm-up: cosine decay, constant with a linear decay at the end (wsd), or constant."""
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """With wsd: the number of last steps over which the learning rate decays."""
    min_lr_ratio: Fraction = 0.1
    """With cosine and wsd: the final learning rate as a fraction of the highest."""

    @model_validator(mode="after")
    def parts_fit(self) -> ScheduleSection:
        used = self.warmup_steps + (self.decay_steps if self.kind == "wsd" else 0)
        if used > self.steps:
            raise ValueError(
                f"warmup_steps and decay_steps are {used}, more than steps={self.steps}; use fewer"
            )
        if self.kind != "wsd" and self.decay_steps:
            raise ValueError(
                f"decay_steps={self.decay_steps} is for kind='wsd', and this is kind={self.kind!r}; set it to 0"
            )
        if self.kind == "wsd" and not self.decay_steps:
            raise ValueError(
                "wsd decays over decay_steps, which is 0; use a fifth of steps, or kind='constant'"
            )
        return self


class BatchSection(Section):
    """The global batch, independent of the grid."""

    tokens: PositiveInt = 524_288
    """Tokens per step, over all ranks; a multiple of sequence_length."""
    micro_batch_sequences: PositiveInt | None = None
    """Sequences per micro-batch of a rank; none: all at once, or at most 8192 tokens where no grid and no cluster is set."""
    sequence_ranks: PositiveInt | Literal["auto"] = 1
    """Neighbours along z that share sequences, each with a part of the tokens (context parallelism); auto: as few as let the batch divide over the ranks."""


# Engine fields that are chosen with the grid unless the run config sets them, in addition to those with an "auto".
CHOSEN_ALONG = frozenset({"keep_inputs", "keep_weights_bytes"})


# Engine fields that are chosen by the memory of a device, if they are "auto".
BY_MEMORY = ("activation_checkpointing", "checkpointed_blocks", "accumulation")


class EngineSection(Section):
    """How a step is computed; results equal those of one process for every setting (with float8, of one process with float8)."""

    precision: Literal["fp32", "bf16"] = "bf16"
    """Precision of matmuls and activations; master weights are fp32."""
    activations: Literal["auto", "replicated", "sequence-parallel"] = "auto"
    """Activations that x and y ranks would duplicate: replicated, or sharded by tokens where the model allows it."""
    keep_inputs: bool = True
    """With sequence-parallel activations: keep gathered inputs for backward instead of re-gathering them."""
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Recompute every block in backward (full), all of it but linears and attention (selective), or nothing (none); auto: as little as fits into the memory of a device."""
    checkpointed_blocks: Annotated[int, Field(ge=0)] | None = None
    """Blocks, from the first, that activation_checkpointing is for; the others have the next weaker kind; all unless set."""
    activation_offloading: bool = False
    """Keep the inputs of recomputed blocks in pinned host memory from forward to backward; for GPUs, and without effect on CPUs."""
    attention: Literal["auto", "varlen", "flex", "masked"] = "auto"
    """Attention of packed documents: by their bounds (varlen), by FlexAttention (flex, on GPUs), or with a mask of length x length (masked); auto: the first that the model's attention allows."""
    weights: Literal["auto", "fsdp2", "streamed"] = "auto"
    """The backend that gathers weights over z; auto: fsdp2 on GPUs, otherwise streamed."""
    keep_weights_bytes: Annotated[int, Field(ge=0)] = 0
    """With streamed weights: bytes of gathered weights kept for backward instead of re-gathering them."""
    accumulation: Literal["auto", "whole", "sharded"] = "auto"
    """Gradients of several micro-batches: added up whole on each z rank and reduced once, or reduced over z in each micro-batch, which needs less memory; auto: whole, unless it does not fit or more would be recomputed."""
    compile: bool | None = None
    """Compile each block as one graph (torch.compile); on GPUs it is done unless set, if tensor ranks draw no dropout, and needs a C compiler and Python's headers; on CPUs it needs a C++ compiler."""
    float8: Literal["none", "rowwise_with_gw_hp"] = "none"
    """Matmuls of the linears in blocks: all in precision (none), or outputs and gradients of inputs in e4m3 with a scale for each row, and gradients of weights in precision (rowwise_with_gw_hp); on GPUs with precision bf16 and compute capability 8.9 or newer."""
    experts: Literal["auto", "cut"] | list[Literal["z", "x"]] = "auto"
    """Experts of each layer: gathered over z where they are used and sharded by features over y and x (cut), or owned by the ranks of z, of x or of both, to which tokens are sent (["z"], ["x"], ["z", "x"]); auto: as the plan chose, or cut without one."""

    @property
    def is_open(self) -> bool:
        """Is something left to the memory of the devices?"""
        return "auto" in (self.activation_checkpointing, self.accumulation)

    def without_auto(self) -> EngineSection:
        """Nothing is recomputed, and gradients are added up whole, where the fields leave it to the memory of a device."""
        chosen = {"activation_checkpointing": "none", "accumulation": "whole"}
        return self.model_copy(update={n: v for n, v in chosen.items() if getattr(self, n) == "auto"})

    @model_validator(mode="after")
    def options_have_an_effect(self) -> EngineSection:
        if self.checkpointed_blocks is not None and self.activation_checkpointing in ("auto", "none"):
            raise ValueError(
                f"checkpointed_blocks={self.checkpointed_blocks} is for activation_checkpointing='selective' or 'full', and this "
                f"is {self.activation_checkpointing!r}; leave it out, or choose one of these"
            )
        if not self.keep_inputs and self.activations == "replicated":
            raise ValueError(
                "keep_inputs=false is for activations='sequence-parallel', and this is activations='replicated'; leave it true"
            )
        return self


class ExpertsSection(Section):
    """How the experts of a mixture are trained evenly. What a model does not have is an error."""

    aux_loss_coef: Annotated[float, Field(ge=0)] | None = None
    """Add this times the auxiliary loss of routers, that of the global batch; none: as output_router_logits and router_aux_loss_coef in config.json say."""
    bias_rate: Annotated[float, Field(ge=0)] = 0.0
    """After each step, raise the correction bias of experts with fewer tokens than the mean by this, and lower that of the others; 0: leave it."""
    load_metrics: bool = False
    """Count the tokens of each expert, for metrics and the report."""

    @property
    def reads_routers(self) -> bool:
        """Is something on that reads the choices of routers inside blocks?"""
        return bool(self.aux_loss_coef) or self.bias_rate > 0 or self.load_metrics


class CheckpointSection(Section):
    """Where and how often checkpoints are saved."""

    folder: str = "checkpoints"
    """A folder that all nodes share, or any fsspec URL such as s3://bucket/run."""
    every_steps: PositiveInt | None = 200
    """Steps between two checkpoints; none: only at the end."""
    max_async_lag_steps: PositiveInt | None = Field(
        None,
        description="Training waits when a checkpoint is still being written after this many steps: with 1, a failure never costs "
        "more than every_steps; none: it does not wait.",
    )
    keep_last: PositiveInt = 3
    """The number of newest checkpoints to keep."""
    resume: bool = True
    """Resume from the newest valid checkpoint, if there is one."""


class EvaluationSection(Section):
    """The loss on held-out text."""

    every_steps: PositiveInt | None = 200
    """Steps between two evaluations; none: only at the end."""
    sequences: NonNegativeInt = 64
    """Samples of the validation split, over all ranks; 0: no evaluation."""


class LoggingSection(Section):
    """Console output, metrics files and trackers."""

    folder: Path = Path("logs")
    """The folder of metrics.jsonl, TensorBoard's files and the report."""
    every_steps: PositiveInt = 10
    """Steps between two log lines; on GPUs each synchronizes with the device."""
    tensorboard: bool = True
    """Write TensorBoard's files."""
    wandb_project: str | None = None
    """Log to this Weights & Biases project; needs the extra wandb."""
    mlflow_uri: str | None = None
    """Log to MLflow at this tracking URI; needs the extra mlflow."""
    prometheus_port: PositiveInt | None = None
    """Serve the latest metrics to Prometheus on this port of rank 0; needs the extra prometheus."""
    prometheus_address: str = "127.0.0.1"
    """The address that serves them; by default only this machine can read them."""
    profile_steps: str | None = None
    """Steps to trace, for ui.perfetto.dev: the first and the last, as in 10:12."""

    @field_validator("profile_steps")
    @classmethod
    def is_a_step_range(cls, given: str | None) -> str | None:
        if given is not None:
            steps_of(given)
        return given


class ReliabilitySection(Section):
    """Timeouts, checks of running ranks, and recovery."""

    timeout_s: PositiveFloat = 120.0
    """How long ranks wait for each other in a collective; then they exit and name the missing rank."""
    first_step_timeout_s: PositiveFloat = 600.0
    """The same for the first step, which sets up connections and kernels."""
    skip_bad_steps: bool = True
    """Skip the update of a step whose loss or gradient is NaN, Inf or far above the usual."""
    spike_sigmas: PositiveFloat | None = 6.0
    """How many standard deviations above the usual are far; none: only NaN and Inf are bad."""
    roll_back_after: PositiveInt = 5
    """After this many consecutive bad steps, roll back to a checkpoint from before them."""
    check_every_steps: PositiveInt = Field(
        10,
        description="Steps between two comparisons of the replicas' weights; the step times of ranks are compared twice as often. "
        "On GPUs each comparison synchronizes with the device.",
    )
    straggler_factor: Annotated[float, Field(gt=1)] = 1.1
    """Report a rank whose steps take this many times as long as the others', over three comparisons."""
    torchft_lighthouse: str | None = Field(
        None,
        description="The address of a torchft lighthouse, such as http://head:29510: every replica of the data axis is a "
        "separate job, and the others continue when one is lost; needs the extra torchft.",
    )
    replica: Annotated[int, Field(ge=0)] = 0
    """With a lighthouse: the index of this job's replica, from 0."""

    @field_validator("torchft_lighthouse")
    @classmethod
    def has_a_port(cls, given: str | None) -> str | None:
        if given is not None and not re.fullmatch(r"https?://.+:\d+/?", given):
            raise ValueError("this is not an address with a port; use one such as http://head:29510")
        return given


class LoraSection(Section):
    """Adapters of low rank (LoRA), which are trained instead of the weights."""

    rank: Annotated[int, Field(ge=0)] = 0
    """The rank of the adapters; 0: all weights are trained, without adapters."""
    alpha: PositiveFloat = 32.0
    """What an adapter adds is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """The ends of the names of the linears that have an adapter, such as q_proj; empty: all but the head."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of the numbers that an adapter reads as 0 in training."""
    quantization: Literal["none", "nf4"] = "none"
    """How the frozen weights of linears in blocks are stored: nf4 takes 4.5 bits for each number (QLoRA)."""
    adapter: Path | None = None
    """A folder that PEFT wrote: start from these adapters, whose rank and targets have to be the same."""


class RunConfig(Section):
    """A training run."""

    seed: Annotated[int, Field(ge=0)] = 0
    """The seed of initial weights, dropout and the order of samples."""
    model: ModelSection
    data: DataSection
    grid: GridSection = GridSection()
    batch: BatchSection = BatchSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    engine: EngineSection = EngineSection()
    lora: LoraSection = LoraSection()
    experts: ExpertsSection = ExpertsSection()
    checkpoints: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    logging: LoggingSection = LoggingSection()
    reliability: ReliabilitySection = ReliabilitySection()

    @model_validator(mode="after")
    def batch_has_whole_sequences(self) -> RunConfig:
        tokens, length = self.batch.tokens, self.data.sequence_length
        if tokens % length:
            near = max(1, round(tokens / length)) * length
            raise ValueError(
                f"batch.tokens={tokens} is not a multiple of data.sequence_length={length}; use {near}"
            )
        return self

    @model_validator(mode="after")
    def adapters_fit(self) -> RunConfig:
        if not self.lora.rank:
            for name in ("quantization", "dropout"):
                if name in self.lora.model_fields_set and getattr(self.lora, name) not in ("none", 0.0):
                    raise ValueError(
                        f"lora.{name}={getattr(self.lora, name)!r} has no effect without adapters; set lora.rank"
                    )
            return self
        if self.model.pretrained is None:
            raise ValueError(
                f"lora.rank={self.lora.rank} trains adapters of pretrained weights; set model.pretrained"
            )
        if self.engine.float8 != "none":
            raise ValueError(
                f"lora.rank={self.lora.rank} with engine.float8={self.engine.float8!r} is not supported; use one of the two"
            )
        if self.optimizer.name == "muon":
            raise ValueError(
                f"lora.rank={self.lora.rank} with optimizer.name='muon' is not supported: Muon is for whole matrices; use adamw"
            )
        for name, given in (
            ("quantization", self.lora.quantization != "none"),
            ("dropout", self.lora.dropout),
        ):
            if given and self.engine.compile:
                raise ValueError(
                    f"lora.{name}={getattr(self.lora, name)!r} with engine.compile=true is not supported; use false"
                )
        return self

    @model_validator(mode="after")
    def experts_fit(self) -> RunConfig:
        if not self.experts.reads_routers:
            return self
        on = ", ".join(
            f"experts.{name}" for name in sorted(self.experts.model_fields_set) if getattr(self.experts, name)
        )
        if self.engine.compile:
            raise ValueError(
                f"{on} with engine.compile=true is not supported: routers in compiled blocks cannot be read; set engine.compile to false"
            )
        if self.reliability.torchft_lighthouse is not None:
            raise ValueError(
                f"{on} with reliability.torchft_lighthouse is not supported: replicas are separate jobs, whose tokens would be counted "
                "apart; leave one of the two out"
            )
        if self.experts.bias_rate and self.lora.rank:
            raise ValueError(
                f"experts.bias_rate={self.experts.bias_rate:g} with lora.rank={self.lora.rank} is not supported: the bias is a part of the "
                "model, of which adapters alone are saved; set bias_rate to 0"
            )
        return self

    @model_validator(mode="after")
    def replicas_fit(self) -> RunConfig:
        if self.reliability.torchft_lighthouse is None:
            return self
        data, z, replica = self.grid.data, self.grid.z, self.reliability.replica
        if self.grid.auto:
            raise ValueError(
                "reliability.torchft_lighthouse makes each replica a separate job, and a grid that is chosen is one job; set grid.data, grid.z, grid.y or grid.x"
            )
        if replica >= data:
            raise ValueError(
                f"reliability.replica={replica} is not one of the grid's data={data} replicas, which are counted from 0; use "
                f"at most {data - 1}, or a larger grid.data"
            )
        if not self.checkpoints.resume:
            raise ValueError(
                "reliability.torchft_lighthouse is for replicas that restart, and checkpoints.resume=false starts from step 0; "
                "leave it true"
            )
        if self.sequences < data * z:
            raise ValueError(
                f"batch.tokens={self.batch.tokens} are {self.sequences} sequences, too few for data*z = {data * z} ranks; use "
                f"{data * z * self.data.sequence_length}"
            )
        return self

    @model_validator(mode="after")
    def sequences_can_be_shared(self) -> RunConfig:
        share = self.batch.sequence_ranks
        if share == 1:
            return self
        named = f"batch.sequence_ranks={share!r}"
        for is_given, what, way_out in (
            (
                self.grid.auto and self.grid.cluster is None,
                "a grid that is chosen without a cluster",
                "set grid.cluster, grid.data, grid.z, grid.y or grid.x",
            ),
            (
                self.reliability.torchft_lighthouse is not None,
                "reliability.torchft_lighthouse",
                "leave one of the two out",
            ),
            (
                self.experts.reads_routers,
                "[experts], which was not tested with it,",
                "leave the auxiliary loss, the bias and load_metrics out",
            ),
            (self.engine.attention != "auto", f"engine.attention={self.engine.attention!r}", "use 'auto'"),
        ):
            if is_given:
                raise ValueError(f"{named} with {what} is not supported; {way_out}")
        if share != "auto" and not self.grid.auto and self.grid.z % share:
            fit = ", ".join(map(str, divisors(self.grid.z)))
            raise ValueError(f"{named} does not divide grid.z={self.grid.z}; use one of {fit}")
        length, chunks = self.data.sequence_length, 2 * self.sequence_ranks
        if length % chunks:
            raise ValueError(
                f"{named} cuts sequences into {chunks} chunks, which do not divide data.sequence_length={length}; use "
                f"{max(1, length // chunks) * chunks}"
            )
        return self

    @model_validator(mode="after")
    def batches_divide_over_ranks(self) -> RunConfig:
        ranks = math.prod(self.shape[:2]) // self.sequence_ranks
        if self.grid.auto or not self.sequences % ranks:
            return self
        words = "data*z" if self.reliability.torchft_lighthouse is None else "z"
        words += "/sequence_ranks" if self.sequence_ranks > 1 else ""
        near = max(1, round(self.sequences / ranks)) * ranks * self.data.sequence_length
        raise ValueError(
            f"batch.tokens={self.batch.tokens} are {self.sequences} sequences, which do not divide over {words} = {ranks} "
            f"ranks; use {near}"
        )

    @model_validator(mode="after")
    def sequences_can_be_sharded(self) -> RunConfig:
        length = self.own_length
        undivided = undivided_axis(length, self.grid.y, self.grid.x)
        if self.engine.activations != "sequence-parallel" or self.grid.auto or undivided is None:
            return self
        axis, ranks = undivided
        raise ValueError(
            f"engine.activations='sequence-parallel' shards sequences over the tensor axes, and grid.{axis}={ranks} does not divide "
            f"{self._own_length_words}; use {max(1, length // ranks) * ranks * self.sequence_ranks}, or 'auto'"
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The grid of this job; with a lighthouse it has one replica of the data axis."""
        grid = self.grid
        return (grid.data if self.reliability.torchft_lighthouse is None else 1, grid.z, grid.y, grid.x)

    @property
    def sequences(self) -> int:
        """Sequences of the global batch."""
        return self.batch.tokens // self.data.sequence_length

    @property
    def sequence_ranks(self) -> int:
        """Neighbours along z that share sequences."""
        share = self.batch.sequence_ranks
        if share != "auto":
            return share
        ranks, length = math.prod(self.shape[:2]), self.data.sequence_length
        fit = (
            c
            for c in divisors(self.grid.z)
            if not self.sequences % (ranks // c) and not (c > 1 and length % (2 * c))
        )
        return next(fit, 1)

    @property
    def own_length(self) -> int:
        """The tokens of a sequence that a rank has."""
        return self.data.sequence_length // self.sequence_ranks

    @property
    def _own_length_words(self) -> str:
        length, share = f"data.sequence_length={self.data.sequence_length}", self.sequence_ranks
        return (
            length if share == 1 else f"the {self.own_length} tokens of a rank of {length} over {share} ranks"
        )


def steps_of(text: str) -> tuple[int, int]:
    """The first and the last step of a range.

    Example:
        >>> steps_of("10:12"), steps_of("10")
        ((10, 12), (10, 10))
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            "this is not a range of steps; give the first and the last, such as 10:12, or one, such as 10"
        )
    return first, last
