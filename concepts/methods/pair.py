"""`Pair`: a prompt and its counterfactual, as `Method.compare` takes them, and the `PairResult` that it returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from icebear.concepts.passes.neuron_recorders import Largest
from icebear.concepts.passes.prompt import Recorded, recorded_at
from icebear.concepts.passes.storage import SiteValues
from icebear.concepts.weights.changed_weights import ChangedWeights, ModelPair
from icebear.errors import SameAnswer
from icebear.models.model import Model
from icebear.models.objective import Objective
from icebear.records import TokenScore
from icebear.render import visible


@dataclass(frozen=True, eq=False)
class Pair:
    """A prompt and its counterfactual, and what is recorded."""

    model: Model
    objective: Objective
    """Two rows: the prompt, then the counterfactual."""
    is_open: bool
    """Whether the target or the contrast is the model's own answer."""
    sites: tuple[str, ...]
    record: Recorded
    k: int | None = None
    """The number of neurons recorded at other positions (``keep="top"``)."""
    models: ModelPair | None = None
    """With a base model, which reads the counterfactual."""
    strict: bool = True
    checkpoint: bool | None = None

    @property
    def recorded(self) -> tuple[int, ...]:
        """The positions of the prompt whose neurons are recorded."""
        return recorded_at(self.objective, 0, self.record)

    @property
    def of_images(self) -> bool:
        """Whether the two rows differ only in their images."""
        batch = self.objective.batch
        of_prompts = batch.images is not None and batch.row_ids(0) == batch.row_ids(1)
        return batch.pixels is not None or of_prompts

    @property
    def columns(self) -> list[list[int]] | None:
        """The recorded columns of both rows, of equal length; None for all columns."""
        if self.record == "all":
            return None
        columns = self.objective.batch.columns(0)
        return [[columns[position] for position in self.recorded]] * 2

    def answered(self, logits_x: Tensor, logits_c: Tensor) -> Objective:
        """Return the objective with the answer to the prompt as its target and the answer to the counterfactual as its
        contrast, where they are open, from the logits (P, V) of both at the explained positions. If two models, or two
        images, give the same answer, there is no contrast. Raises `SameAnswer`."""
        if not self.is_open:
            return self.objective
        if self.models and not self.model.labels:
            logits_x, logits_c = (x[:, : self.models.common_tokens] for x in (logits_x, logits_c))
        target = self.objective.targets[0] or tuple(logits_x.argmax(-1).tolist())
        contrast = self.objective.contrasts[0]
        if contrast is None and self.model.output_size > 1:  # a single number has no alternative
            contrast = int(logits_c[0].argmax())
            if contrast in target and not (self.models or self.of_images):
                raise _same_answer(self.model, contrast, logits_x[0].float(), logits_c[0].float())
            contrast = None if contrast in target else contrast
        return self.objective.with_answers(target, contrast)


@dataclass(frozen=True, eq=False)
class PairResult:
    """What a method says about a prompt and a counterfactual."""

    objective: Objective
    """That of the pair, with its answers."""
    numbers: tuple[float, float]
    """The explained number in the prompt and in the counterfactual."""
    tokens: tuple[Tensor, ...]
    """(T, D) relevance of the embeddings of each stack, or of the pixels."""
    relevance: SiteValues
    """(L, P, N) of neurons at the recorded positions."""
    activation: SiteValues
    counterfactual: SiteValues
    """The activations in the counterfactual, aligned."""
    alignment: Tensor
    """(T, T') weights of the counterfactual's tokens for each token."""
    sinks: tuple[int, ...]
    logits: Tensor
    """(1, P, V) of the prompt at the explained positions."""
    predictions: tuple[TokenScore, ...]
    """The most probable next tokens in the counterfactual."""
    largest: Largest | None = None
    changes: tuple[ChangedWeights, ...] = ()
    """With a base model."""


def _same_answer(model: Model, answer: int, logits_x: Tensor, logits_c: Tensor) -> SameAnswer:
    """Return the error, with the first answers of both prompts and the one that the counterfactual favors most."""
    likely = [model.top_tokens(logits, 5) for logits in (logits_x, logits_c)]
    others = {token.id: token.text for tokens in likely for token in tokens if token.id != answer}
    named = {id: text for id, text in others.items() if text.isprintable() and model.reads_back(id)} or others
    gains = logits_c.softmax(-1) - logits_x.softmax(-1)
    lists = [", ".join(f"{visible(repr(token.text))} {token.number}" for token in tokens) for tokens in likely]
    contrast = named[max(named, key=lambda id: gains[id].item())]
    return SameAnswer(model.answer_text(answer), (lists[0], lists[1]), contrast)


def predictions(model: Model, objective: Objective, logits: Tensor) -> tuple[TokenScore, ...]:
    """Return the most probable next tokens of the last prompt, from logits (B, P, V)."""
    column = objective.all_positions.index(objective.positions[-1][0])
    return tuple(model.top_tokens(logits[-1, column].float(), 5))
