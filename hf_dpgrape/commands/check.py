"""`hf-dpgrape check`: what happens to each tensor of a model, and whether it is exact."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from torch import nn

    from hf_dpgrape.hf.models import ModelReport
    from hf_dpgrape.mechanism.checks import Preflight

#: Parameters above which a model is rehearsed with fewer layers, which repeat each other.
_MOST_PARAMETERS = 200_000_000

#: What configurations call their numbers of layers.
_DEPTHS = (
    "num_hidden_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)


def add_parser(commands: Any) -> None:
    """Adds `check`."""
    check = commands.add_parser("check", help="what happens to each tensor of a model")
    check.set_defaults(run=_check)
    add = check.add_argument
    add("model", metavar="MODEL_OR_CONFIG", help="folder, config.json or name on the Hub")
    add("--rank", type=int, default=16, help="rank of the projection, 0 for none (default: 16)")
    add("--task", default="auto", help="head, as `causal-lm` (default: the configuration's own)")
    add("--head_modules", nargs="+", help="parts of names of the tensors that form a new head")
    add("--no_rehearsal", action="store_true", help="do not run the model on synthetic examples")


def _check(arguments: argparse.Namespace) -> int:
    # Here, so that `budget` starts without torch and transformers.
    from hf_dpgrape.hf.models import build_on_meta, inspect_model, load_config
    from hf_dpgrape.hf.task_losses import loss_of
    from hf_dpgrape.mechanism.tensors import refused_modules

    model = build_on_meta(load_config(arguments.model), arguments.task)
    report = inspect_model(model, rank=arguments.rank, head_modules=arguments.head_modules)
    has_loss = loss_of(model) is not None
    said = "not done"
    if has_loss and not refused_modules(model) and not arguments.no_rehearsal:
        report, said = _with_rehearsal(report, model, arguments)
    facts = {"has_loss": has_loss, "rehearsal": said}
    if arguments.json:
        print(json.dumps({**report.to_dict(), **facts}, indent=2, allow_nan=False))
    else:
        tables = [_tensor_table(report), _totals_table(report, has_loss, said)]
        Console().print(*tables, *([_refused_table(report)] if report.refused else []))
    return 1 if report.refused else 0


def _with_rehearsal(
    report: ModelReport, model: nn.Module, arguments: argparse.Namespace
) -> tuple[ModelReport, str]:
    """The report with what a rehearsal refuses, and the rehearsal's outcome in words."""
    from hf_dpgrape.hf.models import build_model, inspect_model, load_config
    from hf_dpgrape.mechanism.checks import cause_of

    config, depth = load_config(arguments.model), ""
    if sum(p.numel() for p in model.parameters()) > _MOST_PARAMETERS:
        for name in _DEPTHS:
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, min(2, getattr(config, name)))
        depth = ", with two layers of each kind"
    config.dtype = "float32"
    small = build_model(config, arguments.task, device="cpu")
    preflight = _preflight(small, arguments)
    try:
        _, found = preflight.rehearsed_in_batches()
    except Exception as error:  # as `capture="auto"` goes on from whatever it is
        cause = cause_of(small, error)
        try:
            preflight.single()
        except ValueError as final:
            refused = dict(getattr(final, "problems", {report.architecture: str(final)}))
            return replace(report, refused=refused), f"refused{depth}"
        alone = inspect_model(
            model, rank=arguments.rank, head_modules=arguments.head_modules, one_by_one=True
        )
        return alone, f"one example at a time{depth}: {cause}"
    worst = max(found.errors.values())
    return report, f"exact within {worst:.0e} of one backward per example{depth}"


def _preflight(model: nn.Module, arguments: argparse.Namespace) -> Preflight:
    """Rehearses a model with random weights on synthetic examples."""
    from hf_dpgrape.commands.memory.setting import Setting, make_batch
    from hf_dpgrape.hf.losses import PerSampleLoss
    from hf_dpgrape.hf.models import new_head
    from hf_dpgrape.hf.task_losses import labels_are_tokens
    from hf_dpgrape.mechanism.checks import Preflight
    from hf_dpgrape.mechanism.synthetic import SyntheticExamples
    from hf_dpgrape.mechanism.tensors import make_projections

    structure = make_batch(model, Setting(batch_size=1, seq_len=12), 1)
    loss = PerSampleLoss(model)
    projections = make_projections(
        model,
        rank=arguments.rank,
        scale="1/sqrt(r)",
        seed=0,
        head=new_head(model, arguments.head_modules),
    )
    tokens = labels_are_tokens(model)
    return Preflight(
        model=model,
        projections=projections,
        examples=SyntheticExamples(model, structure, labels_are_tokens=tokens),
        losses=lambda inputs: loss(model, inputs),
        settle=lambda inputs: loss.settle(model, inputs),
        take_own_loss_=loss.take_own_,
    )


def _tensor_table(report: ModelReport) -> Table:
    table = Table(title=report.architecture)
    table.add_column("tensor", overflow="fold")
    for column in ("shape", "projected", "rule"):
        table.add_column(column)
    for t in report.tensors:
        projected = "-" if t.shape == t.projected_shape else _shape(t.projected_shape)
        table.add_row(t.name, _shape(t.shape), projected, t.rule)
    return table


def _refused_table(report: ModelReport) -> Table:
    table = Table(title="Refused: freeze or replace it before training")
    table.add_column("tensor or module", overflow="fold")
    table.add_column("reason")
    for name, reason in report.refused.items():
        table.add_row(name, escape(reason))
    return table


def _totals_table(report: ModelReport, has_loss: bool, rehearsal: str) -> Table:
    table = Table(title="Totals", show_header=False)
    share = report.num_projected_parameters / max(report.num_parameters, 1)
    table.add_row("tensors that can be trained", f"{len(report.tensors):,}")
    table.add_row("parameters in them", f"{report.num_parameters:,}")
    table.add_row("share of parameters projected", f"{share:.1%}")
    table.add_row("floats per sample", f"{report.num_floats_per_sample:,}")
    table.add_row("taken for a new head", ", ".join(report.head) or "none")
    table.add_row("per-sample loss", "built in" if has_loss else "pass `compute_loss_func`")
    table.add_row("rehearsal", rehearsal)
    table.add_row("refused", f"{len(report.refused):,}")
    return table


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
