"""Fourfold: PyTorch-native 4D parallel training of Hugging Face models."""

from fourfold.dry_run.run import DryRun, dryrun
from fourfold.grid import Grid, factorisations
from fourfold.parallel.clip import clip_grad_norm_
from fourfold.parallel.loss import count_labels, cross_entropy, full_logits
from fourfold.parallel.optimizer import on_shards
from fourfold.parallel.overlap import Overlap
from fourfold.parallel.parallelize import parallelize
from fourfold.parallel.refused import Refused
from fourfold.parallel.report import Report
from fourfold.parallel.step_report import StepReport, measure_step
from fourfold.parallel.timeline import timeline
from fourfold.parallel.weights import accumulating
from fourfold.ranks import RankPool

__version__ = "0.1.0"

__all__ = [
    "DryRun",
    "Grid",
    "Overlap",
    "RankPool",
    "Refused",
    "Report",
    "StepReport",
    "accumulating",
    "clip_grad_norm_",
    "count_labels",
    "cross_entropy",
    "dryrun",
    "factorisations",
    "full_logits",
    "measure_step",
    "on_shards",
    "parallelize",
    "timeline",
]
