"""Relevance, circuits, stages, and what is measured with them. The verb `icebear concept` is in steering/concept/."""
