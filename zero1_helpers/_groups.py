"""The optional packages: which group of pyproject.toml brings them, and what to say when one is missing."""

from importlib.util import find_spec

_GROUPS = {  # group: the modules that this package imports from it
    "figures": "pandas pydantic hta matplotlib plotly viztracer nbconvert pygments PIL latex2mathml "
    "jinja2 markupsafe",
    "notebooks": "transformers tokenizers datasets huggingface_hub IPython ipykernel "
    "nbdistributed zmq traitlets packaging psutil jupytext nbclient nbformat",
}
GROUP_OF = {module: group for group, modules in _GROUPS.items() for module in modules.split()}


def explained(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The same error with a line that names the group, if the module is of one; else the error itself."""
    module = (error.name or "").partition(".")[0]
    if module not in GROUP_OF:
        return error
    install = f"pip install 'zero1_helpers[{GROUP_OF[module]}]'"
    return ModuleNotFoundError(
        f"the package {module} is missing; install its group: {install}", name=module
    )


def need(*modules: str) -> None:
    """Raise ModuleNotFoundError, with a line that names the group, if one of the modules is missing."""
    for module in modules:
        if find_spec(module) is None:
            raise explained(ModuleNotFoundError(name=module))
