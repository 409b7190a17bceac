"""`scripts/run_glue.py` end to end on tiny models and local files; prompt models are exact."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from families import CAUSAL, CLASSIFY, MASKED
from oracle import select, worst_error
from test_scripts import ROOT, WORDS, command_line, results, run, save_model
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

import hf_dpgrape.hf.losses
from hf_dpgrape.gradients.observation import observe_layouts
from hf_dpgrape.gradients.recorder import Recorder
from hf_dpgrape.mechanism.tensors import make_projections, sites_or_problems

RunGlue = Callable[..., tuple[dict[str, Any], dict[str, float]]]


def rows(num: int = 24) -> dict[str, list[Any]]:
    """Two texts each; classes by name and number, and a real number."""
    texts = [" ".join(WORDS[i % 17 : i % 17 + 2 + i % 4]) for i in range(num)]
    return {
        "idx": list(range(num)),
        "sentence1": texts,
        "sentence2": [f'"{text}' for text in reversed(texts)],  # GLUE quotes nothing
        "label": [("not_entailment", "entailment")[i % 2] for i in range(num)],
        "number": [i % 3 for i in range(num)],
        "score": [float(i % 6) for i in range(num)],
    }


def write(path: Path, columns: dict[str, list[Any]]) -> str:
    """Writes rows in the format that the file's name says."""
    if path.suffix == ".tsv":
        table = [columns, *zip(*columns.values(), strict=True)]
        lines = ["\t".join(map(str, row)) for row in table]
        path.write_text("\n".join(lines) + "\n")
    else:
        write_as = {".csv": "to_csv", ".json": "to_json", ".parquet": "to_parquet"}[path.suffix]
        getattr(datasets.Dataset.from_dict(columns), write_as)(str(path))
    return str(path)


@pytest.fixture
def run_glue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunGlue:
    """Runs the script on a file of these rows; keyword arguments are its arguments."""

    def run_it(suffix: str, columns: dict[str, list[Any]] | None = None, **arguments: Any) -> Any:
        file = write(tmp_path / f"data.{suffix}", columns or rows())
        given: dict[str, Any] = {"train_file": file, "validation_file": file, **arguments}
        if "model_name_or_path" not in given:
            given["model_name_or_path"] = str(save_model(tmp_path / "model", "roberta", CLASSIFY))
        run("run_glue.py", command_line(given, tmp_path), monkeypatch, tmp_path)
        return results(tmp_path)

    return run_it


def labels_of(folder: Path) -> list[str]:
    """The names of the classes in a saved configuration, in their order."""
    names = json.loads((folder / "config.json").read_text())["id2label"]
    return [names[str(number)] for number in range(len(names))]


def test_pair_of_a_task_from_tsv(
    run_glue: RunGlue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, scores = run_glue("tsv", task_name="rte", max_train_samples=20, max_eval_samples=6)
    assert record["plan"]["num_examples"] == 20
    assert scores["eval_accuracy"] in {i / 6 for i in range(7)}
    assert labels_of(tmp_path / "out") == ["entailment", "not_entailment"]
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("epsilon=") and "at delta=0.01" in last
    assert f"eval_accuracy={scores['eval_accuracy']:.4g}" in last
    assert last.endswith(f"model and card in {tmp_path / 'out'}")


def test_one_sentence_with_named_columns(run_glue: RunGlue, tmp_path: Path) -> None:
    given = {"sentence1_column": "sentence2", "label_column": "number", "class_names": [0, 1, 2]}
    record, scores = run_glue("csv", train_samples_per_class=5, max_seq_length=4, **given)
    assert record["plan"]["num_examples"] == 15
    assert set(scores) >= {"eval_accuracy", "eval_loss"}
    assert labels_of(tmp_path / "out") == ["0", "1", "2"]
    assert record["unit_of_privacy"] == "one row of the training set"


@pytest.mark.parametrize("task", ["stsb", None])
def test_regression(run_glue: RunGlue, tmp_path: Path, task: str | None) -> None:
    _, scores = run_glue("json", label_column="score", task_name=task)
    assert set(scores) >= {"eval_pearson", "eval_spearmanr"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["problem_type"] == "regression" and len(config["id2label"]) == 1


def test_mnli_has_two_validation_sets(
    run_glue: RunGlue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder laid out as on the hub, where test rows have label -1."""
    names = ["entailment", "neutral", "contradiction"]
    features = datasets.Features(
        {key: datasets.Value("string") for key in ("premise", "hypothesis")}
        | {"label": datasets.ClassLabel(names=names)}
    )
    hub = tmp_path / "hub"
    hub.mkdir()
    splits = ["train", "validation_matched", "validation_mismatched", "test_matched"]
    for split in splits:
        made = rows(12)
        labels = [i % 3 if split[:4] != "test" else -1 for i in range(12)]
        columns = {"premise": made["sentence1"], "hypothesis": made["sentence2"], "label": labels}
        table = datasets.Dataset.from_dict(columns, features=features)
        table.to_parquet(str(hub / f"{split}.parquet"))
    files = [f"  - split: {split}\n    path: {split}.parquet" for split in splits]
    card = ["---", "configs:", "- config_name: default", "  data_files:", *files, "---", ""]
    (hub / "README.md").write_text("\n".join(card))
    given = {"train_file": None, "validation_file": None, "dataset_name": str(hub)}
    _, scores = run_glue("csv", task_name="mnli", **given)
    assert {"eval_matched_accuracy", "eval_mismatched_accuracy"} <= set(scores)
    assert labels_of(tmp_path / "out") == names
    shown = (tmp_path / "out" / "README.md").read_text()
    assert "| matched_accuracy |" in shown and "| mismatched_accuracy |" in shown


def test_mnli_from_files(run_glue: RunGlue, tmp_path: Path) -> None:
    labels = ["contradiction", "neutral"] * 6  # a class that is missing keeps its place
    made = rows(12)
    columns = {"premise": made["sentence1"], "hypothesis": made["sentence2"], "label": labels}
    second = write(tmp_path / "second.parquet", columns)
    _, scores = run_glue("parquet", columns, task_name="mnli", validation_mismatched_file=second)
    assert scores["eval_matched_accuracy"] == scores["eval_mismatched_accuracy"]
    assert labels_of(tmp_path / "out") == ["entailment", "neutral", "contradiction"]


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "causal"])
def test_prompts(run_glue: RunGlue, tmp_path: Path, masked: bool) -> None:
    """What is saved is the language model, with the prompt in its configuration."""
    family, head = ("roberta", MASKED) if masked else ("gpt2", CAUSAL)
    template = "{sentence1} s {mask} ; {sentence2}" if masked else "{sentence1} ; {sentence2} s"
    given: dict[str, Any] = {
        "model_name_or_path": str(save_model(tmp_path / "model", family, head)),
        "prompt_template": template,
        "label_words": ["y", "n"],
        "learning_rate": 0.1,
        "task_name": "rte",
    }
    record, scores = run_glue("tsv", **given)
    assert "eval_accuracy" in scores
    assert record["projection"]["num_projected"] > 0
    loader = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    model, info = loader.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.prompt_template == template
    assert model.config.label_words == ["y", "n"]
    before = loader.from_pretrained(given["model_name_or_path"])
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    assert all((after != first).any() for after, first in pairs)


def test_words_and_quotes_are_read_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word that looks like a missing value is none, and .tsv fields are not quoted."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    script_data = importlib.import_module("script_data")
    words = ["NA", '"a', "null", 'b "c"', ""]
    (tmp_path / "t.tsv").write_text("\n".join(["text\tn", *(f"{w}\t1" for w in words)]) + "\n")
    assert script_data.read_file(str(tmp_path / "t.tsv"))["text"][:] == [*words[:4], None]
    (tmp_path / "t.csv").write_text('text,n\n"NA, ""b""",1\n,2\n')
    assert script_data.read_file(str(tmp_path / "t.csv"))["text"][:] == ['NA, "b"', None]


@pytest.fixture
def prompt_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("prompt_model")


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "causal"])
def test_prompt_model_is_exact(
    prompt_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    """Logits are the language model's own; per-sample gradients equal one backward per sample."""
    family, head = ("roberta", MASKED) if masked else ("opt", CAUSAL)
    folder = save_model(tmp_path / "model", family, head)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = "{sentence1} s {mask} ." if masked else "{sentence1} s"
    words = {"template": template, "label_words": ["y", "n", "m"]}
    model = prompt_model.load_prompt_model(str(folder), tokenizer, **words).double().eval()
    texts = ["a b c", "d", "e f g h i", "j k"]
    prompts = [prompt_model.encode_prompt([t], template, tokenizer, 8) for t in texts]
    inputs = dict(tokenizer.pad(prompts, return_tensors="pt"), labels=torch.tensor([0, 2, 1, 2]))

    plain = (AutoModelForMaskedLM if masked else AutoModelForCausalLM).from_pretrained(folder)
    label_ids = tokenizer.convert_tokens_to_ids(["y", "n", "m"])
    for i, prompt in enumerate(prompts):
        ids = prompt["input_ids"]
        where = ids.index(tokenizer.mask_token_id) if masked else len(ids) - 1
        want = plain.double().eval()(input_ids=torch.tensor([ids])).logits[0, where, label_ids]
        got = model(**{key: inputs[key] for key in ("input_ids", "attention_mask")}).logits[i]
        assert torch.allclose(got, want, atol=1e-12)

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        made = hf_dpgrape.hf.losses.PerSampleLoss(model, prompt_model.per_sample_loss)
        return made(model, batch)

    one_by_one = torch.stack([model(**select(inputs, [i])).loss for i in range(4)])
    assert torch.allclose(loss(inputs), one_by_one, rtol=1e-10)
    projections = make_projections(model, rank=5, scale="1/r", seed=7, head=frozenset())
    sites, problems = sites_or_problems(model)
    assert not problems
    layouts = observe_layouts(model, sites, lambda i: loss(select(inputs, i)))
    recorder = Recorder(model, sites, projections, layouts)
    with recorder.record(4) as gradients:
        loss(inputs).sum().backward()
    error, name = worst_error(gradients, own_gradients(model, inputs), projections)
    assert error < 1e-10, name


def own_gradients(model: Any, inputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Gradients of every sample by one backward of the model's own loss each."""
    found = []
    for i in range(len(inputs["labels"])):
        model.zero_grad()
        model(**select(inputs, [i])).loss.backward()
        zeros = torch.zeros_like
        found.append(
            {n: zeros(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        )
    model.zero_grad()
    return found


def test_long_prompts_lose_text_not_the_mask(prompt_model: Any, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_model(tmp_path / "m", "roberta", MASKED))
    template = "{sentence1} s {mask} ; {sentence2}"

    def shown(first: str, second: str, limit: int) -> str:
        encoded = prompt_model.encode_prompt([first, second], template, tokenizer, limit)
        assert len(encoded["input_ids"]) == len(encoded["attention_mask"]) <= limit
        return tokenizer.decode(encoded["input_ids"])

    assert shown("a b c", "d e f g", 10) == "a b c s <mask> <unk> d e f g"
    assert shown("a b c", "d e f g", 8) == "a b c s <mask> <unk> d e"
    assert shown("a b c d e f", "g", 6) == "a b s <mask> <unk> g"
    with pytest.raises(SystemExit, match=r"The prompt alone has more than `--max_seq_length` 2"):
        shown("a", "b", 2)


RTE = {"task_name": "rte"}
WRONG = {
    "task": ({"task_name": "sst"}, r"Expected a `--task_name` of cola, .* got sst\."),
    "file": ({"train_file": "none.csv"}, r"found nothing at none\.csv"),
    "type": ({"train_file": str(ROOT / "LICENSE")}, r"of type txt, csv, .* got .*LICENSE"),
    "column": ({"sentence1_column": "text"}, r"Expected the columns \['text'\] .* found 6 others"),
    "label": ({"label_column": "class"}, r"Expected the columns \['class'\]"),
    "model": ({"model_name_or_path": "nobody/none"}, r"The model `nobody/none` is no local folder"),
    "no data": ({"train_file": None}, r"Expected `--train_file` or the hub name .* got neither"),
    "no network": (
        {"train_file": None, "task_name": "sst2"},
        r"The data set `nyu-mll/glue` is no local folder and could not be had from the hub "
        r"\(\w+\); download it elsewhere",
    ),
    "words": (
        {"prompt_template": "{sentence1} {sentence2} {mask}", "label_words": ["y"], **RTE},
        r"one of `--label_words` for each class \(\['entailment', 'not_entailment'\]\)",
    ),
    "unknown word": (
        {"prompt_template": "{sentence1} {sentence2} s", "label_words": ["y", "great"], **RTE},
        r"of one known token each, all different, .* great will not do",
    ),
    "template": ({"prompt_template": "{text} {mask}"}, r"with \['sentence1', 'sentence2'\] and"),
    "no mask": (
        {"prompt_template": "{sentence1} {sentence2} {mask}", "label_words": ["y", "n"], **RTE},
        r"has no mask; end the prompt where the word comes",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_sentence(
    run_glue: RunGlue, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, sentence = WRONG[case]
    with pytest.raises(SystemExit, match=sentence) as exit_:
        run_glue("parquet", **arguments)
    assert "\n" not in str(exit_.value)


def test_missing_and_unknown_labels(run_glue: RunGlue, tmp_path: Path) -> None:
    made = rows()
    file = write(tmp_path / "other.json", {**made, "label": ["maybe", "entailment"] * 12})
    with pytest.raises(SystemExit, match=r"classes entailment, not_entailment in .* found others"):
        run_glue("json", validation_file=file, **RTE)
    with pytest.raises(SystemExit, match=r"Expected a label in every row"):
        run_glue("json", {**made, "label": ["entailment", None] * 12}, **RTE)
    with pytest.raises(SystemExit, match=r"Expected different `--class_names`, got \['a', 'a'\]"):
        run_glue("json", class_names=["a", "a"])


# ---- What a record holds stays in the process ------------------------------------------------

MARKER = "zqxsecret"


def marked(num: int = 24) -> dict[str, list[Any]]:
    """Rows in which every text is a record's own."""
    made = rows(num)
    for column in ("sentence1", "sentence2"):
        made[column] = [f"{MARKER}{i} {text}" for i, text in enumerate(made[column])]
    return made


def said_and_written(tmp_path: Path, capfd: pytest.CaptureFixture[str], log: str) -> str:
    """All that left the process: both streams, the logs, names and contents of the files."""
    streams, folder = capfd.readouterr(), tmp_path / "out"
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    written = [path.read_bytes().decode("latin-1") for path in files]
    return "\n".join([streams.out, streams.err, log, *map(str, files), *written])


def headless(tmp_path: Path) -> str:
    """A CSV file whose first line is a record."""
    made = marked()
    names = ("sentence1", "sentence2", "label")
    lines = [",".join(row) for row in zip(*(made[name] for name in names), strict=True)]
    (tmp_path / "headless.csv").write_text("\n".join(line.replace('"', "") for line in lines))
    return str(tmp_path / "headless.csv")


def ragged(tmp_path: Path) -> str:
    (tmp_path / "ragged.csv").write_text(f"sentence1,label\na,1\n{MARKER},words,{MARKER},0\n")
    return str(tmp_path / "ragged.csv")


def mixed(tmp_path: Path) -> str:
    """Rows that are texts first and then something else."""
    lines = [{"sentence1": "a", "label": 0}, {"sentence1": {MARKER: MARKER}, "label": 1}]
    (tmp_path / "mixed.json").write_text("\n".join(map(json.dumps, lines)))
    return str(tmp_path / "mixed.json")


LEAKS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "texts as labels": (None, {"label_column": "sentence2"}, r"Expected `--class_names`"),
    "texts as labels, validation": (
        None,
        {"label_column": "sentence2", "task_name": "rte"},
        r"Expected the classes entailment, not_entailment in the column `sentence2`, found others",
    ),
    "texts as real numbers": (
        None,
        {"label_column": "sentence2", "task_name": "stsb"},
        r"Expected real numbers in the column `sentence2`, found something else",
    ),
    "no header": (headless, {}, r"Expected the columns \['label'\] in the data, found 3 others"),
    "more fields": (ragged, {}, r"Expected rows of one shape"),
    "other kinds": (mixed, {}, r"Expected a column of text in the data, found none in 2 columns"),
    "numbers as texts": (
        None,
        {"sentence1_column": "idx", "task_name": "rte"},
        r"one of them could not be encoded \(\w+\); check the columns",
    ),
    "long prompt": (
        None,
        {"prompt_template": "{sentence1} {sentence2} s", "label_words": ["y", "n"], **RTE}
        | {"max_seq_length": 0},
        r"The prompt alone has more than",
    ),
}


@pytest.mark.parametrize("case", LEAKS)
@pytest.mark.parametrize("has_validation", [True, False], ids=["validated", "train alone"])
def test_no_message_shows_a_record(
    run_glue: RunGlue,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    case: str,
    has_validation: bool,
) -> None:
    make, arguments, sentence = LEAKS[case]
    if make is not None:
        arguments = {**arguments, "train_file": make(tmp_path)}
    if not has_validation:
        arguments = {**arguments, "validation_file": None}
    capfd.readouterr()
    with pytest.raises(SystemExit, match=sentence) as exit_:
        run_glue("json", marked(), **arguments)
    left = said_and_written(tmp_path, capfd, caplog.text)
    assert MARKER not in left + str(exit_.value) and "\n" not in str(exit_.value)


def test_a_right_run_shows_no_record(
    run_glue: RunGlue,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Texts of which one is longer than the model takes; the files are read in full."""
    made = {**marked(), "kind": [("no", "yes")[i % 2] for i in range(24)]}
    made["sentence1"][5] += " a" * 200
    given = {"label_column": "kind", "class_names": ["yes", "no"]}
    run_glue("csv", made, logging_steps=1, log_level="info", max_seq_length=16, **given)
    left = said_and_written(tmp_path, capfd, caplog.text)
    assert '"epsilon"' in left and "tokenizer.json" in left  # the power of this test
    assert MARKER not in left
    assert labels_of(tmp_path / "out") == ["yes", "no"]


def test_lengths_of_prompts_are_not_told(
    prompt_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_model(tmp_path / "m", "roberta", MASKED))
    tokenizer.model_max_length = 5
    transformers_logger = logging.getLogger("transformers")
    transformers_logger.addHandler(caplog.handler)
    try:
        tokenizer("a " * 7)  # says so, once
        assert "Token indices sequence length" in caplog.text
        caplog.clear()
        tokenizer.deprecation_warnings.clear()
        prompt_model.encode_prompt(["a " * 9], "{sentence1} {mask}", tokenizer, 4)
        assert "Token indices" not in caplog.text
    finally:
        transformers_logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("task", "labels", "names"),
    [
        ("sst2", [0, 1], ["negative", "positive"]),
        (None, [False, True], ["False", "True"]),
    ],
)
def test_public_names_of_classes(
    run_glue: RunGlue, tmp_path: Path, task: str | None, labels: list[Any], names: list[str]
) -> None:
    """A task's numbers stand for its classes in their order."""
    made = {"sentence": rows()["sentence1"], "label": labels * 12}
    run_glue("json", made, task_name=task)
    assert labels_of(tmp_path / "out") == names


@pytest.mark.slow
def test_under_accelerate_launch(tmp_path: Path) -> None:
    file = write(tmp_path / "data.csv", rows())
    model = save_model(tmp_path / "model", "roberta", CLASSIFY)
    given = {"train_file": file, "validation_file": file, "model_name_or_path": str(model)}
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    words = [str(ROOT / "scripts" / "run_glue.py"), *command_line(given, tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        launcher + words, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "eval_accuracy" in results(tmp_path)[1]
