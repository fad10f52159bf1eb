"""The `Model` handle that everything else takes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache, cached_property
from importlib.metadata import version
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from icebear.errors import InputError, ModelError, NumericalError, UnknownName
from icebear.models.batch import Batch
from icebear.models.lock import draws, replaced, unhooked
from icebear.models.parts.architecture import Architecture
from icebear.models.prompt_image import PromptImage
from icebear.models.text.answer import Answer
from icebear.models.text.chat import Marks, Turn, marks_of, rendered, turns
from icebear.models.text.prompt_images import image_inputs, prompt_images_of, with_image
from icebear.models.text.prompts import Prompt, PromptLike, PromptRequest, Prompts, joined, prompts_of
from icebear.models.text.words import Words
from icebear.records import TokenScore
from icebear.result_files import given_model, saved_as
from icebear.values import check_int, real, seed_of, several, text_of


class Model(Architecture):
    """A transformers model, its tokenizer, and where its neurons are.

    Threads may share a model: its `lock` is held while rules, hooks or edits are installed. A generation yields the
    lock after each token.

    Parameters
    ----------
    net
        A transformers model, also a compiled one. Its parameters are frozen, and its passes run in eval mode and
        uncompiled; merge adapters first.
    tokenizer
        Its tokenizer; without one, prompts are token ids.
    name
        The name in outputs; by default the one in the configuration.
    processor
        The image processor of a model that reads images.
    """

    def __init__(self, net: Any, tokenizer: Any = None, name: str = "", processor: Any = None) -> None:
        super().__init__(_usable(net), name)
        self.tokenizer = tokenizer
        self.processor = processor
        self._padding_changes: dict[str, bool] = {}  # padding side -> whether padding counts

    def __repr__(self) -> str:
        return f"Model({self.name!r}, {self.layers} layers, {self.dtype_name} on {self.device})"

    @property
    def made_with(self) -> dict[str, Any]:
        """The model and the versions of the software, as stored with every output (JSON-ready)."""
        facts = {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "dtype": self.dtype_name,
            "weights": self.weights_note,
        }
        return {"model": facts, "versions": versions()}

    def encode(self, prompts: Sequence[PromptLike], padding_side: str = "right") -> Batch:
        """Return the prompts as a batch. Raises `InputError` for empty or too long ones."""
        return self.task.encode(self, [Prompt.of(prompt) for prompt in prompts], padding_side)

    def read(self, rows: Sequence[list[int]]) -> Batch:
        """Return texts as a batch whose neurons are read; a decoder, if there is one, reads the same texts."""
        return self.task.read(self, rows)

    def read_ids(self, rows: Sequence[list[int]]) -> Batch:
        """Return token ids as a batch, checked and padded."""
        return self.padded([self.ids(Prompt(ids=tuple(row))) for row in rows])

    @torch.inference_mode(False)  # a backward pass cannot keep ids that were made under it
    def padded(self, rows: Sequence[list[int]], padding_side: str = "right") -> Batch:
        ids = pad_sequence([torch.tensor(row) for row in rows], True, self.padding_id_for(rows), padding_side)
        mask = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], True, 0, padding_side)
        return Batch(ids.to(self.device), mask.to(self.device), tuple(map(len, rows)))

    def batches(self, lengths: Sequence[int], size: int, padding_side: str = "right") -> Iterator[list[int]]:
        """Yield rows of these lengths, in order, in batches in which each row gets the values that it has alone."""
        size = 1 if self.task.reads_alone else size
        alone = len(set(lengths)) > 1 and (self._overflows() or self.padding_changes_results(padding_side))
        longer = self.scales_positions_from
        kind = lambda row: lengths[row] if alone else lengths[row] > longer  # noqa: E731
        for _, group in groupby(range(len(lengths)), kind):
            rows = list(group)
            yield from (rows[start : start + size] for start in range(0, len(rows), size))

    def batches_by_length(self, rows: Sequence[Sequence[int]], size: int) -> list[list[int]]:
        """Return `batches` of row numbers, the shortest rows first, so that few tokens are padding."""
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        parts = self.batches([len(rows[number]) for number in order], size)
        return [[order[at] for at in part] for part in parts]

    def padding_changes_results(self, side: str) -> bool:
        """Return whether padding changes what is computed of a row (some models do not mask it), measured once."""
        if side not in self._padding_changes:
            padding_id = getattr(self.config, "pad_token_id", None)
            vocabulary = self.config.vocab_size
            ids = [token for token in range(vocabulary // 3, vocabulary) if token != padding_id][:7]
            close = max(torch.finfo(dtype).eps for dtype in (self.dtype, torch.float32)) ** 0.5  # routers are float32
            try:
                alone, beside = (self._measured(rows, side) for rows in ([ids[:5]], [ids[:5], ids]))
                near = alone.shape == beside.shape and (alone - beside).abs().max() <= close * alone.abs().max()
            except RuntimeError:  # kernels of experts do not take all sizes in 16 bits, and passes run past them
                near = False
            self._padding_changes[side] = not near
        return self._padding_changes[side]

    def _overflows(self) -> bool:
        """Return whether a padded token that sees only padding becomes NaN, which then spreads: the smallest number of
        float64, by which transformers masks, is infinite in the float32 of its softmax."""
        has_window = getattr(self.config, "sliding_window", None) is not None
        return has_window and self.dtype == torch.float64 and self.config._attn_implementation == "eager"

    @torch.no_grad()
    def _measured(self, rows: Sequence[list[int]], side: str) -> Tensor:
        """Return what a plain pass computes of the first row: its logits (of labels, its residual stream)."""
        with self.lock, unhooked(self.net):
            if side == "right":
                batch, positions = self.read(rows), list(range(len(rows[0])))
                if self.labels:
                    return self.final_stream(batch)[0, positions].float()
                return self.logits(batch, positions)[0].float()
            inputs = self.inputs(self.padded(rows, side))
            options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
            config = GenerationConfig(**options, pad_token_id=self.padding_id_for(rows))
            return type(self.net).generate(self.net, **inputs, generation_config=config).logits[0][0].float()

    def padding_id_for(self, rows: Sequence[Sequence[int]]) -> int:
        """Return the model's padding id, or, if it has none, an id that no row ends with (0 if there is none)."""
        padding_id = getattr(self.config, "pad_token_id", None)
        if padding_id is not None and 0 <= padding_id < self.config.vocab_size:
            return padding_id
        last = {row[-1] for row in rows}
        return next((token for token in range(self.config.vocab_size) if token not in last), 0)

    def ids(self, prompt: PromptLike) -> list[int]:
        """Return the token ids of a prompt, including special tokens. Raises `InputError`."""
        ids = self._read(Prompt.of(prompt))
        vocabulary = self.config.vocab_size
        if not ids:
            raise InputError("The prompt is empty; give at least one token id.")
        if not all(0 <= token < vocabulary for token in ids):
            raise InputError(f"The prompt has a token id that {self.name} lacks; use ids from 0 to {vocabulary - 1}.")
        if len(ids) > self.context_length:
            raise InputError(
                f"The prompt has {len(ids)} tokens, but {self.name} reads at most {self.context_length}; shorten it by "
                f"{len(ids) - self.context_length} tokens."
            )
        return ids

    def _read(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt that is not checked. Raises `InputError` for a text without tokens."""
        if prompt.ids is not None and (prompt.image is None or isinstance(prompt.image, PromptImage)):
            return list(prompt.ids)
        if prompt.image is not None and self.task.reads_text and self.vision is not None:
            raise InputError("This reads text; a prompt with an image is for attribute, explain, predict and answer.")
        if prompt.image is not None:
            raise InputError(f"{self.name} reads text, not images; give it a text, token ids or chat messages.")
        if prompt.chat is not None:
            return rendered(self, prompt.chat)
        if prompt.tokens is not None:
            return [
                self.token_id(text_of(token), "token") if isinstance(token, str) else check_int(token, "A token id", 0)
                for token in prompt.tokens
            ]
        text = text_of(prompt.text or "")
        if prompt.pair is not None and self.task.generates:
            raise InputError(f"{self.name} continues one text; pass several prompts as a list, or join both texts.")
        texts = [text] if prompt.pair is None else [text, text_of(prompt.pair)]
        ids = self._tokenizer()(*texts)["input_ids"]
        if not text.strip() and not set(ids) - self.special_ids():
            raise InputError("The prompt is empty; give a text.")
        return ids

    def token_types(self, ids: Tensor) -> Tensor:
        """Return the segment (B, T) of each token: 0 up to the first separator, and 1 after it. A tokenizer may give
        the first token a segment of its own (Funnel)."""
        separators = (ids == self.tokenizer.sep_token_id).long()
        types = (separators.cumsum(1) - separators).clamp(max=1)
        if cls_type := getattr(self.tokenizer, "cls_token_type_id", 0):
            types[ids == self.tokenizer.cls_token_id] = cls_type
        return types

    @cached_property
    def has_segments(self) -> bool:
        """Whether the model reads segments, and its tokenizer writes them. Raises `InputError` if they are unknown."""
        written = "token_type_ids" in getattr(self.tokenizer, "model_input_names", ())
        read = "token_type_ids" in inspect.signature(type(self.net).forward).parameters
        if not (written and read) or getattr(self.config, "type_vocab_size", 0) < 2:
            return False
        pair = self.tokenizer("a", "b")
        types = pair["token_type_ids"]
        if not any(types):
            return False
        if self.token_types(torch.tensor([pair["input_ids"]])).tolist() != [types]:
            raise InputError(
                f"icebear does not know how the tokenizer of {self.name} numbers segments; report the model."
            )
        return True

    def answer_id(self, answer: str | int, role: str = "target", after: PromptLike | None = None) -> int:
        """Return the id of a label, or of a token that continues a prompt (see `continuation`).

        Raises `InputError`; for a text of several tokens the message shows how it splits.
        """
        self.task.check_answers(self)
        if not isinstance(answer, str):
            what = "label" if self.labels else "token id"
            return check_int(answer, f"A {what} of {self.name}", 0, self.output_size - 1)
        if not self.labels:
            return self.token_id(answer, role, after)
        number = next((number for number, label in self.labels.items() if label == answer), None)
        if number is None:
            known = list(self.labels.values())
            listed = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
            raise UnknownName("label", answer, known, f"The labels of {self.name} are {listed}.")
        return number

    def reads_back(self, number: int) -> bool:
        """Return whether the text of a token or label names it as an answer; parts of a character do not."""
        try:
            return self.answer_id(self.answer_text(number)) == number
        except InputError:
            return False

    def answer_text(self, number: int) -> str:
        """Return the text of a token or a label."""
        return self.labels[number] if self.labels else self.text(number)

    def tokens_of(self, text: str) -> list[int]:
        """Return the token ids of a part of a text, without special tokens."""
        return self._tokenizer()(text_of(text), add_special_tokens=False)["input_ids"]

    def continuation(self, text: str, after: PromptLike | None = None) -> list[int]:
        """Return the token ids of a text that continues a prompt: both are tokenized together.

        Some tokenizers (Llama 2, Mistral 7B) add a space to a text that is tokenized alone. After token ids, or if
        prompt and text would merge into one token, the text is tokenized after a line break or a letter.
        """
        if self.task.is_masked_lm:
            return self.tokens_of(text)
        preceding = Prompt.of(after).text if after is not None else None
        for before in (preceding, "\n", "a"):
            if isinstance(before, str):
                start, joined = self.tokens_of(before), self.tokens_of(before + text)
                if len(joined) > len(start) and joined[: len(start)] == start:
                    return joined[len(start) :]
        return self.tokens_of(text)

    def token_id(self, token: str, role: str, after: PromptLike | None = None) -> int:
        ids = self.continuation(token, after)
        if len(ids) != 1:
            split = " + ".join(repr(self.text(part)) for part in ids) or "nothing"
            spaced = self.continuation(" " + token, after)
            hint = f" Did you mean {' ' + token!r}, with a space?" if len(spaced) == 1 else ""
            longer = " To explain a longer continuation, use --target-text (target_text= in Python)."
            more = longer if role in ("target", "contrast") else ""
            raise InputError(f"The {role} {token!r} must be one token, but splits into {split}.{hint}{more}")
        if role != "token":
            self.check_output(ids, token, role)
        return ids[0]

    def check_output(self, ids: Sequence[int], text: str, role: str) -> None:
        """Raise `InputError` if the model cannot answer a text, because its output lacks a token or its tokenizer does
        not know a word."""
        if any(token >= self.output_size for token in ids):
            raise InputError(
                f"The {role} {text!r} has token {max(ids)}, but the output of {self.name} has {self.output_size} "
                f"tokens; resize the model's embeddings to its tokenizer, or choose another {role}."
            )
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        if unknown in ids and self.tokenizer.unk_token not in text:
            raise InputError(f"The tokenizer of {self.name} does not know the {role} {text!r}; choose another {role}.")

    def text(self, token: int) -> str:
        check_int(token, f"A token id of {self.name}", 0)
        if self.tokenizer is None:
            return f"<{token}>"
        raw = getattr(self.tokenizer, "convert_ids_to_tokens", lambda _: None)(token) or ""
        if raw.startswith("▁"):  # SentencePiece drops the space before a text that it decodes
            return raw.replace("▁", " ")
        if self._wordpiece and token not in self.special_ids():  # which marks what has no space before it
            return raw[2:] if raw.startswith("##") else f" {raw}"
        return self.tokenizer.decode([token]) or ("" if raw else f"<{token}>")  # padding of the vocabulary has no text

    @cached_property
    def _wordpiece(self) -> bool:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return type(getattr(backend, "model", None)).__name__ == "WordPiece"

    def token_ids(self, text: str, limit: int | None = None) -> list[int]:
        """Return the first `limit` token ids of a text, including special tokens."""
        ids = self._tokenizer()(text_of(text))["input_ids"]
        limit = self.context_length if limit is None else check_int(limit, "The limit of tokens")
        return ids[: min(limit, self.context_length)]

    def pieces(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Return the text of each token. A character of several tokens is the text of the last one."""
        pieces = [self.text(token) for token in ids]
        if any("\ufffd" in piece for piece in pieces):
            pieces = joined(ids, self._tokenizer().decode)
        return tuple(pieces)

    def turns(self, ids: Sequence[int], pieces: Sequence[str] | None = None) -> tuple[Turn, ...]:
        """Return the turns of a chat that these tokens contain; none for another text.

        pieces: the text of each token, if known.
        """
        return turns(pieces or self.pieces(ids), self._marks) if self._marks else ()

    @cached_property
    def _marks(self) -> Marks | None:
        return marks_of(self.tokenizer)

    def special_ids(self) -> set[int]:
        return set(self.tokenizer.all_special_ids) if self.tokenizer is not None else set()

    @property
    def reads_any_text(self) -> bool:
        """Whether its tokenizer splits any text, not only a list of tokens."""
        return self.tokenizer is not None and not isinstance(self.tokenizer, Words)

    def _tokenizer(self) -> Any:
        if not self.task.reads_text:
            raise InputError(f"{self.name} reads images, not text; give it images, or choose a model that reads text.")
        if self.tokenizer is None:
            raise InputError(f"{self.name} was given without a tokenizer; pass token ids instead of text.")
        return self.tokenizer

    def predict(
        self, prompt: PromptLike, k: int = 10, also: Sequence[int] = (), position: int | None = None
    ) -> list[TokenScore]:
        """Return the k most probable next tokens (or labels), then the tokens of `also` that are not among them.

        position: the token whose output is read, as in `attribute`.
        """
        k = check_int(k, "The number of predictions")
        logits = self.next_logits(prompt, position)
        also = [self.answer_id(token) for token in several(also)]
        best = self.top_tokens(logits, k)
        known = {token.id for token in best}
        return best + self.token_scores(logits, [token for token in also if token not in known])

    @torch.no_grad()
    def next_logits(self, prompt: PromptLike, position: int | None = None) -> Tensor:
        """Return the float32 logits (V,) of the next token (or of labels)."""
        read = Prompt.of(prompt)
        self.task.refuse(self, position=[position])
        request = PromptRequest(read, before=self.task.before(read, None), position=position)
        batch, positions = self.task.encode_targets(self, [request])
        with self.lock:
            return not_nan(self.logits(batch, list(positions[0][:1]))[0, 0].float())

    @torch.no_grad()
    def continuation_logits(self, prompt_ids: Sequence[int], ids: Sequence[int], image: Any = None) -> Tensor:
        """Return the float32 logits (S, V) that predict each of the S token `ids` after a prompt. image: that of the
        prompt, as the model reads it."""
        read = [*prompt_ids, *ids[:-1]]
        batch = replace(self.read_ids([read]), images=image and (image,))
        with self.lock:
            return not_nan(self.logits(batch, list(range(len(prompt_ids) - 1, len(read))))[0].float())

    def logits(self, batch: Batch, positions: list[int]) -> Tensor:
        """Return the logits (B, P, V) at P positions, or of labels. All positions would cost a quarter of a pass."""
        parameters = inspect.signature(type(self.net).forward).parameters
        options: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
        if "logits_to_keep" in parameters and not self.labels:  # a classifier would look for its token in the rest
            options["logits_to_keep"] = torch.tensor(positions, device=self.device)
            return self.task.forward(self, batch, **options).logits
        return at(self.task.forward(self, batch, **options).logits, positions)

    def probability(self, prompt: PromptLike, answer: str | int, role: str = "target") -> float | None:
        """Return the probability of one answer; None for a model that predicts a number."""
        return self.token_scores(self.next_logits(prompt), [self.answer_id(answer, role, prompt)])[0].probability

    def top_tokens(self, logits: Tensor, k: int) -> list[TokenScore]:
        """Return the tokens with the k largest of `logits` (V,)."""
        return self.token_scores(logits, logits.topk(min(k, len(logits))).indices.tolist())

    def token_scores(self, logits: Tensor, tokens: list[int]) -> list[TokenScore]:
        """Return each token's logit, and its probability under all `logits` (V,)."""
        logs, values = self.task.log_probabilities(self, logits), logits[tokens].tolist()
        probabilities = [None] * len(tokens) if logs is None else logs[tokens].exp().tolist()
        if any(math.isnan(number) for number in (*values, *probabilities) if number is not None):
            raise NumericalError(NAN)
        rows = zip(tokens, values, probabilities, strict=True)
        return [TokenScore(token, self.answer_text(token), logit, probability) for token, logit, probability in rows]

    def inputs(self, batch: Batch) -> dict[str, Any]:
        if batch.after:
            return batch.after(batch.ids)
        if batch.pixels is not None:
            return {"pixel_values": batch.pixels}
        inputs = {"input_ids": batch.ids, "attention_mask": batch.mask}
        if self.has_segments:
            inputs["token_type_ids"] = self.token_types(batch.ids) * batch.mask
        if batch.decoder:
            inputs |= {"decoder_input_ids": batch.decoder.ids, "decoder_attention_mask": batch.decoder.mask}
        return inputs | image_inputs(self, batch) if batch.images else inputs

    def final_stream(self, batch: Batch) -> Tensor:
        """Return the residual stream (B, T, D) after the final norm, without computing logits; for an encoder-decoder,
        the encoder's."""
        inputs = self.inputs(batch)
        if not batch.decoder:
            options = {"use_cache": False} if self.task.generates else {}
            core = (
                self.net.base_model if self.task.reads_text else getattr(self.net, "vision_model", self.net.base_model)
            )
            return core(**inputs, **options)[0]
        stream = self.net.get_encoder()(batch.ids, attention_mask=batch.mask)[0]
        self.net.get_decoder()(
            batch.decoder.ids,
            attention_mask=batch.decoder.mask,
            encoder_hidden_states=stream,
            encoder_attention_mask=batch.mask,
            use_cache=False,
        )
        return stream

    def generate(
        self,
        prompt: PromptLike | Prompts,
        max_new_tokens: int = 40,
        temperature: float = 0.0,
        seed: int = 0,
        on_token: Callable[[int], None] | None = None,
        **options: Any,
    ) -> Any:
        """Continue a prompt.

        Parameters
        ----------
        prompt
            A prompt, or a list of prompts.
        max_new_tokens
            The number of tokens to generate at most.
        temperature
            0 always takes the most probable token; above 0, tokens are sampled with `seed`.
        on_token
            Called with the number of new tokens after each token. An exception that it raises ends the generation.
        options
            Options of transformers' `generate` (num_beams, repetition_penalty, use_cache, ...). The model's own
            generation_config is ignored.

        Returns
        -------
        str or list of str
            The generated text; a list of texts for a list of prompts.

        Raises
        ------
        InputError
            If the model does not generate text, or a prompt leaves no room for the new tokens.
        """
        if not self.task.generates:
            raise InputError(f"{self.name} does not generate text; see its predictions with `Model.predict`.")
        tokenizer = self._tokenizer()
        prompts, is_single = prompts_of(prompt)
        ids = [self.ids(part) for part in prompts]
        watch = (lambda new: on_token(new.shape[1])) if on_token else None
        texts: list[str] = []
        for new in self._continued(ids, max_new_tokens, temperature, seed, watch, options):
            texts += tokenizer.batch_decode(new, skip_special_tokens=True)
        return texts[0] if is_single and len(texts) == 1 else texts

    def continuations(self, rows: Sequence[list[int]], tokens: int) -> list[list[int]]:
        """Return the `tokens` most probable ids that continue each row, also past the end of a text."""
        parts = self._continued(rows, tokens, 0.0, 0, None, {"eos_token_id": None})
        return [row for new in parts for row in new.tolist()]

    def _continued(self, rows: Sequence[Sequence[int]], *arguments: Any) -> Iterator[Tensor]:
        """Yield the new ids (B, n) of rows that are continued together, in order. arguments: of `_generated`."""
        side = self.task.generation_padding
        for part in self.batches(list(map(len, rows)), len(rows), side):
            batch = self.encode([Prompt(ids=tuple(rows[row])) for row in part], side)
            output = self._generated(batch, *arguments)
            yield (output if isinstance(output, Tensor) else output.sequences)[:, self.task.input_length(batch) :]

    def answer(
        self,
        prompt: PromptLike,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        on_token: Callable[[list[int]], None] | None = None,
        **options: Any,
    ) -> Answer:
        """Answer a prompt or a chat, token by token, so that `attribute` can explain it.

        Parameters
        ----------
        prompt
            A prompt or a chat.
        max_new_tokens
            By default 256, or as many as the context has room for.
        temperature, seed, options
            See `generate`.
        on_token
            Called with the ids of all new tokens after each token.

        Returns
        -------
        Answer

        Raises
        ------
        InputError
            If the model is not causal, or with `num_beams` above 1.
        """
        if not (self.task.is_causal and self.task.generates):
            raise InputError(f"{self.name} does not continue a prompt; see its predictions with `Model.predict`.")
        if (generation_option(self.net, options, "num_beams") or 1) > 1:
            raise InputError("`Model.answer` has no beam search (num_beams above 1); use `Model.generate`.")
        chat, read = Prompt.of(prompt).chat, with_image(self, Prompt.of(prompt))
        ids = self.ids(read)
        room = max(1, min(256, self.context_length - len(ids))) if max_new_tokens is None else max_new_tokens
        watch = (lambda new: on_token(new[0].tolist())) if on_token else None
        options = {**options, "return_dict_in_generate": True, "output_logits": True}
        batch = replace(self.read_ids([ids]), images=prompt_images_of([read]))
        output = self._generated(batch, room, temperature, seed, watch, options)
        new = output.sequences[0, len(ids) :].tolist()
        ended = new[-1] in self.ends
        new = new[:-1] if ended else new
        steps = zip(output.logits, new, strict=False)
        probabilities = tuple(scores[0].float().softmax(-1)[token].item() for scores, token in steps)
        made_with, pieces = self.made_with["model"], self.pieces(new)
        return Answer(tuple(ids), tuple(new), pieces, probabilities, ended, chat, made_with, image=read.image)

    @property
    def ends(self) -> list[int]:
        """The ids of the tokens that end a text."""
        return several(self.net.generation_config.eos_token_id)

    def _generated(
        self,
        batch: Batch,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        on_token: Callable[[Tensor], None] | None,
        options: dict[str, Any],
    ) -> Any:
        """Return the output of transformers' `generate`; on_token is called with all new ids (B, n)."""
        length = self.task.input_length(batch)
        room = self.context_length - length
        if check_int(max_new_tokens, "The number of new tokens") > room:
            raise InputError(
                f"The prompt has {length} tokens, and {self.name} reads at most {self.context_length}. Generate at "
                f"most {room} tokens instead of {max_new_tokens}, or shorten the prompt."
            )
        if real(temperature, "The temperature", 0):
            real(temperature, "A temperature other than 0", 1e-6, 1e6)  # beyond, a float32 softmax degenerates
        seed = seed_of(seed)
        padding = *(getattr(self.tokenizer, name, None) for name in ("pad_token_id", "eos_token_id")), 0
        padding_id = next(token for token in padding if token is not None)
        options = {"do_sample": temperature > 0, "pad_token_id": padding_id, **options}
        if temperature > 0:
            options = {"temperature": float(temperature), "top_k": 0, **options}
        options["logits_processor"] = [*options.get("logits_processor", ()), lambda _, scores: not_nan(scores)]
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")  # no penalties, no limits
        only_ids = GenerationConfig(**{name: getattr(self.net.generation_config, name) for name in names})
        beginning = ExitStack()  # restores the generation_config before another thread can generate

        def watch(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            beginning.close()
            if on_token:
                on_token(ids[:, length:])
            self.lock.yield_lock()
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        options["stopping_criteria"] = [*options.get("stopping_criteria", ()), watch]
        drawing = draws(self.device, seed) if temperature > 0 else nullcontext
        with self.lock.yielding(drawing), torch.no_grad(), beginning:
            beginning.enter_context(replaced(self.net, "generation_config", only_ids))
            return self.net.generate(**self.inputs(batch), max_new_tokens=max_new_tokens, **options)

    @property
    def mask_id(self) -> int:
        mask_id = getattr(self.tokenizer, "mask_token_id", None)
        if mask_id is None:
            raise ModelError(f"{self.name} has no mask token; give it a tokenizer that has one.")
        return mask_id


def _usable(net: Any) -> Any:
    """Return a network. Raises `ModelError` if it cannot be used as it is."""
    if isinstance(net, torch.nn.DataParallel):
        raise ModelError("A DataParallel network runs copies of the model, which icebear cannot see; pass net.module.")
    if any(weight.is_inference() for weight in net.parameters()):
        raise ModelError("The model was made under torch.inference_mode(), without gradients; make it outside of it.")
    if not getattr(net.config, "return_dict", True):
        raise ModelError("The model returns tuples (config.return_dict is False); set net.config.return_dict = True.")
    if getattr(net.config.get_text_config(), "output_router_logits", False):
        raise ModelError(
            "The model computes a loss of its routers for training (config.output_router_logits is True); set "
            "net.config.output_router_logits = False."
        )
    if getattr(net.config, "bi_data", False):
        raise ModelError(
            "The model reads half of each batch backwards for training (config.bi_data is True); set "
            "net.config.bi_data = False."
        )
    return net


def generation_option(net: Any, options: Mapping[str, Any], name: str) -> Any:
    """Return the value of an option of transformers' `generate`: as given, or of the configuration that is given, or of
    the model's; None without one."""
    configs = (options.get("generation_config"), getattr(net, "generation_config", None))
    values = (options.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


@cache
def versions() -> dict[str, str]:
    return {name: version(name) for name in ("icebear", "torch", "transformers")}


NAN = "The logits are NaN; try --dtype float32, and smaller values if neurons are edited."


def not_nan(logits: Tensor) -> Tensor:
    """Return the logits. Raises `NumericalError` for NaN."""
    if logits.isnan().any():
        raise NumericalError(NAN)
    return logits


def at(logits: Tensor, positions: list[int]) -> Tensor:
    """Select (B, P, V) from logits (B, T, V), or repeat the logits of labels (B, V) for each position."""
    return logits[:, None].expand(-1, len(positions), -1) if logits.dim() == 2 else logits[:, positions]


saved_as(Model, lambda model: {"name": model.name, "fingerprint": model.fingerprint}, given_model)
