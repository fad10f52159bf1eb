"""Attribution methods: values that own what they compute (one file a kind), and the registry of their names."""
