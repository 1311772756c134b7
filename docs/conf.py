"""The documentation site: ``sphinx-build -W --keep-going -n docs docs/_build/html``, with the extra ``docs``.

Environment variables: ``DOCS_EXAMPLES`` is a regular expression of the examples that are run (default: all);
``DOCS_ONLINE=1`` links names of other projects to their sites.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re

from docutils.nodes import Element, Text
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import envactors as ea

project = "envactors"
version = release = ea.__version__
project_copyright = "the authors of envactors, MIT license"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "figures", "examples", "openenv"]
default_role = "py:obj"  # names in docstrings have single backticks

myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# The drop-ins of libraries that are not installed are documented too.
LIBRARIES = (
    "alf",
    "ding",
    "distributed",
    "jax",
    "mlagents",
    "mlagents_envs",
    "openenv",
    "pettingzoo",
    "ray",
    "stable_baselines3",
    "tensordict",
    "tianshou",
    "torch",
    "torchrl",
)
suppress_warnings = ["autodoc.mocked_object"]
autodoc_mock_imports = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "envactors"
html_static_path = ["static"]
html_favicon = "static/envactors.svg"
html_css_files = ["site.css"]
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "gallery",
    "filename_pattern": os.environ.get("DOCS_EXAMPLES", ""),
    "within_subsection_order": "ExampleTitleSortKey",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
    "default_thumb_file": os.path.join(os.path.dirname(__file__), "static", "envactors.svg"),  # noqa: PTH118, PTH120
}

# Names of other projects are links if there is a network, and text if not; internal names are always checked.
if os.environ.get("DOCS_ONLINE") == "1":
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "gymnasium": ("https://gymnasium.farama.org", None),
        "stable_baselines3": ("https://stable-baselines3.readthedocs.io/en/master", None),
    }
FOREIGN = (
    r"collections|concurrent|distributed|typing|types|enum|os|pathlib|time|numpy|np|npt|gymnasium|gym|stable_baselines3"
    r"|pettingzoo|tensordict|tianshou|torch|torchrl|jax|openenv"
)
# Aliases of types, and internal types that annotations of public names mention.
ALIASES = (
    "AgentBatches|Autoreset|AutoresetMode|Client|CrashDir|(Vector)?EnvVars|Factory|OnFailure|Owner|Path|Space|Spec|(starting.)?StartMethod"
    r"|.*Traits|.*EnvFuture|.*SessionFuture|SpawnOptions|.*type_variables\..*|~?P|R|Ts?|T_co|Item|CommonOptions|.*AnyFuture"
    r"|Rng|Runtime|.*host_calls\.(Reset|Step)|.*environment\.ActorEnvironment"
)
nitpick_ignore_regex = [(r"py:.*", rf"({FOREIGN})\..*"), (r"py:class", ALIASES)]
PUBLIC = {
    f"{getattr(value, '__module__', '')}.{name}": name
    for name in ea.__all__
    if (value := getattr(ea, name)) is not None
}


def link_public_name(app: Sphinx, env: BuildEnvironment, node: pending_xref, _: Element) -> Element | None:
    """Link a name of `envactors` that annotations and docstrings call by the module that defines it."""
    target = node.get("reftarget", "")
    name = PUBLIC.get(target, target)
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", f"envactors.{name}", node, Text(name))


def link_to_gallery(_app: Sphinx, _docname: str, source: list[str]) -> None:
    """Turn links to the scripts of examples, which work in a checkout, into links to the pages made of them."""
    source[0] = re.sub(r"\.\./examples/(\w+)\.py\b", r"../gallery/\1.rst", source[0])
    source[0] = source[0].replace("../examples/README.rst", "../gallery/index.rst")


def setup(app: Sphinx) -> None:
    """Register what the site adds to Sphinx."""
    # A package of the theme lets all of `logging` print from INFO on, and with it the examples.
    logging.getLogger("envactors").setLevel(logging.ERROR)
    app.connect("missing-reference", link_public_name)
    app.connect("source-read", link_to_gallery)
