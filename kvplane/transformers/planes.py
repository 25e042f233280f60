"""The planes behind the caches of one model: a session of a pool, and the backend for its plans.

    begin(operations)  ──►  attention of every layer  ──►  finish()
                                                      └──►  abandon(), when something failed

One plan runs at a time, from ``begin`` to its end, whichever cache and thread it is for.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from kvplane import ops
from kvplane.cli.extras import what_is_missing
from kvplane.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    KvplaneError,
    SessionNotFoundError,
    StaleError,
    UnavailableError,
)
from kvplane.layout import LayerGroup, Layout
from kvplane.models.hf import layout_from_hf
from kvplane.models.model_layers import layer_groups, layer_shapes
from kvplane.results import OperationResult, PoolInfo
from kvplane.runtime.backend import DataBackend, RemoteBackend
from kvplane.runtime.link import ControlLink
from kvplane.session import Session
from kvplane.sync.loop_thread import LoopThread
from kvplane.transformers import attention
from kvplane.transformers.model_state import last_changes, namespace_of
from kvplane.transformers.models import adapters
from kvplane.transformers.models.probe import probe, states_of, with_states
from kvplane.transformers.models.rope import WHY, max_independent_tokens
from kvplane.transport.tls import Tls

_LOGGER: Final = logging.getLogger(__name__)
_MODEL_ID: Final = "embedded"
_SESSION_LOST: Final = (
    StaleError,
    SessionNotFoundError,
    UnavailableError,
    DeadlineExceededError,
)


@dataclass(frozen=True, slots=True)
class PlaneSettings:
    """Settings of the pool that keeps a model's keys and values.

    control_plane: address of the control plane, "host:port"; empty means that both planes run in
        this process, with a pool for this model alone.
    pool_id: the pool, where the planes are elsewhere.
    model_id: the model's id in the layout of such a pool; empty computes it from the folder that
        the model was loaded from, as the data plane did.
    namespace: of the prefixes, at most 128 characters. None derives it from the model's state (see
        docs/transformers.md); a given one is used as it is, and nothing is checked.
    block_size_tokens, num_device_blocks, kv_dtype, num_threads, latent: of an embedded pool, as the
        flags of ``kvplane data``.
    tls: for planes that are elsewhere; None is without TLS.
    probe: whether to compare the model's logits with those of transformers' own attention first.
        Without it a model that keeps other state, or attends in another way, gives wrong text.
    timeout_s: deadline of one call to a plane. start_timeout_s: how long planes may take to start.
    """

    control_plane: str = ""
    pool_id: str = "default"
    model_id: str = ""
    namespace: str | None = None
    block_size_tokens: int = 16
    num_device_blocks: int = 1024
    kv_dtype: str = ""
    num_threads: int = 0
    latent: bool = True
    tls: Tls | None = None
    probe: bool = True
    timeout_s: float = 10.0
    start_timeout_s: float = 60.0


class Planes:
    """The planes that the caches of one model share: one session of one pool. Between ``begin`` and
    ``finish`` other threads wait.

    Raises UnavailableError when planes do not answer in time, and LayoutMismatchError or
    InvalidRequestError for a pool or settings that are not the model's.
    """

    def __init__(self, model: PreTrainedModel, settings: PlaneSettings) -> None:
        self._lock = threading.Lock()
        self._owner = 0  # the thread that holds the lock
        self._next_id = 1
        self._unused: list[tuple[Session, Sequence[int]]] = []  # to be freed with the next step
        self._is_lost = False
        self._has_plan = False
        self._settings = settings
        self._is_closed = threading.Event()
        self._process_id = os.getpid()
        closing = ExitStack()
        with closing:
            loop = LoopThread("kvplane-transformers")
            closing.callback(loop.close)
            address, self.backend = _connect(model, settings, loop, closing)
            self._link = ControlLink(
                loop, address, settings.pool_id, settings.timeout_s, settings.tls
            )
            closing.callback(self._link.close)
            pool = self._link.pool_layout(settings.start_timeout_s)
            self._layout = pool
            if settings.control_plane:
                self._layout = _layout_in(pool, model, settings)
            self._namespace = self._wanted_namespace = self._changes = ""
            self._shapes = layer_shapes(model.config, latent=False)
            self.states = states_of(model)
            self.follow(model)
            self._open_session()
            closing.callback(self._is_closed.set)
            self._close = _closing_once(closing.pop_all())
        atexit.register(self._close)
        # In a thread of its own: a finalizer may run in one that closing waits for.
        self._finalizer = weakref.finalize(self, _in_background, self._close)
        self._finalizer.atexit = False

    @property
    def is_open(self) -> bool:
        """Return whether the planes were not closed yet, by ``close`` or at the process's end, and
        are not those of the process that this one was forked from.
        """
        is_here = self._process_id == os.getpid()
        return is_here and self._finalizer.alive and not self._is_closed.is_set()

    @property
    def num_layers(self) -> int:
        """Number of the model's layers that have keys and values."""
        return self._layout.num_layers

    @property
    def block_size_tokens(self) -> int:
        """Number of tokens of a block."""
        return self._layout.block_size_tokens

    def follow(self, model: PreTrainedModel) -> None:
        """Use the namespace of the model's present state for the next sequences, in a new session
        if it has changed. Raises InvalidRequestError where the state cannot be known.
        """
        settings = self._settings
        if settings.namespace is not None:
            self._wanted_namespace = settings.namespace
            return
        is_shared = bool(settings.control_plane)
        folder = _folder_of(model) if is_shared and not settings.model_id else None
        self._wanted_namespace = namespace_of(model, is_shared=is_shared, folder=folder)
        if self._wanted_namespace != self._namespace:
            self._changes = last_changes(model)
            if layer_shapes(model.config, latent=False) != self._shapes:
                raise InvalidRequestError(
                    "has other layers or windows than its pool: call close_planes first",
                    field="model",
                )

    def get_pool(self) -> PoolInfo:
        """Fetch the pool's description from the control plane."""
        return self._link.get_pool()

    def close(self) -> None:
        """Close the session, and stop planes that are embedded. Harmless when called again."""
        self._finalizer.detach()
        atexit.unregister(self._close)
        self._close()

    def new_ids(self, num: int) -> range:
        """Return sequence ids that were never used before."""
        first, self._next_id = self._next_id, self._next_id + num
        return range(first, first + num)

    def begin(
        self, operations: Sequence[ops.Operation], session: Session | None = None
    ) -> tuple[Session, list[OperationResult]]:
        """Make a step of ``operations`` and start its plan; all are done, or this raises.

        ``session``: the one whose sequences they change, None when they only admit. Raises
        SessionNotFoundError when that one has ended, InvalidRequestError when the model has changed
        since its sequences were computed, and the error of an item that was not done, such as
        PoolFullError; the plan is then aborted.
        """
        self._acquire()
        unused: list[tuple[Session, Sequence[int]]] = []
        try:
            present = self._session_for(session)
            unused, self._unused = self._unused, []
            frees = [ops.free(ids) for owner, ids in unused if owner is present]
            result = self._link.step([*frees, *operations])
            self._has_plan = result.plan is not None
            results = result.results[len(frees) :]  # a freed one may have ended with another plan
            for failure in (failure for each in results for failure in each.failures):
                raise failure.error
            if result.plan is not None:
                receipts = self.backend.start(result.plan).receipts
                if receipts:
                    self._link.add_receipts(receipts)
                    self._has_plan = False
        except BaseException as error:
            self._unused += unused
            self._fail(error)
            raise
        return present, results

    def finish(self) -> None:
        """Receive the plan's receipt, after the last layer."""
        try:
            if self._has_plan:
                self._link.add_receipts(self.backend.finish())
                self._has_plan = False
        except BaseException as error:
            self._fail(error)
            raise
        self._release()

    def abandon(self) -> None:
        """Abort the plan that runs in this thread, if one does."""
        if self._owner == threading.get_ident():
            self._fail(None)

    def free(self, session: Session, sequence_ids: Sequence[int]) -> None:
        """Free these sequences, and those of ``free_later``. Failures are logged: the end of the
        lease frees them too.
        """
        if not self.is_open:
            return
        self._unused.append((session, sequence_ids))
        try:
            self.begin([])
            self.finish()
        except KvplaneError as error:
            if self.is_open:  # otherwise they were freed with the session
                _LOGGER.warning("sequences not freed yet: %s", error)

    def free_later(self, session: Session, sequence_ids: Sequence[int]) -> None:
        """Free sequences at the next step; safe to call in a finalizer."""
        _in_background(lambda: self.free(session, sequence_ids))

    def _acquire(self) -> None:
        self.abandon()  # a forward pass of this thread was interrupted
        if not self.is_open:
            raise InvalidRequestError("its planes were closed, or left by a fork", field="cache")
        self._lock.acquire()
        self._owner = threading.get_ident()

    def _release(self) -> None:
        self._owner = 0
        self._lock.release()

    def _session_for(self, wanted: Session | None) -> Session:
        has_changed = self._namespace != self._wanted_namespace
        if wanted is not None and has_changed:
            raise InvalidRequestError(
                f"holds what other weights, adapters or settings of the model computed, before "
                f"{self._changes} changed: reset the cache. If forward passes change it, give "
                "namespace=, another one for all other weights",
                field="cache",
            )
        if wanted is None and (self._is_lost or has_changed):
            self.backend.close()
            self._open_session()
        present = self._link.session
        if wanted is not None and (self._is_lost or wanted is not present):
            raise SessionNotFoundError("the cache's session has ended: reset the cache")
        return present

    def _open_session(self) -> None:
        self._is_lost = True  # until it is open
        self._link.namespace = self._wanted_namespace
        self.backend.open(self._link.open(self._layout))
        self._namespace, self._is_lost = self._wanted_namespace, False

    def _fail(self, error: BaseException | None) -> None:
        """Abort the plan. If that fails, or the step's outcome is unknown, the session is lost."""
        is_known = isinstance(error, KvplaneError) and not isinstance(error, _SESSION_LOST)
        self._is_lost = self._is_lost or not (is_known or self._has_plan)
        try:
            if self._has_plan:
                self._link.abort_last_plan()
        except KvplaneError as failure:
            _LOGGER.warning("plan not aborted: %s", failure)
            self._is_lost = True
        finally:
            self._has_plan = False
            self._release()


_OPEN: Final[weakref.WeakKeyDictionary[PreTrainedModel, dict[PlaneSettings, Planes]]] = (
    weakref.WeakKeyDictionary()
)
_OPEN_LOCK: Final = threading.Lock()
_Groups = tuple[LayerGroup, ...]
_PROBED: Final[weakref.WeakKeyDictionary[PreTrainedModel, dict[_Groups, _Groups]]] = (
    weakref.WeakKeyDictionary()
)
"""The layer groups that the probe found for a model, by the groups of its config."""
_BEFORE: Final[weakref.WeakKeyDictionary[PreTrainedModel, str]] = weakref.WeakKeyDictionary()
"""The attention implementation that a model had before its caches."""
_MAX_TOKENS: Final[weakref.WeakKeyDictionary[PreTrainedModel, int | None]] = (
    weakref.WeakKeyDictionary()
)
"""Tokens of the longest sequence that does not change RoPE's frequencies for others."""


def planes_of(model: PreTrainedModel, settings: PlaneSettings) -> Planes:
    """Return the planes of a model's caches, opened at the first call. They end with the model,
    with ``close_planes`` or with the process.
    """
    with _OPEN_LOCK:
        of_model = _OPEN.setdefault(model, {})
        planes = of_model.get(settings)
        if planes is None or not planes.is_open:
            planes = of_model[settings] = Planes(model, settings)
        return planes


def _prepare(model: PreTrainedModel, wants_probe: bool, *, latent: bool) -> tuple[LayerGroup, ...]:
    """Adapt and probe the model. Returns its layer groups. Afterwards its attention implementation
    is "kvplane" if ``adapters`` changed its modules, otherwise what it was before. ``latent``: see
    ``layer_groups``.
    """
    adapters.adapt(model)
    before = model.config.get_text_config()._attn_implementation
    if before != attention.NAME:
        _BEFORE[model] = before
    try:
        probed = _PROBED.setdefault(model, {})
        of_config = layer_groups(model.config, latent=latent)
        with torch.compiler.set_stance("force_eager"):  # a compiled model runs as it is written
            if wants_probe and of_config not in probed:
                probed[of_config] = probe(model, latent=latent)
            states = states_of(model)
            _MAX_TOKENS[model] = max_independent_tokens(model)
        return probed.get(of_config) or with_states(of_config, states)
    finally:
        is_adapted = adapters.is_adapted(model)
        adapters.set_attention(model, attention.NAME if is_adapted else before)


def check_length(model: PreTrainedModel, num_tokens: int) -> None:
    """Raise InvalidRequestError where RoPE would mix a sequence of ``num_tokens`` with others."""
    limit = _MAX_TOKENS.get(model)
    if limit is not None and num_tokens > limit:
        raise InvalidRequestError(
            f"has a row of {num_tokens} tokens, must have at most {limit}: {WHY}. Use attention of "
            "transformers' own and no PlaneCache for longer rows",
            field="input_ids",
        )


def close_planes(model: PreTrainedModel) -> None:
    """End the sessions of a model's caches, and the planes that are embedded for them. An
    adapted model attends as before its first cache.
    """
    with _OPEN_LOCK:
        for planes in _OPEN.pop(model, {}).values():
            planes.close()
    if adapters.is_adapted(model):  # transformers allows no choice for it
        adapters.set_attention(model, _BEFORE.get(model, attention.NAME))


def _connect(
    model: PreTrainedModel,
    settings: PlaneSettings,
    loop: LoopThread,
    closing: ExitStack,
) -> tuple[str, DataBackend]:
    """Connect to a model's planes: return the control plane's address and the backend."""
    if settings.control_plane:
        remote = RemoteBackend(loop, settings.timeout_s, settings.tls)
        closing.callback(remote.stop)
        return settings.control_plane, remote
    try:
        from kvplane.runtime.embedded import device_for, serves_latents, start_planes
    except ImportError as error:
        raise InvalidRequestError(
            "must be given: planes in this process need kvplane[control-plane,data-plane]; "
            f"{what_is_missing(error)}",
            field="control_plane",
        ) from error
    device = device_for(model.device)
    groups = _prepare(model, settings.probe, latent=settings.latent and serves_latents(device))
    dtype = _dtype_of(model)
    layout = Layout(
        model_id=_MODEL_ID,
        block_size_tokens=settings.block_size_tokens,
        dtype=dtype,
        kv_dtype=settings.kv_dtype or dtype,
        groups=groups,
    )
    return start_planes(
        closing,
        layout,
        device=device,
        pool_id=settings.pool_id,
        num_device_blocks=settings.num_device_blocks,
        num_threads=settings.num_threads,
        start_timeout_s=settings.start_timeout_s,
    )


def _layout_in(pool: Layout, model: PreTrainedModel, settings: PlaneSettings) -> Layout:
    """Return the layout that the model needs in another process's pool, which the control plane
    compares with the pool's. Whether latents are kept is the pool's choice.
    """
    groups = _prepare(model, settings.probe, latent=bool(pool.latent_layers))
    model_id = settings.model_id
    if not model_id:
        folder = _folder_of(model)
        if folder is None:
            raise InvalidRequestError(
                "must be given: the model was not loaded from a folder", field="model_id"
            )
        model_id = layout_from_hf(folder, groups=groups).model_id
    own = replace(pool, model_id=model_id, dtype=_dtype_of(model), groups=groups)
    return own.with_scales_of(pool)


def _folder_of(model: PreTrainedModel) -> Path | None:
    """Return the folder that the model was loaded from."""
    folder = Path(model.name_or_path or "")
    return folder if (folder / "config.json").is_file() else None


def _dtype_of(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _closing_once(stack: ExitStack) -> Callable[[], None]:
    """Return a function that closes ``stack`` in this process. Called in two threads, as by a
    finalizer at the process's end, the second waits for the first.
    """
    lock, process_id = threading.Lock(), os.getpid()

    def close() -> None:
        if os.getpid() == process_id:
            with lock:
                stack.close()

    return close


def _in_background(call: Callable[[], Any]) -> None:
    threading.Thread(target=call, name="kvplane-release", daemon=True).start()
