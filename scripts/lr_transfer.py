"""Does the best learning rate stay where it is when a model grows? A study of DP-muP.

For an MLP, a ViT and a GPT-2 on public data, at four widths each, the best rate is looked for under
three parametrizations: DP-muP, the standard one, and noise-free muP; with DP-SGD, DP-Adam and
DP-Muon, in full space and projected. Every run is one of `DPGrapeTrainer`. Runs that `runs.csv` in
the output folder holds are not repeated, so that an interrupted study goes on.

    python scripts/lr_transfer.py --output_dir runs/lr_transfer
    python scripts/lr_transfer.py --quick
"""

import argparse
import contextlib
import csv
import json
import math
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from lr_transfer_models import TASKS, Task, held_out_loss, noise_free_rates, per_sample_loss
from lr_transfer_report import Losses, best_rate, mean_loss, write_report
from rich.progress import track
from torch import nn

from hf_dpgrape import DPGrapeTrainer, DPGrapeTrainingArguments
from hf_dpgrape.hf.dpmup import width_transfer
from hf_dpgrape.optim.muon import MuonWithAdamW
from hf_dpgrape.width.initialization import initialize_mup_

SEEDS = (0, 1, 2)
#: Log2 of the rate where the search starts, by optimizer.
START = {"adamw_torch": -5.0, "sgd": 0.0, "muon": -4.0}
#: With Muon, the other tensors have AdamW at this multiple of the rate.
ADAMW_PER_MUON = 0.25
#: The search stops that many octaves from its start.
MAX_OCTAVES = 8
FIELDS = ("task", "optim", "method", "rank", "width", "log2_rate", "seed", "loss", "seconds")


class Setting(NamedTuple):
    """One line of the study: a best rate is looked for at every width."""

    task: str
    optim: str
    method: str  # dpmup, sp (standard) or mup (noise-free)
    rank: str  # a number, or "W/4"

    @property
    def widths(self) -> tuple[int, ...]:
        """The task's; halved for Muon on the MLP, whose orthogonalization is slow on a CPU."""
        widths = TASKS[self.task].widths
        halved = self.optim == "muon" and self.task == "mlp"
        return tuple(width // 2 for width in widths) if halved else widths

    def rank_at(self, width: int) -> int:
        return width // 4 if self.rank == "W/4" else int(self.rank)


class StudyTrainer(DPGrapeTrainer):
    """Finds the narrow model in the study's table, where others read a configuration."""

    def dpmup_proxy(self, base_model: str) -> nn.Module:
        task, _, width = base_model.rpartition(" ")
        return on_meta(TASKS[task], int(width))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The study tells its results itself."""


def on_meta(task: Task, width: int) -> nn.Module:
    with torch.device("meta"):
        return task.make(width)


def noise_at(setting: Setting, width: int) -> float:
    """Noise multiplier at a width: under DP-muP, that which keeps the ratio of signal to noise."""
    task = TASKS[setting.task]
    if setting.method != "dpmup":
        return task.noise
    base = setting.widths[0]

    def ratio(to: int) -> float:
        return width_transfer(
            on_meta(task, to),
            on_meta(task, base),
            optim=setting.optim,
            rank=setting.rank_at(to),
            proxy_rank=setting.rank_at(base),
            head=frozenset(),
        ).rules.noise_ratio

    return task.noise * ratio(setting.widths[-1]) / ratio(width)


def train(setting: Setting, width: int, log2_rate: float, seed: int, data: Any) -> float:
    """Loss on the held-out set after one private run."""
    task, rate = TASKS[setting.task], 2.0**log2_rate
    torch.manual_seed(seed)
    model = task.make(width)
    if setting.method != "sp":
        initialize_mup_(model)
    options: dict[str, Any] = {"learning_rate": rate}
    if setting.optim == "muon":
        options = {"learning_rate": ADAMW_PER_MUON * rate, "muon_learning_rate": rate}
    if setting.method == "dpmup":
        options |= {
            "dpmup_base_model": f"{setting.task} {setting.widths[0]}",
            "dpmup_base_rank": setting.rank_at(setting.widths[0]),
        }
    optimizer = None
    if setting.method == "mup":
        groups = noise_free_rates(model, on_meta(task, setting.widths[0]), setting.optim)
        groups = [{"params": ps, "lr": ratio * options["learning_rate"]} for ps, ratio in groups]
        kinds = {"sgd": torch.optim.SGD, "adamw_torch": torch.optim.AdamW, "muon": MuonWithAdamW}
        weight_decay = {"weight_decay": 0.0}
        optimizer = kinds[setting.optim](groups, lr=rate, **weight_decay)
    with tempfile.TemporaryDirectory() as folder:
        args = DPGrapeTrainingArguments(
            output_dir=folder,
            optim=setting.optim,
            noise_multiplier=noise_at(setting, width),
            target_delta=1e-5,
            clipping="automatic",
            clip_grouping="layer",
            expected_batch_size=task.batch_size,
            per_device_train_batch_size=4 * task.batch_size,
            max_steps=task.num_steps,
            lr_scheduler_type="linear",
            rank=setting.rank_at(width),
            unsafe_test_seed=seed,  # the data are public, and the study can be repeated
            seed=seed,
            accountant="rdp",
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            **options,
        )
        StudyTrainer(
            model=model,
            args=args,
            train_dataset=data[0],
            data_collator=data[0].collate,
            compute_loss_func=per_sample_loss if "mlp" in setting.task else None,
            optimizers=(optimizer, None),
        ).train()
    loss = held_out_loss(model, data[1])
    return min(loss, 1e3) if math.isfinite(loss) else 1e3


class Study:
    """Runs that are done, and the file that holds them."""

    def __init__(self, file: Path, lock: Any, seeds: tuple[int, ...]) -> None:
        self._file, self._lock, self._seeds = file, lock, seeds
        self.losses: Losses = {}
        if file.exists():
            with file.open(newline="") as opened:
                for row in csv.DictReader(opened):
                    key = (*(row[name] for name in FIELDS[:4]), int(row["width"]))
                    runs = self.losses.setdefault(key, {}).setdefault(float(row["log2_rate"]), {})
                    runs[int(row["seed"])] = (float(row["loss"]), float(row["seconds"]))

    def run(self, setting: Setting, width: int, rate: float, seeds: tuple[int, ...]) -> float:
        """Mean loss over some seeds; only what is missing is run."""
        runs = self.losses.setdefault((*setting, width), {}).setdefault(rate, {})
        for seed in seeds:
            if seed not in runs:
                start = time.process_time()
                loss = train(setting, width, rate, seed, self._data)
                runs[seed] = (loss, time.process_time() - start)
                with self._lock, self._file.open("a", newline="") as opened:
                    csv.writer(opened).writerow([*setting, width, rate, seed, *runs[seed]])
        return mean_loss({seed: runs[seed] for seed in seeds})

    def search(self, setting: Setting) -> None:
        """Best rates of all widths: by factors of 2 with one seed, then of sqrt(2) with all."""
        self._data = TASKS[setting.task].data()
        widths = setting.widths
        for width in widths:
            first = {r: self.run(setting, width, r, self._seeds[:1]) for r in self._start(setting)}
            while (edge := self._edge(first, START[setting.optim])) is not None:
                first[edge] = self.run(setting, width, edge, self._seeds[:1])
            center = min(first, key=first.__getitem__)
            refined = {
                center + step: self.run(setting, width, center + step, self._seeds)
                for step in (-1.0, -0.5, 0.0, 0.5, 1.0)
            }
            while (edge := self._edge(refined, center, 0.5)) is not None:
                refined[edge] = self.run(setting, width, edge, self._seeds)
            proxy = self.losses[(*setting, widths[0])]
            self.run(setting, width, round(2 * best_rate(proxy)) / 2, self._seeds)

    @staticmethod
    def _start(setting: Setting) -> list[float]:
        return [START[setting.optim] + step for step in (-1.0, 0.0, 1.0)]

    @staticmethod
    def _edge(losses: dict[float, float], start: float, step: float = 1.0) -> float | None:
        """The next rate to try if the best one is the first or the last so far."""
        best = min(losses, key=losses.__getitem__)
        if abs(best - start) >= MAX_OCTAVES:
            return None
        if best == min(losses):
            return best - step
        return best + step if best == max(losses) else None


def settings(quick: bool) -> list[Setting]:
    """All lines of the study, the slow ones first."""
    if quick:
        return [Setting("small mlp", "adamw_torch", method, "0") for method in ("dpmup", "sp")]
    methods, optims, tasks = (
        ("dpmup", "sp", "mup"),
        ("muon", "adamw_torch", "sgd"),
        ("mlp", "vit", "gpt2"),
    )
    full = [Setting(t, o, m, "0") for t in tasks for o in optims for m in methods]
    projected = [
        Setting("mlp", optim, method, rank)
        for optim in optims[1:]
        for method in methods[:2]
        for rank in ("16", "W/4")
    ]
    projected += [Setting(t, "adamw_torch", "dpmup", r) for t in tasks[1:] for r in ("8", "W/4")]
    return full + projected


def work(setting: Setting, file: Path, lock: Any, seeds: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    Study(file, lock, seeds).search(setting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output_dir", type=Path, default=Path("runs/lr_transfer"))
    parser.add_argument("--only", nargs="+", default=[], help="words that settings must have")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a small MLP under DP-Adam, two seeds")
    options = parser.parse_args()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    file = options.output_dir / "runs.csv"
    if not file.exists():
        file.write_text(",".join(FIELDS) + "\n")
    todo = [s for s in settings(options.quick) if all(word in s for word in options.only)]
    if not todo:
        parser.error(f"no setting has all of the words {options.only}")
    seeds = SEEDS[:2] if options.quick else SEEDS
    start = time.monotonic()
    if options.processes == 1:
        for setting in track(todo, "settings"):
            work(setting, file, contextlib.nullcontext(), seeds)
    else:
        context = multiprocessing.get_context("spawn")
        with context.Manager() as manager, ProcessPoolExecutor(options.processes, context) as pool:
            lock = manager.Lock()
            jobs = [pool.submit(work, setting, file, lock, seeds) for setting in todo]
            for job in track(as_completed(jobs), "settings", len(jobs)):
                job.result()
    found = write_report(Study(file, None, seeds).losses, options.output_dir)
    print(f"{len(todo)} settings in {(time.monotonic() - start) / 60:.1f} minutes.")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
