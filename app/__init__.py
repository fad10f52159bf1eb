"""The faces: the command line, the app and the MCP server. No mathematics and no SQL."""
