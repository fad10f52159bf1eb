"""What Streamlit runs, alone in its folder: Streamlit puts that first where Python looks for modules."""

from icebear.app.web.main import main

main()
