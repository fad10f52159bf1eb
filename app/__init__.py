"""The faces: the command line and the app. No maths, no SQL."""
