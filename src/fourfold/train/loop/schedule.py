"""The learning rate of each step: warm-up, then cosine, WSD (constant with a decay at the end) or constant."""

from __future__ import annotations

import math

from fourfold.config.schema import ScheduleSection


def learning_rate_factor(schedule: ScheduleSection, step: int) -> float:
    """The learning rate of ``step`` (from 0) as a fraction of the highest.

    Example:
        >>> plan = ScheduleSection(steps=100, warmup_steps=10, final=0.1)
        >>> [round(learning_rate_factor(plan, step), 3) for step in (0, 9, 10, 55, 99)]
        [0.1, 1.0, 1.0, 0.542, 0.1]
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "wsd":
        left = min(1.0, (schedule.steps - 1 - step) / schedule.decay_steps)
    else:
        decay_steps = max(1, schedule.steps - 1 - schedule.warmup_steps)
        left = 0.5 * (1 + math.cos(math.pi * min(1.0, (step - schedule.warmup_steps) / decay_steps)))
    return schedule.final + (1 - schedule.final) * max(0.0, left)
