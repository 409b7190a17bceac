"""The metrics of GLUE (Wang et al. 2019, arXiv 1804.07461), as `evaluate.load` takes them.

    metric = evaluate.load("metrics/glue", "mrpc")
    metric.compute(predictions=[1, 0], references=[1, 1])

No network is needed. A configuration is a task, or `classification` (accuracy) or `regression`
(correlations) for data of one's own.
"""

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

_DESCRIPTION = """Accuracy; for mrpc and qqp also F1 of class 1; for cola Matthews' correlation
alone; for stsb those of Pearson and Spearman. An undefined correlation (a constant) counts as 0."""

_CITATION = """@inproceedings{wang2019glue,
  title={{GLUE}: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding},
  author={Wang, Alex and Singh, Amanpreet and Michael, Julian and Hill, Felix and Levy, Omer and
    Bowman, Samuel R.},
  booktitle={International Conference on Learning Representations},
  year={2019}
}"""

_F1 = ("mrpc", "qqp")
_CORRELATION = ("stsb", "regression")
_ACCURACY = (
    *("sst2", "mnli", "mnli_matched", "mnli_mismatched", "qnli", "rte", "wnli"),
    "classification",
)
CONFIGURATIONS = ("cola", *_F1, *_CORRELATION, *_ACCURACY)


def correlations(predictions: list[float], references: list[float]) -> dict[str, float]:
    """Pearson's and Spearman's correlation; 0 if one side is constant."""
    if np.ptp(predictions) == 0 or np.ptp(references) == 0:
        return {"pearson": 0.0, "spearmanr": 0.0}
    return {
        "pearson": float(pearsonr(predictions, references).statistic),
        "spearmanr": float(spearmanr(predictions, references).statistic),
    }


class Glue(evaluate.Metric):
    """One GLUE task's metrics."""

    def _info(self) -> evaluate.MetricInfo:
        """What goes in: integers, or numbers where correlations are asked for."""
        if self.config_name not in CONFIGURATIONS:
            raise ValueError(
                f"Expected one of the configurations {list(CONFIGURATIONS)}, got "
                f"{self.config_name!r}; pass it to `evaluate.load` as the second argument."
            )
        kind = datasets.Value("float32" if self.config_name in _CORRELATION else "int64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description="predictions and references: one label or number per example.",
            features=datasets.Features({"predictions": kind, "references": kind}),
            format="numpy",
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        """The task's metrics by name."""
        if self.config_name == "cola":
            return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}
        if self.config_name in _CORRELATION:
            return correlations(predictions, references)
        scores = {"accuracy": float(accuracy_score(references, predictions))}
        if self.config_name in _F1:
            scores["f1"] = float(f1_score(references, predictions, zero_division=0.0))
        return scores
