"""The stages of ``target=engine``: NVIDIA's tools, run as commands in the release's image."""
