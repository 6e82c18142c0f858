"""Weights & Biases, MLflow and Prometheus. Each is an extra, imported if it is configured.

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
from fourfold.mesh.axes import AXES
from fourfold.train.loop.trainer import Trainer
from fourfold.train.observe.metrics import MetricsLogger, with_groups
from fourfold.train.observe.run_metadata import run_metadata
from fourfold.untrusted_input import read_json

_IDS = "trackers.json"
_ABOUT = ("name", "parameters", "device", "versions")  # what a tracker is told besides the run config
# Name, description, and the metric of a step. Base units, as Prometheus recommends.
_GAUGES = (
    ("fourfold_step", "Steps done.", "step"),
    ("fourfold_loss", "Loss of the last step.", "loss"),
    ("fourfold_validation_loss", "Loss on text that is not trained on.", "validation_loss"),
    ("fourfold_learning_rate", "Learning rate of the last step.", "learning_rate"),
    ("fourfold_gradient_norm", "Norm of the gradients before clipping.", "gradient_norm"),
    ("fourfold_aux_loss", "Auxiliary loss of routers.", "aux_loss"),
    ("fourfold_expert_load_ratio", "Tokens of the fullest expert relative to the mean.", "expert_load"),
    ("fourfold_step_seconds", "Seconds of a step.", "seconds"),
    ("fourfold_tokens_per_second", "Tokens per second, over all ranks.", "tokens_per_s"),
    ("fourfold_tokens", "Tokens trained on.", "tokens"),
    ("fourfold_memory_bytes", "Memory of rank 0: peak allocated (CUDA), resident (CPU).", "memory_bytes"),
    ("fourfold_mfu_ratio", "Model FLOPs relative to the data sheet.", "mfu"),
    ("fourfold_data_wait_seconds", "Seconds of a step that waited for its batch.", "data_wait_s"),
    ("fourfold_last_step_timestamp_seconds", "When the last step was logged.", "time"),
)


class WeightsAndBiases(MetricsLogger):
    """Logs to a project; with WANDB_MODE=offline to the folder, for ``wandb sync`` later."""

    def __init__(self, project: str, folder: Path) -> None:
        check_installed("wandb", "wandb", "logging.wandb_project")
        self._project, self._folder = project, folder
        self._run: Any = None

    def open(self, trainer: Trainer) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        known = _known_ids(self._folder).get("wandb") if trainer.step else None
        self._run = import_module("wandb").init(
            project=self._project,
            dir=str(self._folder),
            config=_settings(trainer),
            id=known,
            resume="allow" if known else None,
        )
        _keep_id(self._folder, "wandb", self._run.id)

    def write(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        self._run.log(with_groups(metrics), step=step)

    def close(self, trainer: Trainer) -> None:
        self._run.finish()


class MLflow(MetricsLogger):
    """Logs to a tracking URI: http://..., a database or a folder. A thread of MLflow's sends the metrics."""

    def __init__(self, uri: str, folder: Path, experiment: str = "fourfold") -> None:
        check_installed("mlflow", "mlflow", "logging.mlflow_uri")
        self._uri, self._folder, self._experiment = uri, folder, experiment
        self._mlflow: Any = None
        self._client: Any = None
        self._run_id = ""
        self._last: Any = None

    def open(self, trainer: Trainer) -> None:
        self._mlflow = import_module("mlflow")
        try:
            self._open_run(trainer)
        except self._mlflow.MlflowException as error:
            raise ValueError(f"logging.mlflow_uri={self._uri}: MLflow rejects it: {error}") from None

    def _open_run(self, trainer: Trainer) -> None:
        self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        known = _known_ids(self._folder).get("mlflow") if trainer.step else None
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

    def write(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        metric, now_ms = self._mlflow.entities.Metric, round(time.time() * 1e3)
        # Some of its stores reject NaN and Inf.
        finite = {name: value for name, value in with_groups(metrics).items() if math.isfinite(value)}
        batch = [metric(name, value, now_ms, step) for name, value in finite.items()]
        self._last = self._client.log_batch(self._run_id, metrics=batch, synchronous=False)

    def close(self, trainer: Trainer) -> None:
        if self._last is not None:
            self._last.wait()  # they are sent in order
        self._client.set_terminated(self._run_id)


class Prometheus(MetricsLogger):
    """Serves the newest metrics at ``http://ADDRESS:PORT/metrics``; on the local machine only, unless an address is given."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        check_installed("prometheus_client", "prometheus", "logging.prometheus_port")
        self._port, self._address = port, address
        self._gauges: dict[str, Any] = {}
        self._server: Any = None

    def open(self, trainer: Trainer) -> None:
        lib = import_module("prometheus_client")
        registry = lib.CollectorRegistry()  # not the process's default, which others may serve
        self._gauges = {metric: lib.Gauge(name, what, registry=registry) for name, what, metric in _GAUGES}
        exposed = lib.Gauge(
            "fourfold_exposed_seconds",
            "Seconds of a step that rank 0 waited for an axis.",
            ["axis"],
            registry=registry,
        )
        for axis in AXES:
            if trainer.grid.size(axis) > 1:
                self._gauges[f"exposed_{axis}_s"] = exposed.labels(axis)
        steps = lib.Gauge("fourfold_steps_planned", "Steps of the whole run.", registry=registry)
        steps.set(trainer.run.schedule.steps)
        try:
            self._server, _ = lib.start_http_server(self._port, self._address, registry)
        except OSError as error:
            raise ValueError(
                f"logging.prometheus_port={self._port} cannot be served at {self._address}: {error.strerror}; "
                "use another port, or another logging.prometheus_address"
            ) from None

    def write(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if name in self._gauges:
                self._gauges[name].set(value)

    def close(self, trainer: Trainer) -> None:
        self._server.shutdown()
        self._server.server_close()


def check_installed(module: str, extra: str, option: str) -> None:
    """Raise on every rank if a package is missing; only the rank that uses it imports it."""
    if find_spec(module) is None:
        raise ValueError(
            f"{option} needs the package {module}, which is not installed; pip install 'fourfold[{extra}]', or remove "
            "the option"
        )


def _settings(trainer: Trainer) -> dict[str, Any]:
    metadata = run_metadata(trainer)
    return {**metadata["config"], **{key: metadata[key] for key in _ABOUT}}


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return out


def _known_ids(folder: Path) -> dict[str, str]:
    return read_json(folder / _IDS) if (folder / _IDS).exists() else {}


def _keep_id(folder: Path, tracker: str, run_id: str) -> None:
    files.write_atomically(folder / _IDS, json.dumps({**_known_ids(folder), tracker: run_id}))
