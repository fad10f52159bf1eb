"""The command line, one file a family of verbs. Each verb is thin over the library, which it imports when it runs."""
