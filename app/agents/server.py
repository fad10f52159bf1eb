"""The server itself, over stdio: stdout is the wire, so whatever speaks, speaks to stderr."""

from __future__ import annotations

from importlib.metadata import version

from mcp.server import MCPServer
from mcp.types import ToolAnnotations

from icebear.app.agents.session import Session
from icebear.app.agents.tools import Tools

ABOUT = (
    "icebear finds the neurons that a language model used for a prediction, says what they mean, and turns them. "
    "Begin with predict; ask attribute and rank why, best with versus (another prompt of as many tokens whose answer "
    "differs), then neuron what they mean, and steer or flip whether they are the cause. Relevance and likeness are "
    "no causes. Each causal answer has a control: the same done to others, at random. Where beyond_chance is false, "
    "or others leave as little, the claim is not supported: say so; where it is null there were too few others to say. "
    "Who tries many neurons finds one by chance: say how many were tried. "
    "The price of edits is what they change elsewhere."
)
LOOKS = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
WRITES = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)


def server(session: Session) -> MCPServer:
    """With all tools, on a session."""
    found = MCPServer("icebear", instructions=ABOUT, version=version("icebear"), log_level="WARNING")
    for tool in Tools(session).all:
        writes = tool.__name__ == "save"
        found.add_tool(tool, annotations=WRITES if writes else LOOKS, structured_output=True)
    return found
