"""Start ranks on this machine with torchrun's launcher; check a run before they start."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fourfold.config.schema import RunConfig
from fourfold.data.manifest import DatasetManifest
from fourfold.train.loop.model import model_config
from fourfold.train.loop.trainer import micro_batches, open_data


def local_ranks(run: RunConfig, ranks: int | None) -> int:
    """The number of ranks to start: the size of the grid or, if none is set, ``ranks``, the number of GPUs, or 1."""
    devices = torch.cuda.device_count()
    if run.grid.auto:
        needed = ranks or devices or 1
    else:
        needed = math.prod(run.shape)
        if ranks is not None and ranks != needed:
            raise ValueError(
                f"--ranks {ranks} does not fit the grid data*z*y*x = {needed}; leave it out, or change the grid"
            )
    if devices and needed > devices:
        raise ValueError(
            f"the run needs {needed} ranks, and this machine has {devices} GPUs; use a grid of {devices}, or start it on "
            "more machines with torchrun or `fourfold launch`"
        )
    return needed


def check(run: RunConfig) -> None:
    """Reject once, before ranks start, what every rank would reject."""
    open_data(run, "train")
    if run.evaluation.sequences:
        open_data(run, "validation")
    vocabulary = DatasetManifest.load(run.data.sources[0].path).tokenizer.vocab_size
    check_model(run)
    config = model_config(run.model)
    if config.vocab_size < vocabulary:
        raise ValueError(
            f"the model has a vocabulary of {config.vocab_size} tokens, the data of {vocabulary}; set vocab_size to "
            f"{vocabulary} in its config.json, or prepare the data with the model's tokenizer"
        )


def check_model(run: RunConfig) -> None:
    """Reject sequences that are too long for the model, and micro-batches that do not divide."""
    config = model_config(run.model)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < run.data.sequence_length:
        raise ValueError(
            f"data.sequence_length={run.data.sequence_length} is longer than the {positions} positions of the model; use at most "
            f"{positions}, or a model whose config.json has a larger max_position_embeddings"
        )
    # torchft replicas take shares of any size.
    if not run.grid.auto and run.reliability.torchft_lighthouse is None:
        parts = run.grid.data * run.grid.z // run.sequence_ranks
        micro_batches(run.sequences // parts, run.batch.micro_batch_sequences)


def start_ranks(ranks: int, arguments: Sequence[str], max_restarts: int = 0) -> int:
    """Run `fourfold ARGUMENTS` on N ranks of this machine, restarted if one dies; the exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from fourfold.launch import agent

    os.environ.setdefault("OMP_NUM_THREADS", _threads_of_a_rank(ranks))
    try:
        return agent.main(_agent_arguments(ranks, arguments, max_restarts))
    except SignalException as interrupted:  # a second interrupt, or SIGHUP: ranks ended, saved or not
        return 128 + interrupted.sigval


def run_ranks(ranks: int, arguments: Sequence[str], log: Path) -> int:
    """Run `fourfold ARGUMENTS` on N ranks in a process of its own, with its output in ``log``; the exit code."""
    command = [sys.executable, "-m", "fourfold.launch.agent", *_agent_arguments(ranks, arguments, 0)]
    environment = {"OMP_NUM_THREADS": _threads_of_a_rank(ranks)} | os.environ
    with log.open("wb") as file:
        return subprocess.run(command, env=environment, stdout=file, stderr=file, check=False).returncode


def _agent_arguments(ranks: int, arguments: Sequence[str], max_restarts: int) -> list[str]:
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
    return [*options, "-m", "fourfold", *arguments]


def _threads_of_a_rank(ranks: int) -> str:
    return str(max(1, len(os.sched_getaffinity(0)) // ranks))
