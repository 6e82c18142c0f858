"""The callbacks of a run, in order."""

from __future__ import annotations

from fourfold.config.schema import RunConfig, steps_of
from fourfold.train.loop.garbage import GarbageCollection
from fourfold.train.loop.trainer import Callback
from fourfold.train.observe.console import ConsoleLogger
from fourfold.train.observe.evaluate import Evaluation
from fourfold.train.observe.expert_load import ExpertLoadMetrics
from fourfold.train.observe.meter import Meter
from fourfold.train.observe.metrics import JsonLines, TensorBoard
from fourfold.train.observe.profile import Profile
from fourfold.train.observe.report import RunReport
from fourfold.train.observe.trackers import MLflow, Prometheus, WeightsAndBiases
from fourfold.train.resilience.bad_steps import BadSteps
from fourfold.train.resilience.hang import HangDetector
from fourfold.train.resilience.replica_check import ReplicaConsistencyCheck
from fourfold.train.resilience.stragglers import Stragglers


def callbacks_of(run: RunConfig) -> list[Callback]:
    """Callbacks that measure come before those that show metrics: the evaluation, the meter, then the others."""
    logging, reliability = run.logging, run.reliability
    callbacks: list[Callback] = [
        HangDetector(reliability.timeout_s, reliability.first_step_timeout_s, logging.folder / "hang"),
        GarbageCollection(),
    ]
    if reliability.skip_bad_steps:
        callbacks.append(BadSteps(reliability.spike_sigmas, reliability.roll_back_after))
    callbacks += [
        ReplicaConsistencyCheck(reliability.check_every_steps),
        Stragglers(max(1, reliability.check_every_steps // 2), reliability.straggler_factor),
    ]
    if run.evaluation.sequences:
        callbacks.append(Evaluation(run.evaluation.sequences, run.evaluation.every_steps))
    if run.experts.load_metrics:
        callbacks.append(ExpertLoadMetrics())
    callbacks += [Meter(), JsonLines(logging.folder)]
    if logging.tensorboard:
        callbacks.append(TensorBoard(logging.folder))
    if logging.wandb_project is not None:
        callbacks.append(WeightsAndBiases(logging.wandb_project, logging.folder))
    if logging.mlflow_uri is not None:
        callbacks.append(MLflow(logging.mlflow_uri, logging.folder))
    if logging.prometheus_port is not None:
        callbacks.append(Prometheus(logging.prometheus_port, logging.prometheus_address))
    if logging.profile_steps is not None:
        callbacks.append(Profile(logging.folder / "traces", *steps_of(logging.profile_steps)))
    return [*callbacks, ConsoleLogger(), RunReport(logging.folder)]
