"""The store: SQLite and FAISS, and search in it. Nothing in here imports torch."""
