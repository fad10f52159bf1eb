"""Presets, folders, adapters and files of models."""
