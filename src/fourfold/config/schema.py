"""What a run is: one TOML file, every field with a sentence on what it does.

The sentences are the documentation: the schema, the page of the docs and the comments of a starting file are made of them.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from fourfold.planner.inputs.layout import undivided_axis

Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the file; a word that it does not know is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    """The model: an architecture of Hugging Face, unmodified."""

    config: Path | None = Field(
        None, description="A config.json, or the folder of one: start from drawn weights."
    )
    pretrained: Path | None = Field(
        None, description="A folder with config.json and safetensors, or a hub id: start from these weights."
    )

    @model_validator(mode="after")
    def one_of_both(self) -> ModelSection:
        if (self.config is None) == (self.pretrained is None):
            raise ValueError(
                "give either config (drawn weights) or pretrained (weights to start from), not both"
            )
        return self


class Source(Section):
    """A data set that `fourfold data prepare` made."""

    path: Path = Field(description="The folder of the prepared data set.")
    weight: PositiveFloat = Field(
        1.0, description="How much of the samples come from it, against the other sources."
    )


class DataSection(Section):
    """The text, in prepared data sets."""

    sources: tuple[Source, ...] = Field(min_length=1, description="Data sets, each with its weight.")
    sequence_length: PositiveInt = Field(1024, description="Tokens of a sample.")
    read_ahead: Annotated[int, Field(ge=0)] = Field(
        2, description="Batches that a thread reads before they are asked for."
    )


class GridSection(Section):
    """The ranks on four axes. Their product has to be the number of ranks, unless the planner chooses."""

    auto: bool = Field(False, description="Ask the planner for the fastest grid; needs `cluster`.")
    cluster: str | None = Field(
        None, description="A preset's name or the TOML file that `fourfold calibrate` wrote."
    )
    data: PositiveInt = Field(1, description="Ranks that split the batch and hold the same weights.")
    z: PositiveInt = Field(1, description="Ranks that split the batch and the storage of every weight.")
    y: PositiveInt = Field(1, description="Ranks that split the hidden features.")
    x: PositiveInt = Field(1, description="Ranks that split heads and inner features.")

    @property
    def size(self) -> int:
        return self.data * self.z * self.y * self.x

    @model_validator(mode="after")
    def auto_knows_the_cluster(self) -> GridSection:
        if self.auto and self.cluster is None:
            raise ValueError("auto asks the planner, which needs cluster: a preset's name or a TOML file")
        return self


class OptimizerSection(Section):
    """The optimizer and what happens to gradients before it."""

    name: Literal["adamw", "muon"] = Field(
        "adamw", description="AdamW, or Muon for the matrices of the blocks with AdamW for the rest."
    )
    lr: PositiveFloat = Field(
        3e-4, description="The learning rate after warm-up; Muon scales it to updates of AdamW's size."
    )
    momentum: Fraction = Field(0.95, description="Muon's momentum; AdamW has none.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="AdamW's two rates of decay.")
    eps: PositiveFloat = Field(1e-8, description="AdamW's smallest denominator.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.1, description="Of matrices; norms and biases have none."
    )
    max_norm: PositiveFloat | None = Field(
        1.0, description="Gradients are clipped to this norm; none: they are not."
    )


class ScheduleSection(Section):
    """How long, and the learning rate on the way."""

    steps: PositiveInt = Field(1000, description="Steps of the whole run.")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        100, description="Steps over which the rate rises from 0."
    )
    kind: Literal["cosine", "wsd", "constant"] = Field(
        "cosine", description="After warm-up: a cosine to the end, steady with a decay at the end, or steady."
    )
    decay_steps: Annotated[int, Field(ge=0)] = Field(
        0, description="With wsd: the last steps, over which it falls."
    )
    final: Fraction = Field(
        0.1, description="With cosine and wsd: the rate at the end, as a part of the highest."
    )

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
                "wsd falls over decay_steps, which is 0; use a fifth of steps, or kind='constant'"
            )
        return self


class BatchSection(Section):
    """The global batch, whatever the grid."""

    tokens: PositiveInt = Field(
        524_288, description="Tokens of a step, over all ranks; a multiple of sequence_length."
    )
    micro_batch_sequences: PositiveInt | None = Field(
        None, description="Sequences that a rank takes at a time; none: all of its share at once."
    )


# Of the engine, beside what has an "auto": `grid.auto` chooses it along unless the run's file says it.
CHOSEN_ALONG = frozenset({"keep_inputs", "activation_checkpointing", "keep_weights_bytes"})


class EngineSection(Section):
    """How a step is computed; the numbers are those of one process whatever is set."""

    precision: Literal["fp32", "bf16"] = Field(
        "bf16", description="Of matmuls and activations; masters are fp32."
    )
    activations: Literal["auto", "replicated", "token-sharded"] = Field(
        "auto",
        description="What x and y ranks would compute and keep twice: replicated, or cut by tokens where the model allows it.",
    )
    keep_inputs: bool = Field(
        True,
        description="With token-sharded activations: gathered inputs wait for backward instead of coming twice.",
    )
    activation_checkpointing: Literal["none", "full"] = Field(
        "none", description="Recompute activations in backward."
    )
    weights: Literal["auto", "fsdp2", "streamed"] = Field("auto", description="Who gathers weights over z.")
    keep_weights_bytes: Annotated[int, Field(ge=0)] = Field(
        0,
        description="With streamed weights: so many gathered bytes wait for backward instead of coming twice.",
    )
    compile: bool = Field(False, description="Refused if true: with compiled blocks a grid is not exact.")

    @model_validator(mode="after")
    def inputs_are_gathered(self) -> EngineSection:
        if not self.keep_inputs and self.activations == "replicated":
            raise ValueError(
                "keep_inputs=false is for activations='token-sharded', and this is activations='replicated'; leave it true"
            )
        return self

    @model_validator(mode="after")
    def not_compiled(self) -> EngineSection:
        if self.compile:
            raise ValueError(
                "compile=true is refused: with blocks under torch.compile a grid's gradients are not those of one process "
                "(docs/decisions/0016-compile.md); leave it false"
            )
        return self


class CheckpointSection(Section):
    """What is saved, where and how often."""

    folder: str = Field("checkpoints", description="A folder, or any fsspec URL such as s3://bucket/run.")
    every_steps: PositiveInt | None = Field(200, description="Steps between two; none: only at the end.")
    written_within_steps: PositiveInt | None = Field(
        None,
        description="So many steps may be done while one is written, then they wait: with 1, a failure never costs more than "
        "every_steps; none: they do not wait.",
    )
    keep: PositiveInt = Field(3, description="So many of the newest stay.")
    resume: bool = Field(True, description="Go on from the newest valid one, if there is one.")


class EvaluationSection(Section):
    """The loss on text that is not trained on."""

    every_steps: PositiveInt | None = Field(200, description="Steps between two; none: only at the end.")
    sequences: PositiveInt = Field(64, description="Samples of the validation split, over all ranks.")


class LoggingSection(Section):
    """What a person sees, and what is kept of it."""

    folder: Path = Field(Path("logs"), description="For metrics.jsonl, TensorBoard and the report.")
    every_steps: PositiveInt = Field(
        10, description="Steps between two lines; on GPUs each waits for the device."
    )
    tensorboard: bool = Field(True, description="Write TensorBoard's files.")
    wandb_project: str | None = Field(
        None, description="Log to Weights & Biases, under this project; needs the extra wandb."
    )
    mlflow_uri: str | None = Field(
        None, description="Log to MLflow, at this tracking address; needs the extra mlflow."
    )
    prometheus_port: PositiveInt | None = Field(
        None, description="Serve the newest figures to Prometheus on rank 0; needs the extra prometheus."
    )
    prometheus_address: str = Field(
        "127.0.0.1", description="Where that is served; by default to this machine alone."
    )
    profile_steps: str | None = Field(
        None,
        description="Steps to write traces of, for ui.perfetto.dev: the first and the last, as in 10:12.",
    )

    @field_validator("profile_steps")
    @classmethod
    def names_steps(cls, given: str | None) -> str | None:
        if given is not None:
            steps_of(given)
        return given


class ReliabilitySection(Section):
    """What is watched while a run goes on, and when it is given up."""

    timeout_s: PositiveFloat = Field(
        120.0,
        description="Ranks wait so long for each other in a collective; then they end, and say for whom.",
    )
    first_step_timeout_s: PositiveFloat = Field(
        600.0, description="The same for the first step, in which connections and kernels are made."
    )
    skip_bad_steps: bool = Field(
        True,
        description="A step whose loss or gradient is no number, or far above the usual, leaves the weights as they are.",
    )
    spike_sigmas: PositiveFloat | None = Field(
        6.0,
        description="So many standard deviations above the usual are far; none: only what is no number is bad.",
    )
    roll_back_after: PositiveInt = Field(
        5, description="After so many bad steps in a row the run goes back to a checkpoint from before them."
    )
    check_every_steps: PositiveInt = Field(
        10,
        description="Steps between two comparisons of the weights of replicas; the times of ranks are compared twice as often. "
        "On GPUs each waits for the device.",
    )
    straggler_factor: Annotated[float, Field(gt=1)] = Field(
        1.1,
        description="A rank that takes so many times as long as the others, over three comparisons, is named.",
    )
    lighthouse: str | None = Field(
        None,
        description="The address of a torchft lighthouse, such as http://head:29510: every replica of the data axis is a job "
        "of its own, and the others go on without one that is lost; needs the extra torchft.",
    )
    replica: Annotated[int, Field(ge=0)] = Field(
        0, description="With a lighthouse: which of the replicas this job is, from 0."
    )

    @field_validator("lighthouse")
    @classmethod
    def is_an_address(cls, given: str | None) -> str | None:
        if given is not None and not re.fullmatch(r"https?://.+:\d+/?", given):
            raise ValueError("this is no address; give one with its port, such as http://head:29510")
        return given


class RunConfig(Section):
    """A training run."""

    seed: Annotated[int, Field(ge=0)] = Field(
        0, description="Of initial weights, dropout and the order of samples."
    )
    model: ModelSection
    data: DataSection
    grid: GridSection = GridSection()
    batch: BatchSection = BatchSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    engine: EngineSection = EngineSection()
    checkpoints: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    logging: LoggingSection = LoggingSection()
    reliability: ReliabilitySection = ReliabilitySection()

    @model_validator(mode="after")
    def batch_is_whole(self) -> RunConfig:
        tokens, length = self.batch.tokens, self.data.sequence_length
        if tokens % length:
            near = max(1, round(tokens / length)) * length
            raise ValueError(
                f"batch.tokens={tokens} is no multiple of data.sequence_length={length}; use {near}"
            )
        return self

    @model_validator(mode="after")
    def replicas_fit(self) -> RunConfig:
        if self.reliability.lighthouse is None:
            return self
        data, z, replica = self.grid.data, self.grid.z, self.reliability.replica
        if self.grid.auto:
            raise ValueError(
                "reliability.lighthouse makes each replica a job of its own, and grid.auto would lay out one job; give the grid"
            )
        if replica >= data:
            raise ValueError(
                f"reliability.replica={replica} is none of the grid's data={data} replicas, which are counted from 0; use at "
                f"most {data - 1}, or a larger grid.data"
            )
        if not self.checkpoints.resume:
            raise ValueError(
                "reliability.lighthouse is for replicas that are started again, and checkpoints.resume=false begins anew; "
                "leave it true"
            )
        if self.sequences < data * z:
            raise ValueError(
                f"batch.tokens={self.batch.tokens} are {self.sequences} sequences, too few for data*z = {data * z} ranks; use "
                f"{data * z * self.data.sequence_length}"
            )
        return self

    @model_validator(mode="after")
    def every_rank_has_its_share(self) -> RunConfig:
        ranks = math.prod(self.shape[:2])
        if self.grid.auto or not (self.sequences % ranks or self.evaluation.sequences % ranks):
            return self
        words = "data*z" if self.reliability.lighthouse is None else "z"
        if self.sequences % ranks:
            near = max(1, round(self.sequences / ranks)) * ranks * self.data.sequence_length
            raise ValueError(
                f"batch.tokens={self.batch.tokens} are {self.sequences} sequences, which do not divide over {words} = {ranks} "
                f"ranks; use {near}"
            )
        near = -(-self.evaluation.sequences // ranks) * ranks
        raise ValueError(
            f"evaluation.sequences={self.evaluation.sequences} does not divide over {words} = {ranks} ranks; use {near}"
        )

    @model_validator(mode="after")
    def tokens_can_be_cut(self) -> RunConfig:
        length = self.data.sequence_length
        undivided = undivided_axis(length, self.grid.y, self.grid.x)
        if self.engine.activations != "token-sharded" or self.grid.auto or undivided is None:
            return self
        axis, ranks = undivided
        raise ValueError(
            f"engine.activations='token-sharded' cuts sequences over the tensor axes, and grid.{axis}={ranks} does not divide "
            f"data.sequence_length={length}; use {max(1, length // ranks) * ranks}, or 'auto'"
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The grid of this job; with a lighthouse it is one replica of the data axis."""
        grid = self.grid
        return (grid.data if self.reliability.lighthouse is None else 1, grid.z, grid.y, grid.x)

    @property
    def sequences(self) -> int:
        """Of the global batch."""
        return self.batch.tokens // self.data.sequence_length


def steps_of(text: str) -> tuple[int, int]:
    """The first and the last of some steps.

    Example:
        >>> steps_of("10:12"), steps_of("10")
        ((10, 12), (10, 10))
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError("these are no steps; give the first and the last, such as 10:12, or one, such as 10")
    return first, last
