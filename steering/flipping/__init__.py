"""Flips: few edits that change the answer."""
