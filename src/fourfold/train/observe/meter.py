"""Metrics of a step: tokens per second, memory, MFU, exposed communication by axis, waits for data and other activities.

The meter reads them once, at the steps that are logged, for all callbacks after it (`StepResult.metrics`): on CUDA reading
waits for the device. The time of a step is the mean over the steps since the last reading; exposed communication is that of
the logged step, the only one in which it is measured.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from fourfold.mesh.axes import AXES, Axis, axis_of_mesh
from fourfold.planner.inputs import cluster as clusters
from fourfold.planner.inputs.workload import from_config
from fourfold.train.loop.trainer import Callback, StepResult, Trainer

# Pattern of torch.cuda.get_device_name, and the preset with that device. PCIe cards are slower, and not listed.
_PRESET_OF = (
    (r"A100.*SXM", "perlmutter-80g"),
    (r"GH200", "alps-gh200"),
    (r"H100 80GB HBM3", "dgx-h100"),
    (r"\bH200$", "aws-p5en"),
    (r"GB200", "gb200-nvl72"),
    (r"\bB200", "dgx-b200"),
    (r"MI250X", "frontier"),
)


def is_logged(trainer: Trainer, step: int) -> bool:
    """Is this step logged? Every ``logging.every_steps`` steps, those with an evaluation, and the last."""
    run = trainer.run
    evaluates = run.evaluation.every_steps if run.evaluation.sequences else None
    is_evaluated = evaluates is not None and step % evaluates == 0
    return step % run.logging.every_steps == 0 or is_evaluated or step == run.schedule.steps


class Meter(Callback):
    """Runs on rank 0 alone. Put it after the evaluation, and before all callbacks that show metrics."""

    def __init__(self) -> None:
        self._results: list[StepResult] = []  # since the last reading
        self._exposed_s: dict[Axis, float] = dict.fromkeys(AXES, 0.0)  # in the last logged step
        self._timed_s: dict[str, float] = {}  # of the trainer, at the last reading
        # With all ranks at their peak; None if the peak or the FLOPs of the model are not known.
        self._ideal_s_per_token: float | None = None

    def on_start(self, trainer: Trainer) -> None:
        if trainer.is_first:
            self._timed_s = dict(trainer.timed_s)
            run, ranks = trainer.run, trainer.grid.mesh.size()
            peak = peak_flops(trainer.grid.device, run.engine.precision)
            flops = flops_per_token(trainer.model, run.data.sequence_length)
            if peak is not None and flops is not None:
                self._ideal_s_per_token = flops / (peak * ranks)

    @contextmanager
    def around_step(self, trainer: Trainer) -> Iterator[None]:
        if not (trainer.is_first and is_logged(trainer, trainer.step + 1)):
            yield
            return
        # Around the step alone: waits of an evaluation are not part of it.
        with trainer.grid.collectives.counting() as entries:
            yield
        self._exposed_s = dict.fromkeys(AXES, 0.0)
        for entry in entries:
            self._exposed_s[axis_of_mesh(entry.axis)] += entry.exposed_s

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if not trainer.is_first:
            return
        self._results.append(result)
        if is_logged(trainer, result.step):
            result.metrics |= self._metrics(trainer)
            self._results.clear()
            self._timed_s = dict(trainer.timed_s)

    def _metrics(self, trainer: Trainer) -> dict[str, float]:
        steps, last = len(self._results), self._results[-1]
        step_s = sum(result.seconds for result in self._results) / steps
        timed_s = {activity: s - self._timed_s.get(activity, 0.0) for activity, s in trainer.timed_s.items()}
        metrics: dict[str, float] = {
            "seconds": step_s,
            "tokens_per_s": last.tokens / step_s,
            # Not from the step: a run may be resumed with another batch size.
            "tokens": trainer.training.data["samples"] * trainer.run.data.sequence_length,
            "steps": steps,
            "ranks": trainer.grid.mesh.size(),  # hosts may have come or gone
            "time": time.time(),
            "memory_bytes": memory_bytes(trainer.grid.device),
            "data_wait_s": timed_s.pop("data", 0.0) / steps,
        }
        for axis in AXES:
            if trainer.grid.size(axis) > 1:
                metrics[f"exposed_{axis}_s"] = self._exposed_s[axis]
        if self._ideal_s_per_token is not None:
            # On the devices of all replicas that take part.
            metrics["mfu"] = self._ideal_s_per_token * last.tokens / step_s / last.metrics.get("replicas", 1)
        # Evaluations and checkpoints are not part of each step: these are totals since the last reading.
        return metrics | {f"{activity}_s": s for activity, s in timed_s.items() if s > 0}


def memory_bytes(device: torch.device) -> int:
    """CUDA: peak allocated memory. CPU: resident memory now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError), open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_flops(device: torch.device, precision: str) -> float | None:
    """FLOP/s of the data sheet for dense bf16 matmuls; None on CPUs, in fp32, and on devices without a preset."""
    if device.type != "cuda" or precision != "bf16":
        return None
    return peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(name: str) -> float | None:
    """
    Example:
        >>> peak_by_name("NVIDIA A100-SXM4-80GB")
        312000000000000.0
    """
    preset = preset_by_name(name)
    tflops = clusters.preset(preset).device.spec_tflops if preset else None
    return None if tflops is None else tflops * 1e12


def preset_by_name(name: str) -> str | None:
    """The preset of a cluster with devices of this name."""
    return next((preset for pattern, preset in _PRESET_OF if re.search(pattern, name)), None)


def flops_per_token(model: nn.Module, length: int) -> float | None:
    """FLOPs of forward and backward, as the planner counts them; None for a family that it does not know."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return None
    try:
        return from_config(config.to_dict()).model_flops(1.0, length)
    except ValueError:
        return None
