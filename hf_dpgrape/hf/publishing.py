"""What leaves for the Hugging Face Hub: weights, processing class, privacy record and card."""

from __future__ import annotations

import functools
import glob
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils.hub import PushInProgress

from hf_dpgrape.artifacts.model_card import last_evaluation, render_card
from hf_dpgrape.artifacts.record import RECORD_NAME
from hf_dpgrape.hf.task_losses import head_of, task_name_of

CARD_NAME = "README.md"

_WEIGHTS_NAME, _INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
_MODEL_FILES = ("config.json", "generation_config.json", _WEIGHTS_NAME, _INDEX_NAME)
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class Publisher:
    """Writes a trainer's card, and pushes to the Hub.

    The stock Trainer pushes the whole output folder but its checkpoints. Here a file leaves only
    if it is known to hold nothing but what the guarantee covers.

    Guarantees:
        A push uploads files of `published_files` and the card, nothing else: no state of
        optimizer or generators, no logs, no pickled training arguments (which hold paths, a
        token of the Hub, and a test's seed).

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def folder(self, output_dir: str | None = None) -> Path:
        """Where to write: the given folder, else `args.output_dir`."""
        folder = output_dir or self._trainer.args.output_dir
        assert folder is not None
        return Path(folder)

    def write_card(
        self,
        record: Mapping[str, Any],
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        **_of_the_data: object,
    ) -> None:
        """Writes the card of this privacy record into the output folder.

        Args:
            record: the privacy record.
            language: as in `Trainer.create_model_card`, as are those that follow.
            license: of the model.
            tags: for the Hub.
            model_name: default: the name of repository or output folder.
            finetuned_from: default: what the model was loaded from.
            _of_the_data: what the Trainer's card would tell of the data set; not used.
        """
        trainer, model = self._trainer, self._model()
        folder = self.folder()
        folder.mkdir(parents=True, exist_ok=True)
        config = getattr(model, "config", None)
        base = finetuned_from or getattr(config, "_name_or_path", "") or None
        is_local = base is not None and (os.path.isabs(base) or os.path.isdir(base))
        card = render_card(
            record,
            model_name=model_name or self._model_name(),
            task=task_name_of(head_of(model)),
            base_model=None if is_local else base,
            metrics=last_evaluation(trainer.state.log_history),
            language=language,
            license=license,
            tags=[tags] if isinstance(tags, str) else tags,
            library_name="peft" if hasattr(model, "peft_config") else "transformers",
        )
        card.save(folder / CARD_NAME)

    def push(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        tags: str | list[str] | None = None,
        **card: Any,
    ) -> Any:
        """As `push_to_hub` of the trainer.

        Args:
            commit_message: of the commit.
            blocking: whether to wait until the upload has ended.
            token: of the Hub; default: `hub_token`.
            revision: branch; default: `hub_revision`.
            private: whether a new repository is private.
            tags: for the card, beside the model's own.
            card: other arguments of `create_model_card`.
        """
        trainer, args, model = self._trainer, self._trainer.args, self._model()
        trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
        token = token or args.hub_token
        if trainer.hub_model_id is None:
            trainer.init_hf_repo(token=token, private=private)
        trainer.save_model(_internal_call=True)
        if not trainer.is_world_process_zero():
            return None
        own_tags = getattr(model, "model_tags", None) or []
        given = [tags] if isinstance(tags, str) else [*(tags or [])]
        trainer.create_model_card(tags=[*given, *(t for t in own_tags if t not in given)], **card)
        return self._upload(
            commit_message or "End of training",
            token=token,
            revision=revision or args.hub_revision,
            run_as_future=not blocking,
        )

    def push_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes the model of a checkpoint, which was just saved, in the background.

        Its files are copied into the output folder first, because the checkpoint may be removed
        before the upload has ended. With `hub_always_push` that waits for the push before.
        """
        trainer, args = self._trainer, self._trainer.args
        if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        running = trainer.push_in_progress
        if running is not None and not running.is_done() and not args.hub_always_push:
            return
        trainer._finish_current_push()
        trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
        for name in self.published_files(checkpoint_folder):
            target = self.folder() / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(checkpoint_folder) / name, target)
        trainer.create_model_card()
        state = trainer.state
        by_steps = args.save_strategy == SaveStrategy.STEPS
        when = f"step {state.global_step}" if by_steps else f"epoch {state.epoch or 0:g}"
        job = self._upload(
            f"Training in progress, {when}",
            token=args.hub_token,
            revision=args.hub_revision,
            run_as_future=True,
        )
        trainer.push_in_progress = PushInProgress([job])  # type: ignore[arg-type,assignment]

    def before_saving(self, output_dir: str | None) -> None:
        """Waits until no push reads the folder: weights and record belong together."""
        if self.folder(output_dir) == self.folder():
            self._trainer._finish_current_push()

    def published_files(self, folder: str | Path) -> list[str]:
        """Names of the files of a folder that may be pushed, the card apart."""
        trainer, model = self._trainer, self._model()
        adapters = getattr(model, "peft_config", None)
        weights = _weights(Path(folder)) if adapters is None else _adapter_files(adapters)
        names = {RECORD_NAME, *weights}
        names.update(_code_files(model))
        collator = getattr(trainer.data_collator, "tokenizer", None)
        processing = trainer.processing_class if trainer.processing_class is not None else collator
        if processing is not None:
            names.update(_saved_names(processing))
        return sorted(name for name in names if (Path(folder) / name).is_file())

    def _upload(self, commit_message: str, **options: Any) -> Any:
        names = [*self.published_files(self.folder()), CARD_NAME]
        repo_id = self._trainer.hub_model_id
        assert repo_id is not None
        return self._hub_api.upload_folder(
            repo_id=repo_id,
            folder_path=self.folder(),
            commit_message=commit_message,
            allow_patterns=[glob.escape(name) for name in names],
            **options,
        )

    def _model(self) -> nn.Module:
        model = self._trainer.model
        assert isinstance(model, nn.Module)  # it is None only inside the Trainer's constructor
        return model

    def _model_name(self) -> str:
        """Last part of the repository's name, else of the output folder's."""
        name = (self._trainer.args.hub_model_id or "").split("/")[-1]
        return name or self.folder().absolute().name

    @functools.cached_property
    def _hub_api(self) -> HfApi:
        return HfApi(library_name="hf_dpgrape")


def _weights(folder: Path) -> Iterator[str]:
    """Configurations and weights, and the parts in which large weights are saved."""
    yield from _MODEL_FILES
    index = folder / _INDEX_NAME
    if index.is_file():
        if (folder / _WEIGHTS_NAME).is_file():
            raise ValueError(
                f"Expected the weights of one run in {folder}, found both {_WEIGHTS_NAME} and "
                f"{_INDEX_NAME}; remove what an earlier run left there."
            )
        yield from set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())


def _adapter_files(names: Iterable[str]) -> Iterator[str]:
    """Files of adapters of PEFT; those not named "default" are saved in folders of their own."""
    for folder in ("", *(f"{name}/" for name in names)):
        yield from (f"{folder}{name}" for name in _ADAPTER_FILES)


def _code_files(model: Any) -> Iterator[str]:
    """Modules that a model with code of its own is saved with."""
    auto_map = getattr(getattr(model, "config", None), "auto_map", None) or {}
    for value in auto_map.values():
        for name in value if isinstance(value, (list, tuple)) else [value]:
            if name and "--" not in name:
                yield f"{name.split('.')[0]}.py"


def _saved_names(processing: Any) -> list[str]:
    """Names of the files that a tokenizer or processor is saved in."""
    with TemporaryDirectory() as folder:
        processing.save_pretrained(folder)
        found = (path for path in Path(folder).rglob("*") if path.is_file())
        return [path.relative_to(folder).as_posix() for path in found]
