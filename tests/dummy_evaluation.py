"""An evaluation that is one file: how well guesses meet the lengths of words."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from icebear.evaluation.protocol import Evaluation, Part, Seed, Setting

MEASURED = []


@dataclass(frozen=True)
class WordLengths(Evaluation):
    """How far guesses are from the lengths of words.

    Example:
      icebear evaluate lengths --count 3 --out lengths
    """

    name: ClassVar = "lengths"
    count: Annotated[int, Setting("How many words.", least=1)] = 3
    words: Annotated[Literal["short", "long"], Setting("Which words.")] = "short"
    squared: Annotated[bool, Setting("Square the distance.", decides=False)] = False
    seed: Seed = 0

    def parts(self, model):
        def measure(word):
            MEASURED.append(word)
            if len(MEASURED) == 2:
                raise KeyboardInterrupt
            return {"methods": {"three": {"off": abs(len(word) - 3)}, "zero": {"off": len(word)}}}

        words = [self.words[:1] * length for length in range(1, self.count + 1)]
        yield Part({"off": "distance, lower is better"}, words, measure)
