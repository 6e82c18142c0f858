"""All that stands beside the steps of a run, in its order."""

from __future__ import annotations

from fourfold.train.config import RunConfig, steps_of
from fourfold.train.console import Lines
from fourfold.train.evaluate import Evaluation
from fourfold.train.hang import HangWatch
from fourfold.train.meter import Meter
from fourfold.train.metrics import JsonLines, TensorBoard
from fourfold.train.numbers_gone_bad import BadNumbers
from fourfold.train.profile import Profile
from fourfold.train.replicas import SameWeights
from fourfold.train.run_report import RunReport
from fourfold.train.stragglers import Stragglers
from fourfold.train.trainer import Callback


def callbacks_of(run: RunConfig) -> list[Callback]:
    """Who finds figures comes before who shows them: the evaluation, the meter, then the others."""
    logging, reliability = run.logging, run.reliability
    callbacks: list[Callback] = [
        HangWatch(reliability.timeout_s, reliability.first_step_timeout_s, logging.folder / "hang"),
        *(
            [BadNumbers(reliability.spike_sigmas, reliability.roll_back_after)]
            if reliability.skip_bad_steps
            else []
        ),
        SameWeights(reliability.check_every_steps),
        Stragglers(max(1, reliability.check_every_steps // 2), reliability.straggler_factor),
        Evaluation(run.evaluation.sequences, run.evaluation.every_steps),
        Meter(),
    ]
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
