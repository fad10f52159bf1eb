"""Prompts, chats, answers and images."""
