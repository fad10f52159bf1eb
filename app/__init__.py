"""User interfaces: cli (command line), web (app), mcp (MCP server), api (HTTP server). No mathematics and no SQL."""
