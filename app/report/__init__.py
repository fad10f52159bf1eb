"""Pages to mail."""
