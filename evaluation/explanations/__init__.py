"""Evaluations of explanations: are they true of the model?"""
