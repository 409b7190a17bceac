"""A run's report: evaluation and epsilon over its steps, in one HTML file or picture."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import jinja2

from hf_dpgrape.artifacts.model_card import last_evaluation, privacy_facts, tuning_facts
from hf_dpgrape.artifacts.plots import plot_run, save_figure
from hf_dpgrape.artifacts.record import RECORD_NAME, counts_in_full, finite, read_record
from hf_dpgrape.privacy.plan import PrivacyPlan

_STATE_NAME = "trainer_state.json"

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{{ title }}: private run</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 54rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { border-bottom: 1px solid #ddd; padding: .3rem .8rem .3rem 0; text-align: left;
         vertical-align: top }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
img { max-width: 100% }
</style>
<h1>{{ title }}</h1>
<p>epsilon <b>{{ epsilon }}</b> at delta {{ "%g" | format(record.target_delta) }},
{{ record.steps_done }} of {{ record.plan.num_steps }} steps.</p>
<img alt="Evaluation and epsilon over the steps" src="data:image/png;base64,{{ picture }}">
{% if rows -%}
<h2>Evaluation</h2>
<table>
<tr>{% for name in header %}<th class="number">{{ name }}</th>{% endfor %}</tr>
{% for row in rows -%}
<tr>{% for cell in row %}<td class="number">{{ cell }}</td>{% endfor %}</tr>
{% endfor -%}
</table>
{% endif -%}
{% for name, facts in tables -%}
<h2>{{ name }}</h2>
<table>
{% for key, value in facts -%}
<tr><th>{{ key }}</th><td>{{ value | replace("**", "") }}</td></tr>
{% endfor -%}
</table>
{% endfor -%}
</html>
"""


class RunReport:
    """What a finished or interrupted run left in its folder.

    Only evaluations and the privacy record are read. Raw training losses, which may stand in the
    logs if they were asked for, are left out.

    Args:
        folder: output folder of a run, or one of its checkpoints.

    Raises:
        ValueError: the folder has no privacy record, or no logs.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        record, state = _find(self.folder, RECORD_NAME), _find(self.folder, _STATE_NAME)
        self.record = read_record(record.parent)
        self.plan = PrivacyPlan.from_dict(self.record["plan"])
        self.logs = json.loads(state.read_text(encoding="utf-8"))["log_history"]

    def evaluations(self) -> dict[str, list[tuple[int, float]]]:
        """Metric -> its values with their steps."""
        found: dict[str, list[tuple[int, float]]] = {}
        for log in self.logs:
            for name, value in last_evaluation([log]).items():
                found.setdefault(name, []).append((int(log["step"]), value))
        return found

    def rows(self) -> list[dict[str, Any]]:
        """One row per evaluation: step, epsilon that counts (None if infinite), metrics.

        That is what was spent until then, or the whole plan's if results decided on a step.
        """
        by_step: dict[int, dict[str, Any]] = {}
        for name, points in self.evaluations().items():
            for step, value in points:
                by_step.setdefault(step, {})[name] = value
        in_full = counts_in_full(self.record)
        return [
            {
                "step": step,
                "epsilon": finite(self.plan.epsilon(self.plan.num_steps if in_full else step)),
                **by_step[step],
            }
            for step in sorted(by_step)
        ]

    def write(self, path: str | Path) -> None:
        """Writes the page, or the picture alone if the name does not end in .html.

        Raises:
            ValueError: matplotlib is not installed, or there is no such folder or format.
        """
        figure = plot_run(self.plan, self._steps_counted(), self.evaluations())
        if Path(path).suffix not in (".html", ".htm"):
            save_figure(figure, str(path))
            return
        picture = io.BytesIO()
        figure.savefig(picture, dpi=150)
        page = self._page(base64.b64encode(picture.getvalue()).decode())
        try:
            Path(path).write_text(page, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"`{path}` cannot be written ({error.strerror}).") from error

    def _steps_counted(self) -> int:
        return int(self.record.get("steps_counted", self.record["steps_done"]))

    def _page(self, picture: str) -> str:
        rows = self.rows()
        header = list(dict.fromkeys(name for row in rows for name in row))
        template = jinja2.Environment(autoescape=True).from_string(_PAGE)
        tables = [
            ("Privacy", privacy_facts(self.record)),
            ("Tuning and validation data", tuning_facts(self.record)),
        ]
        return template.render(
            title=self.folder.absolute().name,
            record=self.record,
            epsilon=_cell(self.record["epsilon"]),
            picture=picture,
            header=header,
            rows=[[_cell(row.get(name)) for name in header] for row in rows],
            tables=tables,
        )


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _find(folder: Path, name: str) -> Path:
    """A file of a run: in its folder, or in its last checkpoint."""
    checkpoints = sorted(folder.glob("checkpoint-*"), key=_step_of)
    found = [path / name for path in (folder, *reversed(checkpoints)) if (path / name).is_file()]
    if not found:
        raise ValueError(
            f"Expected the output folder of a private run with `{name}` in it or in a checkpoint, "
            f"got {folder}; save with `trainer.save_model()` and `trainer.save_state()`."
        )
    return found[0]


def _step_of(checkpoint: Path) -> int:
    digits = re.search(r"\d+$", checkpoint.name)
    return int(digits.group()) if digits else -1
