"""All that stands beside the steps of a run, in its order."""

from __future__ import annotations

from fourfold.train.config import RunConfig, steps_of
from fourfold.train.console import Lines
from fourfold.train.evaluate import Evaluation
from fourfold.train.meter import Meter
from fourfold.train.metrics import JsonLines, TensorBoard
from fourfold.train.profile import Profile
from fourfold.train.run_report import RunReport
from fourfold.train.trainer import Callback


def callbacks_of(run: RunConfig) -> list[Callback]:
    """Who finds figures comes before who shows them: the evaluation, the meter, then the others."""
    logging = run.logging
    callbacks: list[Callback] = [Evaluation(run.evaluation.sequences, run.evaluation.every_steps), Meter()]
    callbacks.append(JsonLines(logging.folder))
    if logging.tensorboard:
        callbacks.append(TensorBoard(logging.folder))
    if logging.wandb_project is not None:
        from fourfold.train.trackers import WeightsAndBiases

        callbacks.append(WeightsAndBiases(logging.wandb_project, logging.folder))
    if logging.mlflow_uri is not None:
        from fourfold.train.trackers import MLflow

        callbacks.append(MLflow(logging.mlflow_uri, logging.folder))
    if logging.prometheus_port is not None:
        from fourfold.train.prometheus import Prometheus

        callbacks.append(Prometheus(logging.prometheus_port, logging.prometheus_address))
    if logging.profile_steps is not None:
        callbacks.append(Profile(logging.folder / "traces", *steps_of(logging.profile_steps)))
    return [*callbacks, Lines(), RunReport(logging.folder)]
