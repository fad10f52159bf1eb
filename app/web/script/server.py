"""What `icebear app` serves: the script beside this file, to this machine alone."""

from starlette.middleware import Middleware
from streamlit.starlette import App

from icebear.app.web.localhost import LocalhostOnly

app = App("main.py", middleware=[Middleware(LocalhostOnly)])
