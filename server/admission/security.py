"""Callers: bearer tokens, quotas, and who may load adapters. Independent of the protocol.

Tokens are read from a file, never from a flag, and stored as hashes. A lookup takes the same time for all tokens.
Callers are isolated: request ids and cached prompts are separate for each caller.
"""

from __future__ import annotations

import hashlib
import hmac
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from ipaddress import ip_address, ip_network
from pathlib import Path

from pilotfish.engine.choices import ADAPTER_NAME
from pilotfish.engine.errors import InvalidRequest, ModelError, Unsupported, shown
from pilotfish.engine.stats import Clock
from pilotfish.server.driver import Driver
from pilotfish.server.errors import Forbidden, QueueFull, QuotaExceeded, Unauthenticated

MIN_TOKEN_LENGTH = 16  # characters
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LIVE_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a token; without tokens, every caller. An operator may end the requests of all callers."""

    name: str
    is_operator: bool = False
    network: str = ""  # of the caller's address

    @property
    def share(self) -> str:
        """The key for fair sharing: the name, or without tokens the network, because one caller has few."""
        return self.name or self.network

    def key(self, request_id: str) -> str:
        """Return an id that is unique among the live requests of all callers. Callers' ids contain no slash."""
        return f"{self.name}/{request_id}" if self.name else request_id

    def salt(self, asked: str | None) -> str | None:
        """Return the cache salt of this caller. No other caller can produce it."""
        return hashlib.sha256(f"{self.name}/{asked or ''}".encode()).hexdigest() if self.name else asked


ANYBODY = Caller("", is_operator=True)  # every caller, if the server requires no tokens


class Callers:
    """The callers by the SHA-256 of their tokens; without any, every call is allowed."""

    def __init__(self, by_digest: Mapping[bytes, Caller] | None = None) -> None:
        self._by_digest = dict(by_digest or {})

    @property
    def are_known(self) -> bool:
        """Whether the server requires a token."""
        return bool(self._by_digest)

    @classmethod
    def load(cls, path: Path | None) -> Callers:
        """Read a file of lines `NAME TOKEN` or `NAME TOKEN operator`; lines that begin with `#` are comments.

        Raises ValueError, which names the line, if the file is invalid or has no token.
        """
        if path is None:
            return cls()
        found: dict[bytes, Caller] = {}
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                digest, caller = _parsed(line.split(), f"{path}:{number}")
                if digest in found or caller.name in {other.name for other in found.values()}:
                    raise ValueError(f"{path}:{number}: {caller.name!r} or its token is listed twice")
                found[digest] = caller
        if not found:
            raise ValueError(f"{path} has no tokens; every call would be refused")
        return cls(found)

    def of_metadata(self, metadata: Iterable[tuple[str, str | bytes]] | None, host: str | None = None) -> Caller:
        """Return the caller by the `authorization` entry of a call's metadata or headers; `host`: its address.

        Raises Unauthenticated if the entry is repeated, or its token is missing or unknown.
        """
        given = [value for key, value in metadata or () if key == "authorization"]
        if len(given) > 1:
            raise Unauthenticated("authorization is given more than once")
        return replace(self.identify(str(given[0]) if given else None), network=network_of(host))

    def identify(self, authorization: str | None) -> Caller:
        """Return the caller with the token in `authorization` (`Bearer TOKEN`). Raises Unauthenticated if unknown."""
        if not self._by_digest:
            return ANYBODY
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("authorization is missing; expected 'Bearer TOKEN'")
        given = _digest(token.strip())
        # All digests are compared in full, so that the duration reveals nothing about the tokens.
        matches = [caller for digest, caller in self._by_digest.items() if hmac.compare_digest(digest, given)]
        if not matches:
            raise Unauthenticated("authorization has an unknown token")
        return matches[0]


def network_of(host: str | None) -> str:
    """Return the network of an address: /32 for IPv4, /64 for IPv6; "" for a host name or None."""
    try:
        address = ip_address((host or "").partition("%")[0])
    except ValueError:
        return ""
    address = getattr(address, "ipv4_mapped", None) or address
    return str(ip_network((address, 64 if address.version == 6 else 32), strict=False))


def _parsed(words: list[str], where: str) -> tuple[bytes, Caller]:
    """["me", "secret...", "operator"] -> the token's digest and its caller."""
    if len(words) not in (2, 3) or (len(words) == 3 and words[2] != "operator"):
        raise ValueError(f"{where}: expected NAME TOKEN, or NAME TOKEN operator")
    name, token = words[:2]
    if not _NAME.fullmatch(name):
        raise ValueError(f"{where}: the name is {name!r}; expected 1 to 64 of A-Z a-z 0-9 . _ -")
    if len(token) < MIN_TOKEN_LENGTH:
        raise ValueError(f"{where}: the token of {name!r} has {len(token)} characters; expected {MIN_TOKEN_LENGTH}")
    return _digest(token), Caller(name, is_operator=len(words) == 3)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


class TokenBuckets:
    """A token bucket per caller. It refills at `per_second` and holds one second's worth of tokens, at least one."""

    def __init__(self, per_second: float) -> None:
        self.per_second, self._capacity = per_second, max(1.0, per_second)
        self._held: dict[str, tuple[float, float]] = {}  # tokens, and the time at which they were counted

    def held(self, caller: str, now: float) -> float:
        """Return the tokens of a caller at `now`, in seconds; negative if more were taken than it held."""
        held, then = self._held.get(caller, (self._capacity, now))
        return min(self._capacity, held + (now - then) * self.per_second)

    def take(self, caller: str, n: int, now: float) -> None:
        """Take `n` tokens. More than the bucket holds are allowed: its balance is then negative."""
        self._held[caller] = (self.held(caller, now) - n, now)

    def forget_full(self, now: float) -> None:
        """Drop full buckets; a caller without an entry has a full one."""
        self._held = {caller: state for caller, state in self._held.items() if self.held(caller, now) < self._capacity}


class Quotas:
    """Limits on each caller's live requests and requests per second. A request for `n` outputs counts as `n`."""

    def __init__(self, max_live: int | None, per_second: float | None, clock: Clock) -> None:
        self._max_live, self._clock = max_live, clock
        self._live = Counter[str]()
        self._buckets = None if per_second is None else TokenBuckets(per_second)

    def enter(self, caller: Caller, n: int = 1) -> Callable[[], None]:
        """Count a request of `caller` for `n` outputs, or raise QuotaExceeded; return a function that releases it."""
        leaving = ExitStack()
        if not caller.name:
            return leaving.close
        if self._max_live is not None and self._live[caller.name] + n > self._max_live:
            more = f" and requests {n} outputs" if n > 1 else ""
            problem = f"{caller.name} has {self._live[caller.name]} live requests{more}; the limit is {self._max_live}"
            raise QuotaExceeded(problem, bound="live requests", retry_seconds=_LIVE_RETRY_SECONDS)
        if self._buckets is not None:
            now, per_second = self._clock(), self._buckets.per_second
            held = self._buckets.held(caller.name, now)
            if held < 1:
                problem = f"{caller.name} sends more than {per_second:g} requests per second"
                raise QuotaExceeded(problem, bound="requests per second", retry_seconds=(1 - held) / per_second)
            self._buckets.take(caller.name, n, now)
        self._live[caller.name] += n
        leaving.callback(self._live.subtract, {caller.name: n})
        return leaving.close


AT_ONCE = 20  # immediate refusals per caller: burst, then rate per second
LONGEST = 2.0  # seconds, the maximum delay of an answer
_SHARE = 0.5  # the maximum delay as a share of the time until the caller's deadline


class Refusals:
    """Delays refusals to callers that retry too fast, because each retry costs time that others need."""

    def __init__(self) -> None:
        self._buckets = TokenBuckets(AT_ONCE)

    def delay(self, caller: str, error: QueueFull, remaining: float, now: float) -> float:
        """Count a refusal at `now`, and return by how many seconds its answer is delayed.

        The delay ends no later than a retry can succeed, and is at most a share of the `remaining` seconds. Delays
        beyond `LONGEST` are drawn at random below it, so that simultaneous requests are not answered simultaneously.
        """
        self._buckets.forget_full(now)
        seconds = max(0.0, 1 - self._buckets.held(caller, now)) / AT_ONCE
        if seconds <= LONGEST:
            self._buckets.take(caller, 1, now)
        else:
            seconds = LONGEST * random.uniform(0.5, 1.0)  # noqa: S311  # no secret
        return max(0.0, min(seconds, error.retry_seconds, _SHARE * remaining))


class AdapterCalls:
    """Checks who may load which adapters, then calls the driver. `root`: their parent directory; None: disabled."""

    def __init__(self, driver: Callable[[], Driver], root: Path | None) -> None:
        self._driver, self._root = driver, root

    async def load(self, name: str, path: str, caller: Caller) -> str:
        """Load an adapter; return its fingerprint. Raises InvalidRequest, and what `Driver.load_adapter` raises."""
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
        """Unload an adapter as soon as no live request uses it. Raises NotFound."""
        self.require_allowed(caller)
        self._driver().unload_adapter(name)

    def require_allowed(self, caller: Caller) -> Path:
        """Return the parent directory of adapters. Raises Unsupported or Forbidden if the caller may load none."""
        if self._root is None:
            raise Unsupported("loading adapters is disabled; it requires the server's option adapter_root")
        if not caller.is_operator:
            raise Forbidden("only operators may load and unload adapters")
        return self._root


def _below(root: Path, path: str) -> Path:
    """Return the directory of a path, relative ones below `root`; links are resolved. Raises InvalidRequest."""
    try:
        found = (root / path).resolve()
        is_folder = found.is_relative_to(root.resolve()) and found.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a loop of links, or an invalid character
        problem = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest.of("path", f"is {shown(path)}, which cannot be opened: {problem}") from error
    if not is_folder:
        raise InvalidRequest.of("path", f"is {shown(path)}; expected a directory below adapter_root")
    return found
