"""Fourfold: PyTorch-native 4D parallel training of Hugging Face models.

Names are imported when they are first used: planning by formulas needs no torch, and torch takes seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fourfold.dry_run.run import DryRun, dryrun
    from fourfold.grid import Grid, factorisations
    from fourfold.parallel.clip import clip_grad_norm_
    from fourfold.parallel.loss import count_labels, cross_entropy, full_logits
    from fourfold.parallel.optimizer import on_shards
    from fourfold.parallel.overlap import Overlap
    from fourfold.parallel.parallelize import parallelize
    from fourfold.parallel.refused import Refused
    from fourfold.parallel.report import Report
    from fourfold.parallel.step_report import StepReport, measure_step, save_run
    from fourfold.parallel.timeline import timeline
    from fourfold.parallel.weights import accumulating
    from fourfold.planner.plan import plan
    from fourfold.planner.search import Plan
    from fourfold.ranks import RankPool
    from fourfold.train.checkpoint.save import Checkpoints
    from fourfold.train.checkpoint.state import Training
    from fourfold.train.config import RunConfig
    from fourfold.train.run_file import load_run
    from fourfold.train.trainer import Callback, StepResult, Trainer

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "Checkpoints",
    "DryRun",
    "Grid",
    "Overlap",
    "Plan",
    "RankPool",
    "Refused",
    "Report",
    "RunConfig",
    "StepReport",
    "StepResult",
    "Trainer",
    "Training",
    "accumulating",
    "clip_grad_norm_",
    "count_labels",
    "cross_entropy",
    "dryrun",
    "factorisations",
    "full_logits",
    "load_run",
    "measure_step",
    "on_shards",
    "parallelize",
    "plan",
    "save_run",
    "timeline",
]

_HOMES = {
    "fourfold.dry_run.run": ("DryRun", "dryrun"),
    "fourfold.grid": ("Grid", "factorisations"),
    "fourfold.parallel.clip": ("clip_grad_norm_",),
    "fourfold.parallel.loss": ("count_labels", "cross_entropy", "full_logits"),
    "fourfold.parallel.optimizer": ("on_shards",),
    "fourfold.parallel.overlap": ("Overlap",),
    "fourfold.parallel.parallelize": ("parallelize",),
    "fourfold.parallel.refused": ("Refused",),
    "fourfold.parallel.report": ("Report",),
    "fourfold.parallel.step_report": ("StepReport", "measure_step", "save_run"),
    "fourfold.parallel.timeline": ("timeline",),
    "fourfold.parallel.weights": ("accumulating",),
    "fourfold.planner.plan": ("plan",),
    "fourfold.planner.search": ("Plan",),
    "fourfold.ranks": ("RankPool",),
    "fourfold.train.checkpoint.save": ("Checkpoints",),
    "fourfold.train.checkpoint.state": ("Training",),
    "fourfold.train.config": ("RunConfig",),
    "fourfold.train.run_file": ("load_run",),
    "fourfold.train.trainer": ("Callback", "StepResult", "Trainer"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
