"""The newest metrics at ``http://ADDRESS:PORT/metrics`` on rank 0, for Prometheus to fetch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fourfold.mesh.axes import AXES
from fourfold.train.loop.trainer import Callback, StepResult, Trainer
from fourfold.train.observe.meter import is_logged
from fourfold.train.observe.metrics import step_metrics
from fourfold.train.observe.trackers import check_installed

# Name, description, and the metric of a step. Base units, as Prometheus recommends.
_GAUGES = (
    ("fourfold_step", "Steps done.", "step"),
    ("fourfold_loss", "Loss of the last step.", "loss"),
    ("fourfold_validation_loss", "Loss on text that is not trained on.", "validation_loss"),
    ("fourfold_learning_rate", "Learning rate of the last step.", "learning_rate"),
    ("fourfold_gradient_norm", "Norm of the gradients before clipping.", "gradient_norm"),
    ("fourfold_step_seconds", "Seconds of a step.", "seconds"),
    ("fourfold_tokens_per_second", "Tokens per second, over all ranks.", "tokens_per_s"),
    ("fourfold_tokens", "Tokens trained on.", "tokens"),
    ("fourfold_memory_bytes", "Memory of rank 0: peak allocated (CUDA), resident (CPU).", "memory_bytes"),
    ("fourfold_mfu_ratio", "Model FLOPs relative to the data sheet.", "mfu"),
    ("fourfold_data_wait_seconds", "Seconds of a step that waited for its batch.", "data_wait_s"),
    ("fourfold_last_step_timestamp_seconds", "When the last step was logged.", "time"),
)


class Prometheus(Callback):
    """Serves the local machine only, unless another address is given."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        check_installed("prometheus_client", "prometheus", "logging.prometheus_port")
        self._port, self._address = port, address
        self._gauges: dict[str, Any] = {}
        self._server: Any = None

    def on_start(self, trainer: Trainer) -> None:
        if not trainer.is_first:
            return
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

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._server is not None and is_logged(trainer, result.step):
            for name, value in step_metrics(result).items():
                if name in self._gauges:
                    self._gauges[name].set(value)

    def on_end(self, trainer: Trainer) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
