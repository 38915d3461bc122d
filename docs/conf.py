"""Sphinx configuration of the documentation site: `make docs`.

The source directory is a copy of the tracked files, so that pages may link to code and results.
"""

project = "dora-pipe"
copyright = "the dora-pipe developers"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "bench/results/README.md", "examples/**/README.md"]
exclude_patterns = ["tests", "ARCHITECTURE.md", "README.md"]
html_theme = "furo"
html_title = "dora-pipe"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
myst_heading_anchors = 4
suppress_warnings = [
    "myst.header",  # some pages start at a section level that GitHub accepts
    "misc.highlighting_failure",  # console blocks with output that is no shell
]
