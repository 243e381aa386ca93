"""Entry point of the CPU engine overlay: Python imports this module at start-up when its folder is on ``PYTHONPATH``.

It only registers the patches of ``kvcr_cpu.table`` (each is applied when the module it belongs to is first imported, so a process
that never imports vLLM, NIXL or KVCR is not touched) and then runs the ``sitecustomize`` that this one hides, if there is one.
"""

import sys

_HERE = __file__.rpartition("/")[0]


def _run_hidden_sitecustomize() -> None:
    """Execute the next ``sitecustomize`` on ``sys.path``, as if this folder were not there."""
    import os
    from importlib.machinery import PathFinder

    here = os.path.realpath(_HERE)
    others = [entry for entry in sys.path if os.path.realpath(entry or os.getcwd()) != here]
    spec = PathFinder.find_spec(__name__, others)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        spec.loader.exec_module(module_from_spec(spec))


from kvcr_cpu import hooks, table  # noqa: E402  (kvcr_cpu lies beside this file)

hooks.install(table.PATCHES)
_run_hidden_sitecustomize()
