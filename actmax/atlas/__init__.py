"""The atlas: neurons on a map by what their sentences are about."""
