"""Fourfold: PyTorch-native 4D parallel training of Hugging Face models.

Names are imported on first use, because importing torch takes seconds and the planner's formulas do not need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fourfold.checkpoint.save import Checkpoints
    from fourfold.checkpoint.state import TrainState
    from fourfold.config.run_file import load_run
    from fourfold.config.schema import RunConfig
    from fourfold.dry_run.run import DryRun, dryrun
    from fourfold.errors import UnsupportedError
    from fourfold.export.live import full_parameters
    from fourfold.mesh.axes import factorisations
    from fourfold.mesh.grid import Grid
    from fourfold.optim.clip import clip_grad_norm_
    from fourfold.optim.sharded_optimizer import sharded_optimizer
    from fourfold.parallel.context.chunks import cut_sequences
    from fourfold.parallel.dropout import seed_ranks
    from fourfold.parallel.lora import Lora
    from fourfold.parallel.loss.cross_entropy import (
        count_labels,
        cross_entropy,
        full_logits,
        token_log_probs,
    )
    from fourfold.parallel.parallelize import parallelize
    from fourfold.parallel.report import Report
    from fourfold.planner.plan import plan
    from fourfold.planner.search import Plan
    from fourfold.profiling.step_report import StepReport, measure_step, save_run
    from fourfold.profiling.timeline import timeline
    from fourfold.train.loop.trainer import Callback, StepResult, Trainer
    from fourfold.weights.api import no_sync
    from fourfold.weights.overlap import Overlap

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "Checkpoints",
    "DryRun",
    "Grid",
    "Lora",
    "Overlap",
    "Plan",
    "Report",
    "RunConfig",
    "StepReport",
    "StepResult",
    "TrainState",
    "Trainer",
    "UnsupportedError",
    "clip_grad_norm_",
    "count_labels",
    "cross_entropy",
    "cut_sequences",
    "dryrun",
    "factorisations",
    "full_logits",
    "full_parameters",
    "load_run",
    "measure_step",
    "no_sync",
    "parallelize",
    "plan",
    "save_run",
    "seed_ranks",
    "sharded_optimizer",
    "timeline",
    "token_log_probs",
]

_HOMES = {
    "fourfold.dry_run.run": ("DryRun", "dryrun"),
    "fourfold.mesh.axes": ("factorisations",),
    "fourfold.mesh.grid": ("Grid",),
    "fourfold.optim.clip": ("clip_grad_norm_",),
    "fourfold.parallel.context.chunks": ("cut_sequences",),
    "fourfold.parallel.dropout": ("seed_ranks",),
    "fourfold.parallel.lora": ("Lora",),
    "fourfold.parallel.loss.cross_entropy": (
        "count_labels",
        "cross_entropy",
        "full_logits",
        "token_log_probs",
    ),
    "fourfold.optim.sharded_optimizer": ("sharded_optimizer",),
    "fourfold.weights.overlap": ("Overlap",),
    "fourfold.parallel.parallelize": ("parallelize",),
    "fourfold.errors": ("UnsupportedError",),
    "fourfold.export.live": ("full_parameters",),
    "fourfold.parallel.report": ("Report",),
    "fourfold.profiling.step_report": ("StepReport", "measure_step", "save_run"),
    "fourfold.profiling.timeline": ("timeline",),
    "fourfold.weights.api": ("no_sync",),
    "fourfold.planner.plan": ("plan",),
    "fourfold.planner.search": ("Plan",),
    "fourfold.checkpoint.save": ("Checkpoints",),
    "fourfold.checkpoint.state": ("TrainState",),
    "fourfold.config.schema": ("RunConfig",),
    "fourfold.config.run_file": ("load_run",),
    "fourfold.train.loop.trainer": ("Callback", "StepResult", "Trainer"),
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
