"""The part of the sweep that runs in a child process: everything about one architecture."""

from __future__ import annotations

import traceback
from dataclasses import replace
from multiprocessing.connection import Connection

import torch
from support.architectures import architecture
from support.sweep import Row
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from introspect.hooks.observe import observe
from introspect.hooks.shrink import IDENTITY, build_on_meta
from introspect.hooks.twin import run_twin
from introspect.records import RunShape

RUNS = (RunShape(phase="prefill", seq=16), RunShape(phase="decode", seq=1, context=16))
NO_CACHE = "keeps no cache"


def run_type(model_type: str, connection: Connection) -> None:
    """Trace the type's model in both phases and run its twin; send the row after each step."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    row = Row(model_type=model_type)
    try:
        model_class, config = architecture(model_type)
        for run in RUNS:
            row = _traced(row, model_class, config, run)
            connection.send(row)
        row = _compared(row, model_class, config)
    except Exception as error:  # the sweep goes on; the row says what stopped this type
        row = replace(row, reason=_one_line(error))
    connection.send(row)
    connection.close()


def _traced(row: Row, model_class: type[PreTrainedModel], config: PreTrainedConfig, run: RunShape) -> Row:
    trace = observe(build_on_meta(model_class, config), IDENTITY, run)
    answer = "no cache" if any(NO_CACHE in note for note in trace.assumptions) else "yes"
    names = {op.op for op in trace.unclassified} | set(filter(None, row.unclassified.split(" ")))
    row = replace(row, unclassified=" ".join(sorted(names)))
    return replace(row, prefill=answer) if run.phase == "prefill" else replace(row, decode=answer)


def _compared(row: Row, model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Row:
    report = run_twin(model_class, config)
    row = replace(row, twin="yes" if report.verified else "no", twin_parameters=str(report.parameters))
    if report.verified:
        return row
    if report.differences:
        return replace(row, reason="; ".join(report.differences[:3]))
    error = report.output_error
    return replace(row, reason="no finite logit" if error is None else f"logits differ by {error:.1e}")


def _one_line(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:160]
    return f"{type(error).__name__} at {place.filename.rsplit('/', 1)[-1]}:{place.lineno}: {text}"
