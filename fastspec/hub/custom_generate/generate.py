"""An assistant for one call, through transformers' own loader: `model.generate(..., custom_generate=<this
repository>)`.

The folder above this one is what `custom_generate=` takes, as a path (`fastspec.CUSTOM_GENERATE`) or as a hub
repository with the same files. The distribution fastspec-transformers must be installed.
"""

import fastspec


def generate(
    model,
    assistant="nasd",
    eagle=None,
    eagle2=None,
    eagle3=None,
    mtp=None,
    speculative=None,
    cascade=None,
    backend="auto",
    **kwargs,
):
    """Patch the model for the length of the call, and decode with an assistant.

    `assistant` is a name or a config object, `eagle` ... `backend` are what `fastspec.patch` takes, and all else is
    what `generate` takes. A model that is called often is patched once instead: each call here makes its buffers, and
    on CUDA its graphs, anew.
    """
    resources = {
        "eagle": eagle,
        "eagle2": eagle2,
        "eagle3": eagle3,
        "mtp": mtp,
        "speculative": speculative,
        "cascade": cascade,
        "backend": backend,
    }
    with fastspec.patched(model, **resources):
        return model.generate(assistant=assistant, **kwargs)
