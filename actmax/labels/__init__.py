"""What a neuron means, in words, with a score measured on documents that the words were not made from."""
