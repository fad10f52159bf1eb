"""What a neuron means: an index of its maximally activating sentences, labels, its card, and the atlas of all neurons."""
