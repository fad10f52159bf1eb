"""The store: SQLite tables, FAISS vector indexes and search. Nothing here imports torch."""
