"""The verbs: a file each, found by `icebear.app.cli.main`, whose command has the file's name."""
