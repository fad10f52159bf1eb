"""Recipes that come with icebear."""

from pathlib import Path

EXAMPLE_RECIPE = Path(__file__).with_name("ice-bear-to-desert.json")
