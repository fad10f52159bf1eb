"""`icebear serve`: the calls of Neuronpedia's inference API that neurons can answer, over HTTP."""
