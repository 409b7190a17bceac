"""Prompt-based classification: words of a language model stand for the classes.

After Gao, Fisch and Chen (2021), "Making Pre-trained Language Models Better Few-shot Learners",
arXiv 2012.15723: a masked language model fills the mask of a prompt such as
"{sentence1} It was {mask}." and the scores of the label words, for instance "terrible" and "great",
are the logits. A prompt without a mask is for a causal language model, which predicts what comes
next. No weight is new, so the prompt works before any training.
"""

import string
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_outputs import SequenceClassifierOutput


class PromptMixin:
    """Turns the forward of a language model into that of a classifier.

    The parameters keep their names: what is saved is the language model, with the label words in
    its configuration. Logits and loss of a sample depend on this sample alone.
    """

    config: Any

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """Scores of the label words where the prompt asks for one.

        Args:
            input_ids: prompts (B, T), padded on the right.
            attention_mask: 0 on padding (B, T).
            labels: class numbers (B,); adds their mean cross entropy as `loss`.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        options = {} if self.config.prompt_mask_id is not None else {"use_cache": False}
        scores = (
            super()
            .forward(  # type: ignore[misc]
                input_ids=input_ids, attention_mask=attention_mask, **options
            )
            .logits
        )
        rows = torch.arange(len(input_ids), device=scores.device)
        words = torch.tensor(self.config.label_word_ids, device=scores.device)
        logits = scores[rows, self._asked(input_ids, attention_mask)][:, words]
        loss = None if labels is None else per_sample_loss({"logits": logits}, labels).mean()
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def _asked(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Position of the mask, or of the last token of a prompt without one (B,)."""
        if self.config.prompt_mask_id is None:
            return attention_mask.sum(1) - 1
        return (input_ids == self.config.prompt_mask_id).int().argmax(1)


def per_sample_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Cross entropy of each sample (B,), the `compute_loss_func` of a prompt model."""
    logits = outputs["logits"]
    logits = logits.float() if logits.element_size() < 4 else logits
    return F.cross_entropy(logits, labels, reduction="none")


def load_prompt_model(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str,
    label_words: list[str],
    dtype: str = "float32",
    **config_options: Any,
) -> PreTrainedModel:
    """The language model of a checkpoint as a classifier over label words.

    Args:
        name: folder or hub name of the checkpoint.
        tokenizer: its tokenizer.
        template: text with `{sentence1}`, maybe `{sentence2}`, and `{mask}` for a masked model.
        label_words: one word per class, each one token.
        dtype: of the weights.
        config_options: further options of the configuration.

    Raises:
        SystemExit: with one sentence on what does not fit.
    """
    masked = "mask" in fields(template)
    if masked and tokenizer.mask_token_id is None:
        sys.exit(f"The tokenizer of `{name}` has no mask; end the prompt where the word comes.")
    kind = "masked" if masked else "causal"
    classes = MODEL_FOR_MASKED_LM_MAPPING if masked else MODEL_FOR_CAUSAL_LM_MAPPING
    config = AutoConfig.from_pretrained(name)
    if type(config) not in classes:
        sys.exit(f"Expected a {kind} language model for this prompt, got {config.model_type}.")
    base = classes[type(config)]
    config.update(config_options)
    config.prompt_template = template
    config.prompt_mask_id = tokenizer.mask_token_id if masked else None
    config.label_words = label_words
    config.label_word_ids = word_ids(tokenizer, label_words)
    # The name of the language model's class, which is what the saved configuration shall say.
    prompted = type(base.__name__, (PromptMixin, base), {})
    return prompted.from_pretrained(name, config=config, dtype=dtype)


def word_ids(tokenizer: PreTrainedTokenizerBase, words: list[str]) -> list[int]:
    """The one token of each word as it stands in the middle of a text."""
    ids = [tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in words]
    wrong = [w for w, found in zip(words, ids, strict=True) if found in ([], _unknown(tokenizer))]
    wrong += [w for w, found in zip(words, ids, strict=True) if len(found) > 1]
    if wrong or len({tuple(found) for found in ids}) < len(ids):
        sys.exit(
            f"Expected `--label_words` of one known token each, all different, got {words}"
            + (f"; {', '.join(wrong)} will not do." if wrong else ".")
        )
    return [found[0] for found in ids]


def _unknown(tokenizer: PreTrainedTokenizerBase) -> list[int | None]:
    """The tokens of a word that the vocabulary does not have."""
    return [tokenizer.unk_token_id]


def fields(template: str) -> set[str]:
    """Names of the fields of a template."""
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


def check_template(template: str, num_sentences: int) -> None:
    """Exits with a sentence if a template has other fields than the data."""
    sentences = {f"sentence{i + 1}" for i in range(num_sentences)}
    if not sentences <= fields(template) <= sentences | {"mask"}:
        sys.exit(
            f"Expected a `--prompt_template` with {sorted(sentences)} and maybe mask in braces, "
            f"got {template!r}."
        )


def encode_prompt(
    sentences: list[str], template: str, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, list[int]]:
    """Token ids of a prompt; the longest sentence loses its end until all fits."""
    sentences = list(sentences)
    while True:
        texts = {f"sentence{i + 1}": text for i, text in enumerate(sentences)}
        # Not verbose, or a warning would tell the length of a text.
        encoded = tokenizer(template.format(mask=tokenizer.mask_token, **texts), verbose=False)
        too_many = len(encoded["input_ids"]) - max_length
        if too_many <= 0:
            return {key: encoded[key] for key in ("input_ids", "attention_mask")}
        longest = max(range(len(sentences)), key=lambda i: len(sentences[i]))
        if not sentences[longest]:
            sys.exit(f"The prompt alone has more than `--max_seq_length` {max_length} tokens.")
        spans = tokenizer(
            sentences[longest],
            add_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,
        )["offset_mapping"]
        start = spans[-too_many][0] if too_many < len(spans) else 0
        sentences[longest] = sentences[longest][:start]
