"""What a neuron means, from a corpus."""
