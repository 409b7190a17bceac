"""The scripts run end to end on tiny models and local files.

Covers: commands/presets.py.
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from families import CAUSAL, MASKED, make_config, make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_dpgrape.commands.cli import main
from hf_dpgrape.commands.presets import parse_arguments, preset_arguments
from hf_dpgrape.commands.width.coordinates import widened

ROOT = Path(__file__).parents[1]
WORDS = list("abcdefghijklmnopqrstuvwxyz")


#: What every run here has in common.
COMMON: dict[str, Any] = {
    "target_epsilon": 3,
    "target_delta": 1e-2,
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "rank": 4,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def save_model(folder: Path, family: str, head: str) -> Path:
    """Saves a tiny model with a tokenizer that has the letters as words."""
    make_model(family, head).float().save_pretrained(folder)
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>"}
    special |= {"mask_token": "<mask>"} if head == MASKED else {}
    words = [*special.values(), *WORDS]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "attention_mask"],
        **special,
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A tiny causal language model with a word tokenizer."""
    return save_model(tmp_path / "model", "gpt2", CAUSAL)


def run(script: str, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs a script in this process."""
    monkeypatch.setattr("sys.argv", [script, *words])
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")


def command_line(arguments: dict[str, Any], tmp_path: Path) -> list[str]:
    """A preset of these arguments and the common ones."""
    preset = tmp_path / "preset.yaml"
    preset.write_text(yaml.safe_dump({**COMMON, "output_dir": str(tmp_path / "out"), **arguments}))
    return [str(preset)]


def results(tmp_path: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """The privacy record and the evaluation of a run that did what it was asked for."""
    record = json.loads((tmp_path / "out" / "privacy.json").read_text())
    assert record["steps_done"] == record["plan"]["num_steps"] == 2
    assert 2.9 < record["epsilon"] <= 3
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert "**" in (tmp_path / "out" / "README.md").read_text()
    return record, json.loads((tmp_path / "out" / "eval_results.json").read_text())


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_run_clm(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    train = tmp_path / f"train.{kind}"
    if kind == "txt":
        lines = [" ".join(WORDS[i % 20 : i % 20 + 3 + i % 4]) for i in range(30)]
    else:
        lines = [json.dumps({"meaning": f"a b {w}", "said": f"{w} c d"}) for w in WORDS]
    train.write_text("\n".join(lines) + "\n")
    arguments = {
        "model_name_or_path": str(model_folder),
        "train_file": str(train),
        "validation_file": str(train),
        "max_steps": 9,
    }
    if kind == "jsonl":
        arguments |= {"prompt_column": "meaning", "target_column": "said"}
    words = command_line(arguments, tmp_path)
    run("run_clm.py", [*words, "--max_steps", "2"], monkeypatch, tmp_path)
    assert "perplexity" in results(tmp_path)[1]
    assert main(["report", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000


def test_prompts_and_targets_from_templates(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fields of fields are found, the loss is on the target, a long prompt loses its beginning."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = runpy.run_path(str(ROOT / "scripts" / "run_clm.py"), run_name="imported")
    rows = {"asked": ["a b c", "a b c d e f g"], "said": [{"text": ["x y"]}, {"text": ["z"]}]}
    data = script["DataArguments"](
        prompt_template="q {asked}", target_template="{said[text][0]}", block_size=6
    )
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    encoded = script["tokenize"](datasets.Dataset.from_dict(rows), data, tokenizer)
    texts = [tokenizer.decode(ids) for ids in encoded["input_ids"]]
    assert texts == ["a b c x y <eos>", "d e f g z <eos>"]
    assert [sum(label != -100 for label in labels) for labels in encoded["labels"]] == [3, 2]
    data.prompt_template = "{questions} {said}"
    with pytest.raises(SystemExit, match=r"Expected the columns \['questions'\]"):
        script["tokenize"](datasets.Dataset.from_dict(rows), data, tokenizer)


def rows_of(
    texts: list[str], tokenizer: Any, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Any:
    """What `run_clm.py` makes of some texts."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = runpy.run_path(str(ROOT / "scripts" / "run_clm.py"), run_name="imported")
    data = script["DataArguments"](block_size=4, **options)
    return script["tokenize"](datasets.Dataset.from_dict({"text": texts}), data, tokenizer)


@pytest.mark.parametrize("split_texts", [False, True])
def test_no_text_moves_the_blocks_of_another(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, split_texts: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    texts = ["a b c", "d e f g h i", "j"]
    found = rows_of(texts, tokenizer, monkeypatch, split_texts=split_texts)
    shown = [tokenizer.decode(ids) for ids in found["input_ids"]]
    rest = ["h i <eos>"] if split_texts else []
    assert shown == ["a b c <eos>", "d e f g", *rest, "j <eos>"]
    assert [list(labels) for labels in found["labels"]] == [list(i) for i in found["input_ids"]]
    longer = rows_of(["x y", *texts], tokenizer, monkeypatch, split_texts=split_texts)
    assert longer["input_ids"][1:] == found["input_ids"][:]


def test_blocks_of_a_text_are_named_on_record_and_card(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = tmp_path / "train.txt"
    train.write_text("\n".join(" ".join(WORDS) for _ in range(10)) + "\n")
    given = {"model_name_or_path": str(model_folder), "train_file": str(train)}
    given |= {"validation_file": str(train), "block_size": 10, "example_unit": "one letter"}
    words = command_line(given, tmp_path)
    run("run_clm.py", [*words, "--split_texts"], monkeypatch, tmp_path)
    record, _ = results(tmp_path)
    unit = "one block of 10 tokens out of one letter, which may have several"
    assert record["unit_of_privacy"] == unit and record["plan"]["num_examples"] == 30
    assert f"| unit of privacy | {unit} |" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(SystemExit, match="whole texts for `--split_texts`, got prompts"):
        more = ["--split_texts", "--prompt_column", "text"]
        run("run_clm.py", [*words, *more], monkeypatch, tmp_path)


def test_documented_grouping_keeps_texts_apart() -> None:
    """The functions of docs/existing_code.md; in the official one, a text moves all blocks."""
    text = (ROOT / "docs" / "existing_code.md").read_text()
    blocks = [b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "group_texts" in b]
    texts = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]]
    wanted = [[texts[0], [4, 5, 6, 7], [10]], [texts[0], [4, 5, 6, 7], [8, 9], [10]]]
    for block, want in zip(blocks, wanted, strict=True):
        namespace: dict[str, Any] = {"block_size": 4}
        exec(block, namespace)
        found = namespace["group_texts"]({"input_ids": texts})
        assert found == {"input_ids": want, "labels": want}
        longer = namespace["group_texts"]({"input_ids": [[0, 0], *texts]})
        assert longer["input_ids"][1:] == want

    def official(texts: list[list[int]]) -> list[list[int]]:
        joined = [token for text in texts for token in text]
        return [joined[i : i + 4] for i in range(0, len(joined) // 4 * 4, 4)]

    before, after = official(texts), official([[0, 0], *texts])
    assert not any(block in after for block in before)


MARKER = "zqxsecret"

CLM_LEAKS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no header": ("csv", {}, r"Expected the columns \['text'\] in the data, found 2 others"),
    "field of a text": (
        "jsonl",
        {"target_template": "{said[answer]}"},
        r"one of them could not be encoded \(TypeError\)",
    ),
    "part that a list has not": (
        "jsonl",
        {"target_template": "{list[1]}"},
        r"one of them could not be encoded \(IndexError\)",
    ),
    "as a number": (
        "jsonl",
        {"target_template": "{said:.3f}"},
        r"one of them could not be encoded \(ValueError\)",
    ),
    "broken line": ("json", {}, r"Expected rows of one shape"),
}


@pytest.mark.parametrize("case", CLM_LEAKS)
def test_no_message_of_run_clm_shows_a_record(
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    case: str,
) -> None:
    kind, arguments, sentence = CLM_LEAKS[case]
    line = json.dumps({"said": f"{MARKER} a", "list": [MARKER]})
    lines = {"csv": f"{MARKER} a,b\nc,d\n", "jsonl": f"{line}\n" * 4}
    (tmp_path / f"train.{kind}").write_text(lines.get(kind, f"{line}\n{MARKER}"))
    given = {"train_file": str(tmp_path / f"train.{kind}"), **arguments}
    words = command_line({"model_name_or_path": str(model_folder), **given}, tmp_path)
    with pytest.raises(SystemExit, match=sentence) as exit_:
        run("run_clm.py", words, monkeypatch, tmp_path)
    streams = capfd.readouterr()
    assert MARKER not in streams.out + streams.err + caplog.text + str(exit_.value)


def test_run_clm_leaves_no_text_behind(
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither a text nor how long one is, of which transformers warns."""
    train = tmp_path / "train.txt"
    train.write_text("\n".join(f"{MARKER}{i} a b" + " c" * (90 * (i == 3)) for i in range(20)))
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.model_max_length = 16
    tokenizer.save_pretrained(model_folder)
    given = {"model_name_or_path": str(model_folder), "train_file": str(train), "block_size": 8}
    given |= {"validation_file": str(train), "logging_steps": 1}
    run("run_clm.py", command_line(given, tmp_path), monkeypatch, tmp_path)
    streams = capfd.readouterr()
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    written = [path.read_bytes().decode("latin-1") for path in files]
    left = "\n".join([streams.out, streams.err, caplog.text, *written])
    assert '"epsilon"' in left and MARKER not in left
    assert "longer than the specified maximum" not in left


def test_run_clm_says_what_is_missing(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--model_name_or_path", str(model_folder), "--output_dir", str(tmp_path / "out")]
    words += ["--noise_multiplier", "1", "--target_delta", "1e-3", "--report_to", "none"]
    with pytest.raises(SystemExit, match="got neither"):
        run("run_clm.py", words, monkeypatch, tmp_path)
    with pytest.raises(SystemExit, match="found nothing at nowhere"):
        run("run_clm.py", [*words, "--train_file", "nowhere.txt"], monkeypatch, tmp_path)


PRESETS = sorted((ROOT / "training_args").rglob("*.yaml"))

#: Training examples of the presets that take all of a data set, by its name on the hub.
NUM_EXAMPLES = {"mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000, "sst2": 67_349}


def num_examples(values: dict[str, Any]) -> int:
    """On how many examples a preset trains."""
    if "train_samples_per_class" in values:
        return values["train_samples_per_class"] * len(values["label_words"])
    name = values.get("dataset_name") or values.get("task_name")
    return values.get("max_train_samples") or NUM_EXAMPLES.get(name, 10_000)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_presets_parse_and_calibrate(
    preset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line names the script, which knows every argument; the plan keeps its epsilon."""
    first = preset.read_text().splitlines()[0]
    found = re.fullmatch(r"# scripts/(run_\w+\.py): (.{20,})", first)
    assert found, first
    assert "arXiv 2506.15588" in first or found[2].startswith("ours")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    namespace = runpy.run_path(str(ROOT / "scripts" / found[1]), run_name="imported")
    kinds = [namespace[name] for name in ("ModelArguments", "DataArguments")]
    words = [str(preset), "--output_dir", str(tmp_path)]
    model, _, args = parse_arguments([*kinds, namespace["DPGrapeTrainingArguments"]], words)
    values = yaml.safe_load(preset.read_text())
    plan = args.make_plan(num_examples(values), has_head=True)
    assert plan.epsilon() <= args.target_epsilon
    assert plan.epsilon() > 0.99 * args.target_epsilon
    assert plan.target_delta <= 1 / plan.num_examples
    assert args.expected_batch_size % args.per_device_train_batch_size == 0
    assert getattr(model, "model_name_or_path", None) or model.model_type


def test_all_published_experiments_have_a_preset() -> None:
    names = {str(p.relative_to(ROOT / "training_args").with_suffix("")) for p in PRESETS}
    texts = ("sst2", "sst5", "snli", "mnli", "rte", "trec")
    want = {f"roberta_large/{t}_epsilon_{e}" for t in texts for e in (2, 6)}
    want |= {
        f"opt_{size}/{t}"
        for size in ("1.3b", "2.7b", "6.7b")
        for t in ("sst2", "boolq", "squad", "drop")
    }
    pictures = ("mnist", "cifar10", "cifar100")
    want |= {f"vit_base/{t}_epsilon_{e}" for t in pictures for e in (1, 2, 4, 8)}
    assert want <= names
    assert {name.partition("/")[0] for name in names - want} == {"ours", "opt_6.7b_24gb"}
    for name in want:
        _, _, epsilon = name.partition("_epsilon_")
        values = yaml.safe_load((ROOT / "training_args" / f"{name}.yaml").read_text())
        assert values["target_epsilon"] == int(epsilon or 2)


@pytest.mark.parametrize("name", ["run_glue", "run_clm", "run_image_classification"])
def test_scripts_are_short(name: str) -> None:
    assert len((ROOT / "scripts" / f"{name}.py").read_text().splitlines()) <= 150


def test_wrong_presets(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected a preset file"):
        preset_arguments(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ValueError, match="lines `name: value`"):
        preset_arguments(tmp_path / "list.yaml")


def test_run_clm_from_scratch_with_a_transfers_preset(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way that docs/dpmup.md describes, from `transfer` to a record."""
    for name, factor in (("narrow", 1), ("wide", 2)):
        config = widened(make_config("gpt2"), factor)
        config.tie_word_embeddings = False
        config.architectures = ["GPT2LMHeadModel"]
        config.save_pretrained(tmp_path / name)
    train, preset = tmp_path / "train.txt", tmp_path / "preset.yaml"
    train.write_text("\n".join(" ".join(WORDS[i % 20 : i % 20 + 4]) for i in range(30)) + "\n")
    words = ["--num_examples", "30", "--expected_batch_size", "6", "--max_steps", "2"]
    words += ["--target_epsilon", "3", "--target_delta", "1e-2", "--output", str(preset)]
    ends = ["--base", str(tmp_path / "narrow"), "--target", str(tmp_path / "wide")]
    assert main(["transfer", *ends, *words, "--optim", "muon", "--rank", "4"]) == 0
    more = ["--tokenizer_name", str(model_folder), "--train_file", str(train)]
    more += ["--output_dir", str(tmp_path / "out"), "--report_to", "none", "--save_strategy", "no"]
    run("run_clm.py", [str(preset), *more, "--disable_tqdm", "true"], monkeypatch, tmp_path)
    record = json.loads((tmp_path / "out" / "privacy.json").read_text())
    assert record["dpmup"]["base_model"] == "narrow" and record["dpmup"]["optimizer"] == "muon"
    assert record["steps_done"] == 2 and 2.9 < record["epsilon"] <= 3


def test_run_clm_needs_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = tmp_path / "train.txt"
    train.write_text("a b c\n")
    words = ["--train_file", str(train), "--output_dir", str(tmp_path / "out")]
    words += ["--noise_multiplier", "1", "--target_delta", "1e-3", "--report_to", "none"]
    for more in ([], ["--config_name", str(tmp_path)]):
        with pytest.raises(SystemExit, match="or `--config_name` with `--tokenizer_name`"):
            run("run_clm.py", [*words, *more], monkeypatch, tmp_path)
