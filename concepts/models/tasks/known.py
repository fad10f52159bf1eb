"""The tasks by the classes of transformers."""

from __future__ import annotations

from icebear.concepts.models.tasks.base import Task
from icebear.concepts.models.tasks.causal import Causal
from icebear.concepts.models.tasks.image import Image
from icebear.concepts.models.tasks.labels import TextLabel, TokenLabel
from icebear.concepts.models.tasks.masked import Masked
from icebear.concepts.models.tasks.seq2seq import EncoderDecoder
from icebear.errors import ModelError

TASKS: dict[str, Task] = {
    "ForMaskedLM": Masked(),
    "ForSequenceClassification": TextLabel(),
    "ForTokenClassification": TokenLabel(),
    "ForImageClassification": Image(),
    "ForImageClassificationWithTeacher": Image(),
    "ForCausalLM": Causal(),
    "LMHeadModel": Causal(),
    "ForConditionalGeneration": EncoderDecoder(),
}
"""By how the name of a class ends."""


def task_of(class_name: str, encoder_decoder: bool) -> Task:
    """Raises `ModelError` for a class that predicts neither tokens nor labels."""
    for ending, task in TASKS.items():
        if class_name.endswith(ending):
            if task.generates:  # some name both kinds alike
                return TASKS["ForConditionalGeneration" if encoder_decoder else "ForCausalLM"]
            return task
    raise ModelError(
        f"icebear cannot explain what a {class_name} predicts; it knows classes that end in {', '.join(TASKS)}."
    )
