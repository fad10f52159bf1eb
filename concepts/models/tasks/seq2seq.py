"""The next token of a decoder that looks at an encoder: T5, BART."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from icebear.concepts.models.batch import Batch
from icebear.concepts.models.tasks.base import Asked, Positions, Task, followed, from_start

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model


class EncoderDecoder(Task):
    name = "seq2seq"
    auto_class = "AutoModelForSeq2SeqLM"
    stacks = 2
    generates = True

    def read(self, model: Model, rows: Sequence[list[int]]) -> Batch:
        """The decoder is given the same tokens, as if it had written them, so that token t is the same in both stacks
        (its start token is in the first one's place)."""
        return self._with_decoder(model, model.read_ids(rows), [ids[1:] for ids in rows])

    def places(self, model: Model, asked: Sequence[Asked]) -> tuple[Batch, Positions]:
        read = self.encode(model, [row.prompt for row in asked])
        begun = [(model.tokens_of(row.before.text or "") if row.before else [], row.answer) for row in asked]
        written = [followed(ids, answer) for ids, answer in begun]
        # The start token, which is in no text, predicts the first one.
        positions = [from_start(len(ids), answer) for ids, answer in begun]
        return self._with_decoder(model, read, written), positions

    def _with_decoder(self, model: Model, read: Batch, written: Sequence[list[int]]) -> Batch:
        start = model.net.config.decoder_start_token_id
        return replace(read, decoder=model.padded([[start, *ids] for ids in written]))

    def written(self, batch: Batch) -> int:
        return 1  # the start token
