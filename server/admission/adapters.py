"""Calls that load and unload adapters while the server runs. Knows no protocol."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from engine.choices import ADAPTER_NAME
from engine.errors import InvalidRequest, ModelError, Unsupported, shown
from server.admission.security import Caller
from server.driver import Driver
from server.errors import Forbidden


class AdapterCalls:
    """Checks who may load what, and lets the driver do it. `root`: only folders below it; None: nobody may."""

    def __init__(self, driver: Callable[[], Driver], root: Path | None) -> None:
        self._driver, self._root = driver, root

    async def load(self, name: str, path: str, caller: Caller) -> str:
        """Load the adapter in the folder `path` under `name`; return its fingerprint.

        Raises:
            Unsupported: this server loads none by a call.
            Forbidden: the caller is no operator.
            InvalidRequest: the name or the folder is no valid one, or its adapter cannot be served.
            AdapterExists: there is one of this name.
            Unavailable: the engine is not ready.
        """
        root = self.require_allowed(caller)
        driver = self._driver()
        if not re.fullmatch(ADAPTER_NAME, name) or name.endswith("\n"):
            raise InvalidRequest.of("name", f"is {shown(name)}; expected 1 to 128 of A-Z a-z 0-9 . _ : / -")
        if name == driver.model.name:
            raise InvalidRequest.of("name", f"is {shown(name)}, which is the model's own")
        try:
            return await driver.load_adapter(name, str(_below(root, path)))
        except ModelError as error:
            raise InvalidRequest.of("path", f"is {shown(path)}: {error}") from error

    def unload(self, name: str, caller: Caller) -> None:
        """Unload an adapter when no live request uses it any more. Raises as `load` does, and NotFound."""
        self.require_allowed(caller)
        self._driver().unload_adapter(name)

    def require_allowed(self, caller: Caller) -> Path:
        """Return the folder below which adapters lie. Raises Unsupported or Forbidden if the caller may load none."""
        if self._root is None:
            raise Unsupported("adapters are loaded by a call only where the server's option adapter_root is set")
        if not caller.is_operator:
            raise Forbidden("only an operator may load and unload adapters")
        return self._root


def _below(root: Path, path: str) -> Path:
    """Return the folder that a path leads to, relative ones from `root`; links count as where they lead."""
    try:
        found = (root / path).resolve()
        is_folder = found.is_relative_to(root.resolve()) and found.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a loop of links, or no character of a path
        problem = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest.of("path", f"is {shown(path)}, which cannot be opened: {problem}") from error
    if not is_folder:
        raise InvalidRequest.of("path", f"is {shown(path)}; expected a folder below adapter_root")
    return found
