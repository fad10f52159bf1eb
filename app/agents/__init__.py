"""An MCP server: what the command line has, as tools of an agent."""
