"""What it costs to read a generation with a monitor: CPU seconds with and without it, ABAB, as a ratio.

python benchmarks/watching.py        # two minutes
"""

from __future__ import annotations

import random
import statistics
import time
from contextlib import nullcontext

from icebear import Monitor, load_model, watching
from icebear.models.model import Model
from icebear.records import Neuron
from icebear.steering.concept.detectors import ConceptNeuron, ConceptVector

TOKENS = 60
ROUNDS = 7
PROMPT = "The history of the city begins with"


def monitor(model: Model, count: int) -> Monitor:
    """A monitor of random FFN and attention neurons, or of a vector if the count is 0."""
    draw = random.Random(count)
    sites = [(site, layer) for site in ("ffn", "attn") for layer in range(model.layers)]
    chosen = {(*draw.choice(sites), draw.randrange(500)) for _ in range(count)}
    neurons = tuple(ConceptNeuron(Neuron(layer, site, index), "+", 1.0, 0.0, 1.0, 1.0) for site, layer, index in chosen)
    size = model.net.config.hidden_size
    vector = None if count else ConceptVector("means", 15, (1.0,) * size, 0.0, 1.0, 0.5)
    name = f"{count} neurons" if count else "vector"
    return Monitor(name, "sentence", 1e9, 0.01, 122, 0, neurons, vector, model.name, model.fingerprint)


def main() -> None:
    model = load_model()
    monitors = [None, *(monitor(model, count) for count in (1, 5, 20, 100, 0))]
    seconds: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for each in monitors:
            start = time.process_time()
            with watching(model, each) if each else nullcontext():
                model.generate(PROMPT, TOKENS, eos_token_id=None)
            seconds.setdefault(each.name if each else "none", []).append(time.process_time() - start)
    plain = statistics.median(seconds["none"])
    for name, values in seconds.items():
        print(f"{name}: {statistics.median(values):.2f} s, {statistics.median(values) / plain:.3f}")


if __name__ == "__main__":
    main()
