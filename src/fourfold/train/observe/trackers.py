"""Experiment trackers: Weights & Biases, MLflow. Each is an extra, imported if it is configured.

The tracker's id of a run is kept in ``trackers.json`` next to the metrics, so that a resumed run continues under the same id.
"""

from __future__ import annotations

import json
import math
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.observe.meter import is_logged
from fourfold.train.observe.metrics import step_metrics, with_groups
from fourfold.train.observe.run_metadata import run_metadata

_IDS = "trackers.json"


class WeightsAndBiases(Callback):
    """Logs to a project; with WANDB_MODE=offline to the folder, for ``wandb sync`` later."""

    def __init__(self, project: str, folder: Path) -> None:
        check_installed("wandb", "wandb", "logging.wandb_project")
        self._project, self._folder = project, folder
        self._run: Any = None

    def on_start(self, trainer: Trainer) -> None:
        if not trainer.is_first:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        known = _known_id(self._folder, "wandb") if trainer.step else None
        self._run = import_module("wandb").init(
            project=self._project,
            dir=str(self._folder),
            config=_settings(trainer),
            id=known,
            resume="allow" if known else None,
        )
        _keep_id(self._folder, "wandb", self._run.id)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._run is not None and is_logged(trainer, result.step):
            self._run.log(with_groups(step_metrics(result)), step=result.step)

    def on_end(self, trainer: Trainer) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


class MLflow(Callback):
    """Logs to a tracking URI: http://..., a database or a folder. A thread of MLflow's sends the metrics."""

    def __init__(self, uri: str, folder: Path, experiment: str = "fourfold") -> None:
        check_installed("mlflow", "mlflow", "logging.mlflow_uri")
        self._uri, self._folder, self._experiment = uri, folder, experiment
        self._mlflow: Any = None
        self._client: Any = None
        self._run_id = ""
        self._last: Any = None

    def on_start(self, trainer: Trainer) -> None:
        if not trainer.is_first:
            return
        self._mlflow = import_module("mlflow")
        try:
            self._open(trainer)
        except self._mlflow.MlflowException as error:
            raise ValueError(f"logging.mlflow_uri={self._uri}: MLflow rejects it: {error}") from None

    def _open(self, trainer: Trainer) -> None:
        self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        known = _known_id(self._folder, "mlflow") if trainer.step else None
        if known is None:
            found = self._client.get_experiment_by_name(self._experiment)
            experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
            known = str(self._client.create_run(experiment).info.run_id)
            for name, value in _flat(_settings(trainer)).items():
                self._client.log_param(known, name, str(value)[:500])
        else:
            self._client.update_run(known, status="RUNNING")
        self._run_id = known
        _keep_id(self._folder, "mlflow", known)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._client is None or not is_logged(trainer, result.step):
            return
        metric = self._mlflow.entities.Metric
        now_ms = round(time.time() * 1e3)
        # Some of its stores reject NaN and Inf.
        finite = {name: v for name, v in with_groups(step_metrics(result)).items() if math.isfinite(v)}
        metrics = [metric(name, value, now_ms, result.step) for name, value in finite.items()]
        self._last = self._client.log_batch(self._run_id, metrics=metrics, synchronous=False)

    def on_end(self, trainer: Trainer) -> None:
        if self._client is not None:
            if self._last is not None:
                self._last.wait()  # they are sent in order
            self._client.set_terminated(self._run_id)
            self._client = None


def check_installed(module: str, extra: str, option: str) -> None:
    """Raise on every rank if a package is missing; only the rank that uses it imports it."""
    if find_spec(module) is None:
        raise ValueError(
            f"{option} needs the package {module}, which is not installed; pip install 'fourfold[{extra}]', or remove "
            "the option"
        )


def _settings(trainer: Trainer) -> dict[str, Any]:
    metadata = run_metadata(trainer)
    return {
        **metadata["config"],
        **{key: metadata[key] for key in ("name", "parameters", "device", "versions")},
    }


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return out


def _known_id(folder: Path, tracker: str) -> str | None:
    return files.read_json(folder / _IDS, default={}).get(tracker)


def _keep_id(folder: Path, tracker: str, run_id: str) -> None:
    known = files.read_json(folder / _IDS, default={})
    files.write_atomically(folder / _IDS, json.dumps({**known, tracker: run_id}))
