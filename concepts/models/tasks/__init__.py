"""What kinds of models read and predict, one file a kind; `known` lists them."""
