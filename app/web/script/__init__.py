"""Run by Streamlit."""
