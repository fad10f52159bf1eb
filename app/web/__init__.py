"""One file a screen; each has `show()`."""
