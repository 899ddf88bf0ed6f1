"""Python imports this file at its start if its folder is on PYTHONPATH: the process then sees a pretended H200."""

try:
    import torch  # noqa: F401
except ImportError:  # A Python without torch: scripts/gpu asks several.
    pass
else:
    from tests.support import pretended_gpu

    pretended_gpu.install()
