"""Names everything besides tokens that a model's keys and values depend on: weights, adapters,
config and attributes of modules. Prefixes are found under that name alone.

A name is found once and kept while nothing changes, which is checked before each forward pass, in
some 80 microseconds for a model of 300 tensors. A parameter or buffer has changed when it was
replaced, or when its pointer or ``_version`` moved; a write through ``.data`` moves neither.
"""

from __future__ import annotations

import copy
import json
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging
from xxhash import xxh3_128

from kvplane.errors import InvalidRequestError

_LOGGER: Final = logging.getLogger(__name__)
_ATTRIBUTE: Final = "_kvplane_state"
_MAX_KEPT: Final = 64
_MAX_NAMED: Final = 3
_WARN_AFTER: Final = 4  # looks in a row that found the same changes
_SERIALS: Final = count(1)
_VERSION: Final = operator.attrgetter("_version")
# Values of a config that no key and no value depends on, beside those of private names. The types
# of tensors are read from the tensors.
_NOT_OF_KV: Final = frozenset(
    {
        *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id"),
        *("output_attentions", "output_hidden_states", "return_dict", "use_cache"),
        *("architectures", "dtype", "torch_dtype", "transformers_version"),
    }
)
_NOT_OF_MODULES: Final = frozenset({"name_or_path"})
_PLAIN: Final = (bool, int, float, str, type(None))
_READ: Final = (*_PLAIN, list, tuple, dict)  # types of attributes that a name may depend on

Part = tuple[str, str | torch.Tensor]
_Settings = tuple[bool, list[str], list[str], dict[str, Any], int]


def namespace_of(model: PreTrainedModel, *, is_shared: bool, folder: Path | None = None) -> str:
    """Return the namespace of the present state of ``model``: 32 hex digits, or empty.

    ``is_shared``: whether other processes use the pool. Then the digits are a digest of contents,
    and the namespace is empty for the checkpoint in ``folder`` as transformers loads it: the
    pool's model id has a hash of it, and engines that serve it use the empty namespace. Otherwise
    the digits name tensors by this process's records of them, and no parameter is read.

    Raises InvalidRequestError for the field "namespace" where changes could not be noticed.
    """
    state = _state_of(model)
    with state.lock:
        identity = state.identity(model)
        if not is_shared:
            return identity
        kept = state.namespaces.get((identity, folder))
        if kept is None:
            kept = "" if folder is not None and state.is_stored(folder, model) else state.digest()
            if len(state.namespaces) >= _MAX_KEPT:
                state.namespaces.clear()
            state.namespaces[identity, folder] = kept
        return kept


def last_changes(model: PreTrainedModel) -> str:
    """Return the names of parts of ``model`` whose change last changed its namespace."""
    return ", ".join(_state_of(model).changed[:_MAX_NAMED])


def weights_changed(model: PreTrainedModel) -> None:
    """Treat all of the model's weights as new, after a write that cannot be noticed."""
    state = _state_of(model)
    with state.lock:
        state.forget()


@dataclass(slots=True, eq=False)
class _Known:
    """A name for the contents of one tensor at one version."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    pointer: int
    token: str  # never equal for different contents
    digest: str = ""

    def is_of(self, tensor: torch.Tensor) -> bool:
        return (
            self.tensor() is tensor
            and self.version == tensor._version
            and self.pointer == tensor.data_ptr()
        )


class _ModelState:
    """The last known state of one model, of which it is an attribute."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.namespaces: dict[tuple[str, Path | None], str] = {}
        self.changed: list[str] = []
        self._watch: _Watch | None = None
        self._identity = ""
        self._parts: list[Part] = []
        self._texts: list[tuple[str, str]] = []
        self._num_changes = 0  # to the same parts, looks in a row
        self._known: dict[int, _Known] = {}  # by id of the tensor
        self._adapters: list[_Settings] = []
        self._had_merged = False

    def __reduce__(self) -> tuple[type[_ModelState], tuple[()]]:
        return _ModelState, ()  # a copy of the model is another model

    def forget(self) -> None:
        """Discard all records of tensors' contents."""
        self._watch, self._known = None, {}

    def identity(self, model: PreTrainedModel) -> str:
        """Return a name for what the model computes, by which this process knows it."""
        if self._watch is None or not self._watch.sees_no_change(model):
            self._see(model)
        else:
            self._num_changes = 0
        return self._identity

    def digest(self) -> str:
        """Return a name for what the model computes, which is a hash of its tensors' contents."""
        return _name(_texts(self._parts, self._digest_of))

    def is_stored(self, folder: Path, model: PreTrainedModel) -> bool:
        """Return whether the model equals what transformers loads from ``folder``, which is loaded
        again for this, in the checkpoint's dtype, and dropped.
        """
        is_of_engines = model.device.type == "cpu"  # of those that compute there
        if self._watch is None or self._watch.has_active_adapters() or not is_of_engines:
            return False
        had_bar = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            with torch.random.fork_rng(devices=[]):
                stored = type(model).from_pretrained(folder, dtype="auto", local_files_only=True)
        except Exception as error:  # a model's own code may raise anything
            _LOGGER.info("not compared with its checkpoint folder=%s error=%s", folder, error)
            return False
        finally:
            if had_bar:
                transformers_logging.enable_progress_bar()
        theirs = _parts_of(stored)
        return len(theirs) == len(self._parts) and all(map(_is_equal, self._parts, theirs))

    def _see(self, model: PreTrainedModel) -> None:
        self._watch = None
        watch = _Watch(model)
        known = {}
        for tensor in watch.tensors:
            found = self._known.get(id(tensor))
            known[id(tensor)] = found if found and found.is_of(tensor) else _look_at(tensor)
        # PEFT merges through .data, and may have done so with other weights of an adapter.
        has_changed = known != self._known or watch.adapters != self._adapters
        if has_changed and (watch.has_merged_adapters or self._had_merged):
            known = {id(tensor): _look_at(tensor) for tensor in watch.tensors}
        self._had_merged, self._adapters = watch.has_merged_adapters, watch.adapters
        self._known = known
        self._parts = _parts_of(model)
        self._watch = watch
        before, self._texts = self._texts, _texts(self._parts, lambda t: known[id(t)].token)
        self._identity = _name(self._texts)
        if before and before != self._texts:
            changes = set(before) ^ set(self._texts)
            self._note_changes(sorted({name.lstrip(".") for name, _ in changes}))

    def _note_changes(self, changed: list[str]) -> None:
        parameters = (name for name, part in self._parts if isinstance(part, torch.nn.Parameter))
        is_trained = any(name.lstrip(".") in changed for name in parameters)
        is_again = changed == self.changed and not is_trained  # no forward pass trains
        self._num_changes = self._num_changes + 1 if is_again else 1
        self.changed = changed
        if self._num_changes == _WARN_AFTER:
            _LOGGER.warning(
                "nothing that is cached is found again: before each of %d forward passes %s had "
                "changed. If the model itself does that, give PlaneCache a namespace=, another one "
                "for all other weights",
                _WARN_AFTER,
                ", ".join(changed[:_MAX_NAMED]),
            )

    def _digest_of(self, tensor: torch.Tensor) -> str:
        known = self._known[id(tensor)]
        known.digest = known.digest or _digest(tensor)
        return known.digest


class _Watch:
    """Detects changes to a model since this object was made.

    All loops are in C: this runs before each forward pass.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        named = list(model.named_modules())
        tables = [t for _, m in named for t in (m._parameters, m._buffers, m._modules)]
        self._tables = [table for table in tables if table]
        self._empty_tables = [table for table in tables if not table]
        self._entries = list(chain.from_iterable(map(dict.values, self._tables)))
        self.tensors: list[torch.Tensor] = []
        for name, module in named:
            for key, tensor in chain(module._parameters.items(), module._buffers.items()):
                if tensor is not None:
                    _require_versions(f"{name}.{key}", tensor)
                    self.tensors.append(tensor)
        self._versions = list(map(_VERSION, self.tensors))
        self._pointers = list(map(torch.Tensor.data_ptr, self.tensors))
        self._attributes = [module.__dict__ for _, module in named]
        self._num_attributes = list(map(len, self._attributes))
        public = [(own, key) for own in self._attributes for key in own if not key.startswith("_")]
        read = [(own, key) for own, key in public if isinstance(own[key], _READ)]
        others = [(own, key) for own, key in public if not isinstance(own[key], _READ)]
        self._read = [own for own, _ in read], [key for _, key in read]
        self._values = list(map(operator.getitem, *self._read))
        self._others = [own for own, _ in others], [key for _, key in others]
        self._types = list(map(type, map(operator.getitem, *self._others)))
        self._adapted = [module for _, module in named if hasattr(module, "_disable_adapters")]
        self.adapters = list(map(_adapter_settings, self._adapted))
        self.has_merged_adapters = any(merged for _, _, merged, _, _ in self.adapters)
        self._config_then = copy.deepcopy(model.config.__dict__)

    def has_active_adapters(self) -> bool:
        """Return whether any layer computes with an adapter."""
        return any(map(_active_adapters, self._adapted))

    def sees_no_change(self, model: PreTrainedModel) -> bool:
        """Return whether the model is unchanged since this object was made."""
        try:
            return (
                sum(map(len, self._tables)) == len(self._entries)
                and not any(self._empty_tables)
                and all(
                    map(
                        operator.is_,
                        chain.from_iterable(map(dict.values, self._tables)),
                        self._entries,
                    )
                )
                and list(map(_VERSION, self.tensors)) == self._versions
                and list(map(torch.Tensor.data_ptr, self.tensors)) == self._pointers
                and list(map(len, self._attributes)) == self._num_attributes
                and list(map(operator.getitem, *self._read)) == self._values
                and list(map(type, map(operator.getitem, *self._others))) == self._types
                and list(map(_adapter_settings, self._adapted)) == self.adapters
                and model.config.__dict__ == self._config_then
            )
        except (KeyError, RuntimeError, TypeError, ValueError):  # gone, or not comparable
            return False


def _state_of(model: PreTrainedModel) -> _ModelState:
    state: _ModelState = model.__dict__.setdefault(_ATTRIBUTE, _ModelState())
    return state


def _require_versions(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidRequestError if the tensor could change unnoticed."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        what = f"is a {type(tensor).__name__}"
    elif tensor.is_meta:
        what = "is on the meta device, as offloaded weights are"
    elif tensor.is_inference():
        what = "was made in inference mode"
    else:
        return
    raise InvalidRequestError(
        f"must be given, another one for all other weights: {name} {what}, so that changes of it "
        "cannot be noticed",
        field="namespace",
    )


def _look_at(tensor: torch.Tensor) -> _Known:
    """Record a tensor's present version. Buffers are small, and models remake some of them: their
    contents count.
    """
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    digest = "" if is_parameter else _digest(tensor)
    token = digest or str(next(_SERIALS))
    return _Known(weakref.ref(tensor), tensor._version, tensor.data_ptr(), token, digest)


def _digest(tensor: torch.Tensor) -> str:
    kind = f"{tensor.dtype} {list(tensor.shape)} {tensor.device.type}"  # each kind rounds otherwise
    digest = xxh3_128(kind.encode())
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest.update(data.numpy().tobytes())
    return digest.hexdigest()


def _texts(parts: list[Part], name_of: Callable[[torch.Tensor], str]) -> list[tuple[str, str]]:
    return [(name, part if isinstance(part, str) else name_of(part)) for name, part in parts]


def _name(texts: list[tuple[str, str]]) -> str:
    digest = xxh3_128()
    for name, text in texts:
        digest.update(f"{len(name)} {name} {len(text)} {text}\n".encode())
    return digest.hexdigest()


def _is_equal(ours: Part, theirs: Part) -> bool:
    (name, part), (name_there, stored) = ours, theirs
    if isinstance(part, str) or isinstance(stored, str):
        return (name, part) == (name_there, stored)
    if part.device != stored.device or part.shape != stored.shape:
        return False
    return name == name_there and torch.equal(part, stored.to(part.dtype))


def _parts_of(model: PreTrainedModel) -> list[Part]:
    revision = getattr(model.config, "_commit_hash", None)
    config = json.dumps(_of_kv(model.config.to_dict()), sort_keys=True, default=str)
    return [("config", f"{revision} {config}"), *_parts(model, "")]


def _of_kv(values: Any) -> Any:
    if isinstance(values, dict):
        return {
            str(key): _of_kv(value)
            for key, value in values.items()
            if not str(key).startswith("_") and key not in _NOT_OF_KV
        }
    return values


def _parts(module: torch.nn.Module, name: str) -> Iterator[Part]:
    """Yield tensors and plain attributes of a module and its submodules. A layer with adapters
    yields its base layer and its active adapters.
    """
    children: dict[str, Any] = module._modules
    if "base_layer" in children and hasattr(module, "_disable_adapters"):
        yield from _parts(children["base_layer"], name)
        kept = {key: child for key, child in children.items() if key != "base_layer"}
        active = [
            adapter
            for adapter in _active_adapters(module)
            if any(_has(child, adapter) for child in kept.values())
        ]
        if not active:
            return
        name = f"{name}.adapted"
        for adapter in active:
            for key, child in list(kept.items()):
                if _has(child, adapter):
                    yield from _part(f"{name}.{adapter}.{key}", child[adapter])
            for key, value in module.__dict__.items():
                if not key.startswith("_") and isinstance(value, dict) and adapter in value:
                    yield f"{name}.{adapter}.{key}", _text(value[adapter])
        children = {key: child for key, child in kept.items() if not hasattr(child, "__contains__")}
    elif hasattr(module, "_disable_adapters"):
        yield f"{name}.adapters", repr(_adapter_settings(module))
    attributes = {
        key: value
        for key, value in module.__dict__.items()
        if not key.startswith("_") and key not in _NOT_OF_MODULES and _is_plain(value)
    }
    yield name, type(module).__name__
    yield from ((f"{name}.{key}", repr(value)) for key, value in sorted(attributes.items()))
    for key, part in chain(module._parameters.items(), module._buffers.items(), children.items()):
        yield from _part(f"{name}.{key}", part)


def _part(name: str, part: Any) -> Iterator[Part]:
    if isinstance(part, torch.nn.Module):
        yield from _parts(part, name)
    elif part is not None:
        yield name, part if isinstance(part, torch.Tensor) else _text(part)


def _has(child: Any, adapter: str) -> bool:
    return hasattr(child, "__contains__") and adapter in child


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _text(value: Any) -> str:
    return repr(value) if _is_plain(value) else type(value).__name__


def _adapter_settings(module: Any) -> _Settings:
    """Copy the settings that PEFT's layers keep in lists and dicts, to compare them by value."""
    active = module._active_adapter
    return (
        module._disable_adapters,
        [active] if isinstance(active, str) else list(active),
        list(getattr(module, "merged_adapters", ())),
        dict(getattr(module, "scaling", None) or {}),
        len(module._forward_pre_hooks),
    )


def _active_adapters(module: Any) -> list[str]:
    """List the adapters that a layer of PEFT computes with, without those merged into its weights.
    Raises InvalidRequestError where a forward pass chooses them.
    """
    is_disabled, active, merged, _, num_hooks = _adapter_settings(module)
    if num_hooks:
        what = "adapters are chosen for each row (adapter_names)"
    elif is_disabled and merged:
        what = "merged adapters are disabled, which a forward pass unmerges: call unmerge_adapter"
    else:
        return [] if is_disabled or merged else active
    raise InvalidRequestError(f"must be given: {what}", field="namespace")
