"""An assistant for one call, through transformers' own loader: `model.generate(..., custom_generate=<this
repository>)`.

The folder above this one is what `custom_generate=` takes, as a path (`fastspec.CUSTOM_GENERATE`) or as a hub
repository with the same files. The distribution fastspec-transformers must be installed.
"""

import fastspec

SETTINGS = "backend", "exact", "stored", "head_bits"
RESOURCES = ("eagle", "eagle2", "eagle3", "mtp", "speculative", "cascade", *SETTINGS)


def generate(model, assistant="nasd", **kwargs):
    """Patch the model for the length of the call, and decode with an assistant.

    `assistant` is a name or a config object, `RESOURCES` are what `fastspec.patch` takes, and all else is what
    `generate` takes. A model that is called often is patched once instead: each call here makes its buffers, and on
    CUDA its graphs, anew.
    """
    resources = {name: kwargs.pop(name) for name in RESOURCES if name in kwargs}
    with fastspec.patched(model, **resources):
        return model.generate(assistant=assistant, **kwargs)
