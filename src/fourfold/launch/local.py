"""Ranks on this machine, started by torchrun's own launcher, and what can be refused before they are."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

from fourfold.config.schema import RunConfig
from fourfold.data.manifest import SPLITS, DatasetManifest
from fourfold.data.mixture import open_mixture
from fourfold.train.loop.model import model_config
from fourfold.train.loop.trainer import micro_batches


def local_ranks(run: RunConfig, ranks: int | None) -> int:
    """How many ranks to start here: those of the grid, or, where the planner chooses it, ``ranks`` or every GPU."""
    devices = torch.cuda.device_count()
    if run.grid.auto:
        if not (ranks or devices):
            raise ValueError(
                "grid.auto needs to know how many ranks there are, and this machine has no GPU; give --ranks N"
            )
        needed = ranks or devices
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
    """Refuse here, in one voice, what every rank would refuse."""
    sources = [(source.path, source.weight) for source in run.data.sources]
    for split in SPLITS:
        open_mixture(sources, length=run.data.sequence_length, seed=run.seed, split=split)
    vocabulary = DatasetManifest.load(run.data.sources[0].path).tokenizer.vocab_size
    config = model_config(run.model)
    if config.vocab_size < vocabulary:
        raise ValueError(
            f"the model knows {config.vocab_size} tokens, the data has {vocabulary}; set vocab_size to {vocabulary} in its "
            "config.json, or prepare the data with the model's tokenizer"
        )
    # Replicas that come and go take shares of any size.
    if not run.grid.auto and run.reliability.lighthouse is None:
        parts = run.grid.data * run.grid.z
        micro_batches(run.sequences // parts, run.batch.micro_batch_sequences)


def start_ranks(ranks: int, arguments: Sequence[str], max_restarts: int = 0) -> int:
    """`fourfold ARGUMENTS` on so many ranks of this machine, again if one dies; what they end with."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from fourfold.launch import agent

    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
    try:
        options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
        return agent.main([*options, "-m", "fourfold", *arguments])
    except SignalException as interrupted:  # again, or hung up on: the ranks were ended, saved or not
        return 128 + interrupted.sigval
