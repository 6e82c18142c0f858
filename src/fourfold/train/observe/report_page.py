"""The HTML report: curves, where the time went, the prediction, and the run config."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from fourfold.planner.inputs.layout import Layout
from fourfold.planner.show.charts import COLOURS, Curve, bars, curves, document, drawn, facts, smooth, tiles
from fourfold.planner.show.compare import HEADINGS, Comparison, in_words
from fourfold.planner.show.tables import seconds
from fourfold.train.observe.console import duration
from fourfold.train.observe.run_metadata import amount

_BLUE, _ORANGE, _TEAL, _PURPLE = "#4c78a8", "#f58518", "#54a24b", "#b279a2"
_PART_COLOURS = {
    "compute": "#4c78a8",
    **{part: colour for part, colour in COLOURS.items() if part.startswith("exposed")},
    "waiting for data": "#eeca3b",
    "evaluation": "#72b7b2",
    "checkpoint": "#79706e",
    "other": "#b6c3d1",
}
Metrics = Sequence[Mapping[str, float]]


def page(
    about: Mapping[str, Any], metrics: Metrics, times_s: Mapping[str, float], comparison: Comparison | str
) -> str:
    """``about`` is the content of ``run.json``, ``metrics`` that of ``metrics.jsonl``."""
    title = f"{about['name']}, {amount(about['parameters'])} parameters"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=note>{escape(_state(about, metrics))}</p>",
        tiles(_headline(about, metrics, times_s)),
        "<h2>Loss</h2>",
        _loss(metrics),
        "<div class=pair>",
        *_small(metrics),
        "</div>",
        "<h2>Where the time went</h2>",
        *_times(about, times_s),
        "<h2>A step and its prediction</h2>",
        *prediction(comparison, "Means of the middle half of rank 0's steps since the last start"),
        "<h2>The run</h2>",
        facts(run_config(about)),
    ]
    return document(title, parts)


def _state(about: Mapping[str, Any], metrics: Metrics) -> str:
    planned, last = about["config"]["schedule"]["steps"], int(metrics[-1]["step"])
    starts = about["starts"]
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(starts[0]["time"]))
    words = [f"{last:,} of {planned:,} steps on {Layout(**about['layout'])}", f"started {began}"]
    if len(starts) > 1:
        words.append("resumed from step " + ", ".join(f"{s['step']:,}" for s in starts[1:]))
    broken = sum(not math.isfinite(line["loss"]) for line in metrics)
    if broken:
        words.append(f"{broken:,} steps without a finite loss")
    return "; ".join(words) + "."


def _headline(about: Mapping[str, Any], metrics: Metrics, times_s: Mapping[str, float]) -> dict[str, str]:
    last = metrics[-1]
    values = {"loss": f"{last['loss']:.4f}"}
    validation = [line["validation_loss"] for line in metrics if "validation_loss" in line]
    if validation:
        values["validation loss"] = f"{validation[-1]:.4f}"
    values["tokens/s, median"] = f"{median(line['tokens_per_s'] for line in metrics):,.0f}"
    values["step, median"] = seconds(median(line["seconds"] for line in metrics))
    if "mfu" in last:
        values["MFU, median"] = f"{median(line['mfu'] for line in metrics if 'mfu' in line):.1%}"
    is_cpu = about["device"] == "CPU"
    memory = max(line.get("memory_bytes", 0.0) for line in metrics)
    values["resident, rank 0" if is_cpu else "peak memory, rank 0"] = f"{memory / 2**30:.2f} GiB"
    if "tokens" in last:
        values["tokens"] = amount(last["tokens"])
    if "other" in times_s:  # all of the time is known
        values["total time"] = duration(sum(times_s.values()))
    return values


def _points(metrics: Metrics, name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in metrics if name in line]


def _loss(metrics: Metrics) -> str:
    losses, validation = _points(metrics, "loss"), _points(metrics, "validation_loss")
    shown = [
        Curve("this step", _BLUE, losses, is_faint=True),
        Curve("training", _BLUE, smooth(losses)),
        Curve("validation", _ORANGE, validation, has_dots=True),
    ]
    return drawn("loss", curves([curve for curve in shown if curve.points], ".4~g", height=330))


def _small(metrics: Metrics) -> list[str]:
    out = []
    for heading, name, colour, form in (
        ("Tokens per second", "tokens_per_s", _TEAL, ".4~s"),
        ("Learning rate", "learning_rate", _PURPLE, ".3~g"),
        ("Gradient norm", "gradient_norm", _BLUE, ".3~g"),
        ("Memory of rank 0, GiB", "memory_bytes", "#79706e", ".3~g"),
    ):
        points = _points(metrics, name)
        if name == "memory_bytes":
            points = [(step, size / 2**30) for step, size in points]
        if points:
            chart = curves([Curve(heading.lower(), colour, points)], form, from_zero=True)
            out.append(f"<div><h2>{heading}</h2>{drawn(name, chart)}</div>")
    return out + _experts(metrics)


def _experts(metrics: Metrics) -> list[str]:
    out = []
    if points := _points(metrics, "aux_loss"):
        chart = curves([Curve("auxiliary loss", _ORANGE, points)], ".4~g")
        out.append(f"<div><h2>Auxiliary loss of routers</h2>{drawn('aux_loss', chart)}</div>")
    loads = [
        Curve("the worst layer", _ORANGE, _points(metrics, "expert_load")),
        Curve("mean of the layers", _BLUE, _points(metrics, "expert_load_mean")),
    ]
    if loads[0].points:
        chart = curves(loads, ".3~g", from_zero=True)
        out.append(f"<div><h2>Load of experts: largest / mean</h2>{drawn('expert_load', chart)}</div>")
    return out


def _times(about: Mapping[str, Any], times_s: Mapping[str, float]) -> list[str]:
    parts = {part: times_s[part] for part in _PART_COLOURS if times_s.get(part, 0.0) > 0}
    total_s = sum(parts.values())
    rows = "".join(f"<tr><td>{part}<td>{_span(s)}<td>{s / total_s:.1%}" for part, s in parts.items())
    out = [
        drawn("parts", bars([("all", parts)], _PART_COLOURS, _span)),
        f"<table class=parts><tr><th>part<th>time<th>share{rows}<tr><td>all<td>{_span(total_s)}<td>100%</table>",
    ]
    notes = ["Exposed is the time that rank 0 waited for an axis; compute is the rest of the steps."]
    if about["device"] != "CPU":
        notes.append("Waiting for data is measured on the host; the device may have been busy meanwhile.")
    if about["device"] != "CPU" and about["layout"]["weights"] == "fsdp2":
        notes.append("Waits of FSDP2 between its own streams count as compute here.")
    if "other" not in times_s:
        notes.append(
            "The run, or a start of it, did not end normally: its time outside of logged steps is not included."
        )
    return [*out, f"<p class=note>{' '.join(notes)}</p>"]


def _span(span_s: float) -> str:
    return seconds(span_s) if span_s < 100 else duration(span_s)


def prediction(comparison: Comparison | str, measured: str) -> list[str]:
    """Prediction and measurement side by side; ``measured`` says what was measured."""
    if isinstance(comparison, str):
        return [f"<p class=note>{escape(comparison)} The step above is measured only.</p>"]
    parts = comparison.parts()
    rows = [(name, {p: both[i] for p, both in parts.items()}) for i, name in enumerate(HEADINGS[1:3])]
    cells = "".join("<tr><td>" + "<td>".join(row) for row in comparison.rows())
    how = "a simulation of the dry run" if comparison.predicted.is_simulated else "by the planner's formulas"
    return [
        drawn("prediction", bars(rows, _PART_COLOURS, seconds)),
        f"<table class=parts><tr><th>{'<th>'.join(HEADINGS)}{cells}</table>",
        f"<p>{escape(in_words(comparison))}</p>",
        f"<p class=note>{measured}; the prediction is {how} of this layout on {escape(comparison.cluster.name)}.</p>",
    ]


def run_config(about: Mapping[str, Any]) -> dict[str, str]:
    config = about["config"]
    batch, length = config["batch"]["tokens"], config["data"]["sequence_length"]
    shape = about["model"]
    sizes = [
        f"{word} {shape[key]:,}"
        for key, word in (
            ("num_hidden_layers", "layers"),
            ("hidden_size", "hidden"),
            ("num_attention_heads", "heads"),
            ("vocab_size", "vocabulary"),
        )
        if isinstance(shape.get(key), int)
    ]
    layout, optimizer, schedule = Layout(**about["layout"]), config["optimizer"], config["schedule"]
    clipped = f", clipped to a norm of {optimizer['grad_clip_norm']:g}" if optimizer["grad_clip_norm"] else ""
    return {
        "model": f"{about['name']} ({shape.get('model_type', 'unknown')}): {', '.join(sizes)}; "
        f"{about['parameters']:,} parameters, from {config['model']['pretrained'] or config['model']['config']}",
        "grid": f"{layout.ranks} ranks of {about['device']}, {layout}, weights by {layout.weights}",
        "data": "; ".join(
            f"{source['path']} ({amount(source['tokens'])} tokens, weight {source['weight']:g})"
            for source in about["data"]
        ),
        "batch": f"{batch // length:,} sequences of {length:,} tokens ({amount(batch)} tokens per step)",
        "precision": f"{config['engine']['precision']}, activation checkpointing: {config['engine']['activation_checkpointing']}"
        + (", compiled blocks" if about.get("compiled") else ""),
        "optimizer": f"{optimizer['name']}, learning rate {optimizer['lr']:g}, weight decay {optimizer['weight_decay']:g}{clipped}",
        "schedule": f"{schedule['kind']} over {schedule['steps']:,} steps, {schedule['warmup_steps']:,} of warm-up",
        "seed": str(config["seed"]),
        "versions": ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
    }
