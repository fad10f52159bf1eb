"""Prompts, chats and answers."""
