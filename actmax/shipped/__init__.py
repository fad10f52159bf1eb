"""The index that comes with icebear, and which of two indexes is read."""
