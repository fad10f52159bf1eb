"""How good explanations are: faithfulness, ground truth, pruning and cost, with a folder of results each."""
