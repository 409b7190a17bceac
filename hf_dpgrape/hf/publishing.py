"""What leaves for the Hugging Face Hub: weights, processing class, privacy record and card."""

from __future__ import annotations

import functools
import glob
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils.hub import PushInProgress

from hf_dpgrape.artifacts.model_card import last_evaluation, render_card
from hf_dpgrape.artifacts.record import RECORD_NAME
from hf_dpgrape.hf.losses import head_of, task_name_of
from hf_dpgrape.hf.trainer_part import TrainerPart
from hf_dpgrape.mechanism.private_training import PrivateTraining

CARD_NAME = "README.md"

_WEIGHTS_NAME, _INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
_MODEL_FILES = ("config.json", "generation_config.json", _WEIGHTS_NAME, _INDEX_NAME)
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class PublishingMixin(TrainerPart):
    """The part of a private Trainer that writes the card and pushes to the Hub.

    The stock Trainer pushes the whole output folder but its checkpoints. Here a file leaves only
    if it is known to hold nothing but what the guarantee covers.

    Guarantees:
        A push uploads files of `published_files` and the card, nothing else: no state of
        optimizer or generators, no logs, no pickled training arguments (which hold paths, a
        token of the Hub, and a test's seed).
    """

    model: Any
    hub_model_id: Any
    push_in_progress: Any
    private_training: PrivateTraining | None
    privacy_record: Any

    def _folder(self, output_dir: str | None = None) -> Path:
        """Where to write: the given folder, else `args.output_dir`."""
        folder = output_dir or self.args.output_dir
        assert folder is not None
        return Path(folder)

    def create_model_card(  # type: ignore[override]
        self,
        language: Any = None,
        license: str | None = None,
        tags: Any = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes the privacy card as `README.md` into the output folder.

        Takes the Trainer's arguments; those about the training data set's name are not used, as
        the card tells nothing about private data that is not in the privacy record.
        """
        if not self.is_world_process_zero():
            return
        if self.private_training is None:
            raise ValueError("The card describes a trained model; call `train()` first.")
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)
        base = finetuned_from or getattr(self.model.config, "_name_or_path", "") or None
        is_local = base is not None and (os.path.isabs(base) or os.path.isdir(base))
        card = render_card(
            self.privacy_record(),
            model_name=model_name or self._model_name(),
            task=task_name_of(head_of(self.model)),
            base_model=None if is_local else base,
            metrics=last_evaluation(self.state.log_history),
            language=language,
            license=license,
            tags=[tags] if isinstance(tags, str) else tags,
            library_name="peft" if hasattr(self.model, "peft_config") else "transformers",
        )
        card.save(folder / CARD_NAME)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Uploads the model, its processing class, `privacy.json` and the card to the Hub.

        Takes what `Trainer.push_to_hub` takes, and returns what it returns: a `CommitInfo`, or a
        future of one unless `blocking`; None on other processes than the first.
        """
        if self.private_training is None:
            raise ValueError("A push needs a privacy record; call `train()` first.")
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = token or self.args.hub_token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        own_tags = getattr(self.model, "model_tags", None) or []
        given = kwargs.pop("tags", None) or []
        tags = [given] if isinstance(given, str) else [*given]
        self.create_model_card(tags=[*tags, *(t for t in own_tags if t not in tags)], **kwargs)
        return self._upload(
            commit_message or "End of training",
            token=token,
            revision=revision or self.args.hub_revision,
            run_as_future=not blocking,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes the model of a checkpoint, which was just saved, in the background.

        Its files are copied into the output folder first, because the checkpoint may be removed
        before the upload has ended. With `hub_always_push` that waits for the push before.
        """
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        running = self.push_in_progress
        if running is not None and not running.is_done() and not self.args.hub_always_push:
            return
        self._finish_current_push()
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        for name in self.published_files(checkpoint_folder):
            target = self._folder() / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(checkpoint_folder) / name, target)
        self.create_model_card()
        by_steps = self.args.save_strategy == SaveStrategy.STEPS
        when = f"step {self.state.global_step}" if by_steps else f"epoch {self.state.epoch or 0:g}"
        job = self._upload(
            f"Training in progress, {when}",
            token=self.args.hub_token,
            revision=self.args.hub_revision,
            run_as_future=True,
        )
        self.push_in_progress = PushInProgress([job])  # type: ignore[arg-type]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Saves the model once no push reads the folder: weights and record belong together."""
        if self._folder(output_dir) == self._folder():
            self._finish_current_push()
        super()._save(output_dir, state_dict=state_dict)

    def published_files(self, folder: str | Path) -> list[str]:
        """Names of the files of a folder that may be pushed, the card apart."""
        adapters = getattr(self.model, "peft_config", None)
        weights = _weights(Path(folder)) if adapters is None else _adapter_files(adapters)
        names = {RECORD_NAME, *weights}
        names.update(_code_files(self.model))
        collator = getattr(self.data_collator, "tokenizer", None)
        processing = self.processing_class if self.processing_class is not None else collator
        if processing is not None:
            names.update(_saved_names(processing))
        return sorted(name for name in names if (Path(folder) / name).is_file())

    def _upload(self, commit_message: str, **options: Any) -> Any:
        names = [*self.published_files(self._folder()), CARD_NAME]
        return self._hub_api.upload_folder(
            repo_id=self.hub_model_id,
            folder_path=self._folder(),
            commit_message=commit_message,
            allow_patterns=[glob.escape(name) for name in names],
            **options,
        )

    def _model_name(self) -> str:
        """Last part of the repository's name, else of the output folder's."""
        return (self.args.hub_model_id or "").split("/")[-1] or self._folder().absolute().name

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
