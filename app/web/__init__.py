"""The app. A view is a file with `show()`; `VIEWS` lists them."""
