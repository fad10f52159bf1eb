"""The science: models, relevance rules, relevance, vocabulary."""
