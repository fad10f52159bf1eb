"""Where the parts of a network are: families, experts, linear maps."""
