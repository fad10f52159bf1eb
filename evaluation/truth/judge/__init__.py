"""How methods are judged on models whose mechanism is known."""
