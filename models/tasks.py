"""Tasks: the input, the output and the predicted positions of causal, masked, labelling and encoder-decoder models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers.models.auto import modeling_auto

from icebear.errors import InputError, ModelError
from icebear.models.batch import Batch
from icebear.models.lock import replaced
from icebear.models.text import images
from icebear.models.text.prompt_images import prompt_images_of, with_image
from icebear.models.text.prompts import Prompt, PromptRequest
from icebear.models.text.reader import Reader
from icebear.values import check_int


class ModelTask:
    """The input of a kind of model, its output, and the positions that it predicts at."""

    name: str
    auto_class: str
    """The transformers class that loads such a model."""
    stacks = 1
    """Stacks of layers: 2 for an encoder-decoder."""
    reads_text = True
    labelled = False
    """It predicts labels, not tokens."""
    labels_tokens = False
    """Each token has a label, of which one is explained."""
    takes_position = False
    """The output at any token can be explained."""
    generates = False
    generation_padding = "left"
    """Where prompts are padded that are continued together."""
    unembeds = False
    """Labels are the rows of the map after the final norm."""
    reads_alone = False
    """No two prompts can share a pass."""
    is_masked_lm = False
    """Answers replace mask tokens in the text; they do not follow it."""
    is_causal = False
    """No token attends to a later one, so later tokens have no influence on a prediction."""

    def encode(self, model: Reader, prompts: Sequence[Prompt], padding_side: str = "right") -> Batch:
        return model.padded([model.ids(prompt) for prompt in prompts], padding_side)

    def read(self, model: Reader, rows: Sequence[list[int]]) -> Batch:
        """Encode texts whose neurons are read."""
        return model.read_ids(rows)

    def as_prompt(self, model: Reader, text: str) -> str:
        """Return the text as a prompt of this task."""
        return text

    def own_tokens(self, model: Reader) -> tuple[int, ...] | None:
        """Return the positions that the model adds to its input; None if residual streams show them."""
        return None

    def refuse(self, model: Reader, **arguments: Sequence[Any]) -> None:
        """Raise `InputError` for an argument of `attribute` (target_text, prefix, position) that this task cannot use.

        arguments: a value for each prompt, or None.
        """
        reasons = {
            "target_text": f"{model.name} predicts labels, which target names" if self.labelled else "",
            "prefix": ""
            if self.stacks == 2 and self.generates
            else f"{model.name} has no separate decoder that writes",
            "position": f"{model.name} has no output at each token" if not self.takes_position else "",
        }
        for name, values in arguments.items():
            if reasons[name] and any(value is not None for value in values):
                option = " (--at)" * (name == "position")
                raise InputError(f"{name}{option} does not suit this model, because {reasons[name]}; leave out {name}.")

    def check_answers(self, model: Reader) -> None:
        """Raise `InputError` for a model that has no answers."""

    def before(self, prompt: Prompt, prefix: str | None) -> Prompt | None:
        """Return what precedes an answer; None if the answer stands in the text."""
        return Prompt(text=prefix) if prefix else None

    def encode_targets(self, model: Reader, rows: Sequence[PromptRequest]) -> tuple[Batch, list[tuple[int, ...]]]:
        """Encode the prompts, each followed by its answer without the last token; also return where answers are
        predicted."""
        batch = self.encode(model, [row.prompt for row in rows])
        return batch, [self.positions(model, batch.row_ids(number), row) for number, row in enumerate(rows)]

    def positions(self, model: Reader, ids: Sequence[int], row: PromptRequest) -> tuple[int, ...]:
        """Return where the answer is predicted in the ids of one prompt."""
        raise NotImplementedError

    def log_probabilities(self, model: Reader, logits: Tensor) -> Tensor | None:
        """Return the log-probabilities of all answers from logits (..., V); None for a number, which has none."""
        return logits.log_softmax(-1)

    def forward(self, model: Reader, batch: Batch, **options: Any) -> Any:
        """Return the network's output for a batch."""
        return model.net(**model.inputs(batch), **options)

    def input_length(self, batch: Batch) -> int:
        """Return how many columns of `generate`'s output were in the input."""
        return batch.ids.shape[1]


def with_answer(ids: Sequence[int], answer: tuple[int, ...] | None) -> list[int]:
    """Append an answer without its last token, which is predicted but not read."""
    return [*ids, *(answer or ())[:-1]]


def answer_positions(start: int, answer: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return one position for each token of an answer whose first token is predicted at `start`."""
    return tuple(range(start, start + len(answer or (0,))))


def index_of(position: int, ids: Sequence[int]) -> int:
    """Return an index, which may count from the end, as a position. Raises `InputError`."""
    return check_int(position, "A position", -len(ids), len(ids) - 1) % len(ids)


class Causal(ModelTask):
    """The next token: Llama, GPT-2, ..."""

    name = "causal"
    auto_class = "AutoModelForCausalLM"
    generates = True
    is_causal = takes_position = True

    def before(self, prompt: Prompt, prefix: str | None) -> Prompt | None:
        return prompt

    def forward(self, model: Reader, batch: Batch, **options: Any) -> Any:
        """Leave out the attention pooling of SigLIP's tower, which models of images and text do not read."""
        towers = [part for part in model.net.modules() if getattr(part, "use_head", False)] if batch.images else []
        with ExitStack() as undo:
            for tower in towers:
                undo.enter_context(replaced(tower, "use_head", False))
            return super().forward(model, batch, **options)

    def encode(self, model: Reader, prompts: Sequence[Prompt], padding_side: str = "right") -> Batch:
        read = [with_image(model, prompt) for prompt in prompts]
        return replace(super().encode(model, read, padding_side), images=prompt_images_of(read))

    def encode_targets(self, model: Reader, rows: Sequence[PromptRequest]) -> tuple[Batch, list[tuple[int, ...]]]:
        prompts = [with_image(model, row.prompt) for row in rows]
        read = [(model.ids(prompt), row.answer) for prompt, row in zip(prompts, rows, strict=True)]
        if any(row.position is not None and len(row.answer or (0,)) > 1 for row in rows):
            raise InputError(
                "A target text always follows the end of the prompt; leave out position (--at), or shorten the prompt."
            )
        batch = model.read_ids([with_answer(ids, answer) for ids, answer in read])
        batch = replace(batch, images=prompt_images_of(prompts))
        last = [
            len(ids) - 1 if row.position is None else index_of(row.position, ids)
            for row, (ids, _) in zip(rows, read, strict=True)
        ]
        return batch, [answer_positions(start, answer) for start, (_, answer) in zip(last, read, strict=True)]


class EncoderDecoder(ModelTask):
    """The next token of a decoder that attends to an encoder: T5, BART."""

    name = "seq2seq"
    auto_class = "AutoModelForSeq2SeqLM"
    stacks = 2
    generates = True
    generation_padding = "right"  # of the encoder; the text is the decoder's

    def read(self, model: Reader, rows: Sequence[list[int]]) -> Batch:
        """Give the decoder the same tokens, as if it had written them, so that token t is the same in both stacks (the
        decoder's start token replaces the first one)."""
        return self._with_decoder(model, model.read_ids(rows), [ids[1:] for ids in rows])

    def encode_targets(self, model: Reader, rows: Sequence[PromptRequest]) -> tuple[Batch, list[tuple[int, ...]]]:
        read = self.encode(model, [row.prompt for row in rows])
        begun = [(model.tokens_of(row.before.text or "") if row.before else [], row.answer) for row in rows]
        batch = self._with_decoder(model, read, [with_answer(ids, answer) for ids, answer in begun])
        # The start token, which is in no text, predicts the first one.
        return batch, [answer_positions(len(ids), answer) for ids, answer in begun]

    def _with_decoder(self, model: Reader, read: Batch, written: Sequence[list[int]]) -> Batch:
        return replace(read, decoder=model.padded([[start_of(model), *ids] for ids in written]))

    def input_length(self, batch: Batch) -> int:
        return 1  # the start token


def start_of(model: Reader) -> int:
    """Return the id of the token that a decoder starts with, as transformers' `generate` finds it. Raises
    `ModelError`."""
    configs = [getattr(model.net, "generation_config", None), model.net.config, model.config]
    for name in ("decoder_start_token_id", "bos_token_id"):
        for config in configs:
            if getattr(config, name, None) is not None:
                return int(getattr(config, name))
    raise ModelError(f"{model.name} does not say what its decoder starts with; set net.config.decoder_start_token_id.")


class Masked(ModelTask):
    """Words instead of masks: BERT."""

    name = "masked"
    auto_class = "AutoModelForMaskedLM"
    is_masked_lm = True

    def as_prompt(self, model: Reader, text: str) -> str:
        mask = model.text(model.mask_id)
        return text if mask in text else f"{text} {mask}"

    def positions(self, model: Reader, ids: Sequence[int], row: PromptRequest) -> tuple[int, ...]:
        mask, answer = model.mask_id, row.answer
        masked = tuple(position for position, token in enumerate(ids) if token == mask)
        if not masked:
            raise InputError(f"The prompt has no {model.text(mask)}; put one where a word is to be predicted.")
        if answer is not None and len(answer) != len(masked):
            raise InputError(
                f"The prompt has {len(masked)} masks but the target has {len(answer)} tokens; give one mask for each "
                "token."
            )
        return masked


class Labelled(ModelTask):
    """A model whose answers are labels."""

    labelled = True

    def log_probabilities(self, model: Reader, logits: Tensor) -> Tensor | None:
        """Apply a softmax, but sigmoids if labels do not exclude each other; return None for a regression."""
        kind = getattr(model.net.config, "problem_type", None)
        if kind == "multi_label_classification":
            return logsigmoid(logits)
        if kind == "regression" or (kind is None and len(model.labels) == 1):
            return None
        return logits.log_softmax(-1)


class TextLabel(Labelled):
    """The label of a text."""

    name = "sequence"
    auto_class = "AutoModelForSequenceClassification"

    def positions(self, model: Reader, ids: Sequence[int], row: PromptRequest) -> tuple[int, ...]:
        """Encoders have a token for the label in front; decoders (whose map to the labels is called `score`) read it
        at the last token that is not padding."""
        if not hasattr(model.net, "score"):
            return (0,)
        padding = model.config.pad_token_id
        return (max((position for position, token in enumerate(ids) if token != padding), default=0),)

    def forward(self, model: Reader, batch: Batch, **options: Any) -> Any:
        padding = model.padding_id_for([batch.row_ids(row) for row in range(len(batch.lengths))])
        with replaced(model.config, "pad_token_id", padding):  # before which decoders read labels, if they have one
            return super().forward(model, batch, **options)


class DecodedLabel(TextLabel):
    """The label of a text that an encoder reads, and then a decoder, up to its end token: BART, T5."""

    stacks = 2
    reads_alone = True  # transformers refuses texts with different numbers of end tokens

    def encode(self, model: Reader, prompts: Sequence[Prompt], padding_side: str = "right") -> Batch:
        return self.read(model, [model.ids(prompt) for prompt in prompts])

    def read(self, model: Reader, rows: Sequence[list[int]]) -> Batch:
        """Give the decoder the same tokens, shifted behind its start token, as the model does itself."""
        return replace(model.read_ids(rows), decoder=model.padded([[start_of(model), *ids[:-1]] for ids in rows]))

    def encode_targets(self, model: Reader, rows: Sequence[PromptRequest]) -> tuple[Batch, list[tuple[int, ...]]]:
        read = [model.ids(row.prompt) for row in rows]
        return self.read(model, read), [(self.end_of(model, ids),) for ids in read]

    def end_of(self, model: Reader, ids: Sequence[int]) -> int:
        """Return the position of the last end token. Raises `InputError`."""
        end = model.config.eos_token_id
        if end not in ids:
            raise InputError(
                f"{model.name} reads the label at the end token {model.text(end)!r}; add it to the prompt."
            )
        return max(position for position, token in enumerate(ids) if token == end)

    def forward(self, model: Reader, batch: Batch, **options: Any) -> Any:
        return ModelTask.forward(self, model, batch, **options)


class TokenLabel(Labelled):
    """The label of one token."""

    name = "token"
    auto_class = "AutoModelForTokenClassification"
    labels_tokens = takes_position = True

    def positions(self, model: Reader, ids: Sequence[int], row: PromptRequest) -> tuple[int, ...]:
        return (self.default_position(model, ids) if row.position is None else index_of(row.position, ids),)

    def default_position(self, model: Reader, ids: Sequence[int]) -> int:
        """Return the token that most probably has another label than the first one (``O`` or the like)."""
        with model.lock, torch.no_grad():
            scores = model.logits(model.read_ids([list(ids)]), list(range(len(ids))))[0].float()  # (T, labels)
        special = model.special_ids()
        scores[[position for position, token in enumerate(ids) if token in special]] = -torch.inf
        return int(scores.softmax(-1)[:, 0].nan_to_num(nan=2.0).argmin())


class Outputs(TokenLabel):
    """The output at a token of a bidirectional model in TransformerLens' format."""

    name = "outputs"
    unembeds = True

    def default_position(self, model: Reader, ids: Sequence[int]) -> int:
        raise InputError(
            f"{model.name} has an output at each token; choose one by its position (position=, --at), such as -1."
        )


class CausalOutputs(Outputs):
    """The same of a causal model, whose output vocabulary is not its input vocabulary."""

    name = "causal-outputs"
    is_causal = True

    def default_position(self, model: Reader, ids: Sequence[int]) -> int:
        return len(ids) - 1


class Image(Labelled):
    """The label of an image: ViT, DeiT, DINOv2, the vision towers of CLIP and SigLIP."""

    name = "image"
    auto_class = "AutoModelForImageClassification"
    reads_text = False

    def encode(self, model: Reader, prompts: Sequence[Prompt], padding_side: str = "right") -> Batch:
        return images.encode(model, [prompt.image if prompt.text is None else prompt.text for prompt in prompts])

    def encode_targets(self, model: Reader, rows: Sequence[PromptRequest]) -> tuple[Batch, list[tuple[int, ...]]]:
        self.check_answers(model)
        return super().encode_targets(model, rows)

    def check_answers(self, model: Reader) -> None:
        if not model.labels:
            raise InputError(
                f"{model.name} has no labels; ask it by examples: --examples FOLDER and --others FOLDER, each a folder "
                "of images (in Python, icebear.by_examples)."
            )

    def own_tokens(self, model: Reader) -> tuple[int, ...]:
        return tuple(range(len(images.own_names(model))))

    def positions(self, model: Reader, ids: Sequence[int], row: PromptRequest) -> tuple[int, ...]:
        return (0,)

    def forward(self, model: Reader, batch: Batch, **options: Any) -> Any:
        """Leave out SigLIP's attention pooling, which its classifier does not read."""
        tower = getattr(model.net, "vision_model", None)
        with replaced(tower, "use_head", False) if hasattr(tower, "use_head") else nullcontext():
            return super().forward(model, batch, **options)


TASKS: dict[str, ModelTask] = {
    "ForMaskedLM": Masked(),
    "ForSequenceClassification": TextLabel(),
    "ForTokenClassification": TokenLabel(),
    "ForOutputs": Outputs(),
    "ForCausalOutputs": CausalOutputs(),
    "ForImageClassification": Image(),
    "ForImageClassificationWithTeacher": Image(),
    "ForCausalLM": Causal(),
    "LMHeadModel": Causal(),
    "ForConditionalGeneration": EncoderDecoder(),
}
"""By the ending of the class's name, for classes that transformers does not ship."""
SHIPPED: dict[str, tuple[str, Mapping[str, Any]]] = {
    "AutoModelForCausalLM": ("ForCausalLM", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "AutoModelForSeq2SeqLM": ("ForConditionalGeneration", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "AutoModelForImageTextToText": ("ForCausalLM", modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    "AutoModelForMaskedLM": ("ForMaskedLM", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
}
"""The auto classes of transformers whose models have names of any ending: the ending that stands for their task, and
their models."""


def auto_class_of(class_name: str) -> str | None:
    """Return the auto class of transformers that loads a class that it ships."""
    shipped = ((auto, models.values()) for auto, (_, models) in SHIPPED.items())
    return next((auto for auto, names in shipped if class_name in names), None)


def task_of(class_name: str, encoder_decoder: bool) -> ModelTask:
    """Raise `ModelError` for a class that predicts neither tokens nor labels."""
    auto = auto_class_of(class_name)
    ending = SHIPPED[auto][0] if auto else next((ending for ending in TASKS if class_name.endswith(ending)), None)
    if ending is None:
        raise ModelError(
            f"icebear explains language models and image classifiers, of classes that end in {', '.join(TASKS)}; it "
            f"cannot explain what a {class_name} predicts."
        )
    task = TASKS[ending]
    if task is TASKS["ForSequenceClassification"] and encoder_decoder:
        return DecodedLabel()
    if task.generates:  # some name both kinds alike
        return TASKS["ForConditionalGeneration" if encoder_decoder else "ForCausalLM"]
    return task
