"""Programs, and the models that are compiled from them or trained to them."""
