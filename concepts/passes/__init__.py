"""One forward and backward pass: the number that it explains, what is recorded of it, and how it runs.

Four classes patch activations:

- `PatchableNodes` (`patching.py`): any set of nodes is recomputed, all others of their sites take other values.
- `NodeEffects` (`results/effects.py`): some nodes take other values, everything else is recomputed.
- `PatchedPair` (`stages/patched_pair.py`): everything but a `State` holds its counterfactual value.
- `FixedNeurons` (`circuits/fixed_neurons.py`): all neurons hold the value of one prompt, so that edges are direct.
"""
