"""`scripts/run_glue.py` end to end on tiny models and local files; prompt models are exact."""

from __future__ import annotations

import importlib
import json
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

import hf_dpgrape.losses
from hf_dpgrape.capture.capture import Recorder
from hf_dpgrape.capture.observation import observe_layouts
from hf_dpgrape.engine.tensors import make_projections, sites_or_problems

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
    given = {"sentence1_column": "sentence2", "label_column": "number"}
    record, scores = run_glue("csv", train_samples_per_class=5, max_seq_length=4, **given)
    assert record["plan"]["num_examples"] == 15
    assert set(scores) >= {"eval_accuracy", "eval_loss"}
    assert labels_of(tmp_path / "out") == ["0", "1", "2"]


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
        made = hf_dpgrape.losses.PerSampleLoss(model, prompt_model.per_sample_loss)
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


WRONG = {
    "task": ({"task_name": "sst"}, r"Expected a `--task_name` of cola, .* got sst\."),
    "file": ({"train_file": "none.csv"}, r"found nothing at none\.csv"),
    "type": ({"train_file": str(ROOT / "LICENSE")}, r"of type txt, csv, .* got .*LICENSE"),
    "column": ({"sentence1_column": "text"}, r"Expected the columns \['text'\] .* found \['idx'"),
    "label": ({"label_column": "class"}, r"Expected the columns \['class'\]"),
    "model": ({"model_name_or_path": "nobody/none"}, r"The model `nobody/none` is no local folder"),
    "no data": ({"train_file": None}, r"Expected `--train_file` or the hub name .* got neither"),
    "no network": (
        {"train_file": None, "task_name": "sst2"},
        r"The data set `nyu-mll/glue` is no local folder and could not be had from the hub "
        r"\(\w+\); download it elsewhere",
    ),
    "words": (
        {"prompt_template": "{sentence1} {sentence2} {mask}", "label_words": ["y"]},
        r"one of `--label_words` for each class \(\['entailment', 'not_entailment'\]\)",
    ),
    "unknown word": (
        {"prompt_template": "{sentence1} {sentence2} s", "label_words": ["y", "great"]},
        r"of one known token each, all different, .* great will not do",
    ),
    "template": ({"prompt_template": "{text} {mask}"}, r"with \['sentence1', 'sentence2'\] and"),
    "no mask": (
        {"prompt_template": "{sentence1} {sentence2} {mask}", "label_words": ["y", "n"]},
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
    """The sentence counts kinds of labels, and shows no record."""
    made = rows()
    file = write(tmp_path / "other.json", {**made, "label": ["maybe", "entailment"] * 12})
    with pytest.raises(SystemExit, match=r"entailment, not_entailment\) .* found 1 others"):
        run_glue("json", validation_file=file)
    with pytest.raises(SystemExit, match=r"Expected a label in every row"):
        run_glue("json", {**made, "label": ["entailment", None] * 12})
    ragged = tmp_path / "ragged.csv"
    ragged.write_text("sentence1,label\na,1\nsecret,words,more,0\n")
    with pytest.raises(SystemExit, match=r"Expected rows of one shape") as exit_:
        run_glue("json", train_file=str(ragged))
    assert "secret" not in str(exit_.value)


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
