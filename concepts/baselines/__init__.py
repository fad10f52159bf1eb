"""The methods that the papers compare with, as values (`methods`) and what they do (one file a kind)."""
