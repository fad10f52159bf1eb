"""`attribute`, its request, and relevance with and without a counterfactual."""
