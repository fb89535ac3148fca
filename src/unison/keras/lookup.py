"""`StringLookup` and `IntegerLookup`: the index of a token in a vocabulary, without TensorFlow.

Arguments, configuration and saved files are those of Keras' layers of these names.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras.src.saving import serialization_lib

from unison.errors import InvalidArgumentError
from unison.fingerprint import fingerprint64
from unison.keras import host_layers
from unison.keras.host_layers import HostLayer
from unison.runtime.precision import device_dtype


@dataclasses.dataclass
class _Seen:
    """The counts of the tokens in `adapt`; not in the layer, where Keras would wrap them."""

    tokens: collections.Counter[Any] = dataclasses.field(default_factory=collections.Counter)
    #: The number of documents that contain each token.
    documents: collections.Counter[Any] = dataclasses.field(default_factory=collections.Counter)
    num_documents: int = 0


@dataclasses.dataclass
class _Vocabulary:
    """The tokens in order, and their indices by key."""

    tokens: list[Any] = dataclasses.field(default_factory=list)
    index: dict[Any, int] = dataclasses.field(default_factory=dict)


class IndexLookup(HostLayer):
    """The index of a token in a vocabulary: the common part of `StringLookup` and `IntegerLookup`.

    The indices are, in order: the mask's (0, if there is one and the output is indices), those of
    tokens out of vocabulary, those of the vocabulary.
    """

    #: Keras' name of the dtype of the tokens.
    vocabulary_dtype: str

    def __init__(
        self,
        max_tokens: int | None,
        num_oov_indices: int,
        mask_token: Any,
        oov_token: Any,
        vocabulary: Any,
        idf_weights: Any,
        invert: bool,
        output_mode: str,
        pad_to_max_tokens: bool,
        sparse: bool,
        oov_method: str,
        name: str | None,
        salt: Any,
        **kwargs: Any,
    ):
        for ignored in ("trainable", "dtype", "vocabulary_size", "has_input_vocabulary"):
            kwargs.pop(ignored, None)
        if kwargs:
            raise ValueError(f"Unrecognized keyword argument(s): {kwargs}")
        output_mode = host_layers.output_mode_of(output_mode)
        if max_tokens is not None and max_tokens <= 1:
            raise ValueError(f"max_tokens must be greater than 1. Received: {max_tokens}")
        if pad_to_max_tokens and max_tokens is None:
            raise ValueError("pad_to_max_tokens=True needs max_tokens. Received: max_tokens=None")
        if num_oov_indices < 0:
            raise ValueError(f"num_oov_indices must not be negative. Received: {num_oov_indices}")
        if invert and output_mode != "int":
            raise ValueError(
                f"With invert=True, output_mode must be 'int'. Received: {output_mode!r}"
            )
        if sparse or salt is not None:
            raise ValueError(
                "Sparse outputs and salted hashing are not supported. Received: "
                f"sparse={sparse}, salt={salt}. Leave them at False and None."
            )
        if idf_weights is not None and output_mode != "tf_idf":
            raise ValueError(
                f"idf_weights require output_mode='tf_idf'. Received: output_mode={output_mode!r}"
            )
        super().__init__(name)
        self.max_tokens = max_tokens
        self.num_oov_indices = num_oov_indices
        self.mask_token = mask_token
        self.oov_token = oov_token
        self.invert = invert
        self.output_mode = output_mode
        self.pad_to_max_tokens = pad_to_max_tokens
        self.oov_method = oov_method
        self.input_vocabulary = None if isinstance(vocabulary, str | os.PathLike) else vocabulary
        self.input_idf_weights = idf_weights
        self._has_input_vocabulary = vocabulary is not None
        self._idf_weights: np.ndarray | None = None
        self._vocabulary = _Vocabulary()
        self._seen = _Seen()
        if vocabulary is not None:
            self.set_vocabulary(vocabulary, idf_weights)

    # -- what differs between strings and integers --

    def _keys(self, inputs: Any) -> np.ndarray:
        """Returns tokens as an array of the keys of the index."""
        raise NotImplementedError

    def _key(self, token: Any) -> Any:
        return self._keys([token]).item()

    def _token(self, key: Any) -> Any:
        """Returns a token in the form of the vocabulary."""
        raise NotImplementedError

    def _bucket(self, key: Any) -> int:
        """Returns the index, among those of unknown tokens, of `key`."""
        raise NotImplementedError

    # -- the vocabulary --

    def _oov_start(self) -> int:
        return int(self.mask_token is not None and self.output_mode == "int")

    def _token_start(self) -> int:
        return self._oov_start() + self.num_oov_indices

    def vocabulary_size(self) -> int:
        """Returns the number of indices, including those of the mask and of unknown tokens."""
        return len(self._vocabulary.tokens) + self._token_start()

    def get_vocabulary(self, include_special_tokens: bool = True) -> list[Any]:
        """Returns the tokens, each at its index.

        Args:
            include_special_tokens: Whether to list the mask and the unknown tokens' name first.
        """
        if not include_special_tokens:
            return list(self._vocabulary.tokens)
        return [*self._special_tokens(), *self._vocabulary.tokens]

    def _special_tokens(self) -> list[Any]:
        return [self.mask_token] * self._oov_start() + [self.oov_token] * self.num_oov_indices

    def set_vocabulary(self, vocabulary: Any, idf_weights: Any = None) -> None:
        """Sets the vocabulary.

        Args:
            vocabulary: The tokens, with or without the special ones in front, or the path of a
                file with one token a line.
            idf_weights: For output mode "tf_idf", the weight of every token.

        Raises:
            ValueError: It is empty, too large, has a token twice, or a special token in the middle.
        """
        if self.output_mode == "tf_idf" and idf_weights is None:
            raise ValueError("A vocabulary for output_mode='tf_idf' needs idf_weights.")
        if isinstance(vocabulary, str | os.PathLike):
            vocabulary = self._read_vocabulary(os.fspath(vocabulary))
        listed = [self._token(key) for key in self._keys(vocabulary).tolist()]
        if not listed:
            raise ValueError(f"The vocabulary must not be empty. Received: {vocabulary!r}")
        start = self._token_start()
        has_special_tokens = start > 0 and listed[:start] == self._special_tokens()
        tokens = listed[start:] if has_special_tokens else listed
        self._check_tokens(tokens)
        self._set_tokens(tokens)
        if idf_weights is not None:
            self._set_idf_weights(np.asarray(idf_weights), len(listed), has_special_tokens)

    def _read_vocabulary(self, path: str) -> list[Any]:
        if serialization_lib.in_safe_mode():
            raise ValueError(
                f"A saved model asks for the vocabulary file {path!r}, outside the model. Pass "
                "safe_mode=False to the loading function if you trust the model."
            )
        return self._tokens_in(path, str.splitlines)

    def _tokens_in(self, path: str, lines_of: Callable[[str], list[str]]) -> list[Any]:
        """Returns the tokens in a file with one token per line.

        Raises:
            ValueError: It is not text, or a line is not a token of this layer.
        """
        try:
            with open(path, encoding="utf-8") as file:
                return [self._parsed(line) for line in lines_of(file.read())]
        except ValueError as error:
            raise ValueError(
                f"Expected the vocabulary of layer {self.name!r} in {path}: UTF-8, one token a "
                f"line. Received: {error}"
            ) from error

    def _parsed(self, line: str) -> Any:
        return line

    def _check_tokens(self, tokens: Sequence[Any]) -> None:
        repeated = [token for token, count in collections.Counter(tokens).items() if count > 1]
        if repeated:
            raise ValueError(f"The vocabulary has tokens more than once: {repeated[:10]}")
        misplaced = {self.mask_token} | ({self.oov_token} if self.invert else set())
        found = [token for token in tokens if token is not None and token in misplaced]
        if found:
            raise ValueError(
                f"The vocabulary has the special token {found[0]!r} among the others. Leave the "
                f"special tokens out, or put them first, as {self._special_tokens()}."
            )
        if self.max_tokens is not None and len(tokens) + self._token_start() > self.max_tokens:
            raise ValueError(
                f"The vocabulary, with {self._token_start()} special tokens, must have at most "
                f"max_tokens={self.max_tokens} tokens. Received: {len(tokens)} tokens"
            )

    def _set_tokens(self, tokens: list[Any]) -> None:
        start = self._token_start()
        index = {self._key(token): start + i for i, token in enumerate(tokens)}
        self._vocabulary = _Vocabulary(tokens, index)

    def _set_idf_weights(self, weights: np.ndarray, count: int, has_special_tokens: bool) -> None:
        if weights.shape != (count,):
            raise ValueError(
                f"idf_weights must have one weight for each of the {count} tokens. Received: "
                f"shape {weights.shape}"
            )
        front = 0 if has_special_tokens else self._token_start()
        weights = np.concatenate([np.full(front, np.mean(weights)), weights])
        self._idf_weights = np.pad(weights, (0, self._depth() - len(weights)))

    def _depth(self) -> int:
        if self.pad_to_max_tokens:
            assert self.max_tokens is not None
            return self.max_tokens
        return self.vocabulary_size()

    # -- learning it --

    def adapt(self, data: Any, steps: int | None = None) -> None:
        """Learns the vocabulary: the tokens of `data`, the most frequent first.

        Tokens with the same frequency are in descending order.

        Args:
            data: An array, a list, or an iterable of batches.
            steps: For an iterable, the number of batches to read.
        """
        host_layers.adapt(self, data, steps)

    def reset_state(self) -> None:
        """Resets the counts of `update_state`."""
        self._seen = _Seen()

    def update_state(self, data: Any) -> None:
        """Counts the tokens of a batch, whose last axis is that of a document's tokens."""
        if self._has_input_vocabulary:
            raise ValueError(
                f"Layer {self.name!r} was given its vocabulary, and cannot learn another one."
            )
        keys = np.atleast_1d(self._keys(data))
        self.count_documents(keys.reshape(-1, keys.shape[-1]).tolist())

    def count_documents(self, documents: Sequence[Sequence[Any]]) -> None:
        """Counts the tokens of documents, given as keys of the index."""
        for document in documents:
            self._seen.tokens.update(document)
            self._seen.documents.update(set(document))
        self._seen.num_documents += len(documents)

    def finalize_state(self) -> None:
        """Sets the vocabulary to the tokens that were counted."""
        seen = self._seen
        if self._has_input_vocabulary or not seen.tokens:
            return
        special = {self._key(t) for t in (self.mask_token, self.oov_token) if t is not None}
        keys = [key for key in seen.tokens if key not in special]
        keys.sort(key=lambda key: (seen.tokens[key], key), reverse=True)
        if self.max_tokens is not None:
            keys = keys[: self.max_tokens - self._token_start()]
        self._set_tokens([self._token(key) for key in keys])
        if self.output_mode == "tf_idf":
            documents = np.array([seen.documents[key] for key in keys], np.float64)
            weights = np.log1p(seen.num_documents / (1 + documents))
            self._set_idf_weights(weights, len(keys), has_special_tokens=False)
        self.reset_state()

    # -- looking up --

    def encode(self, inputs: Any) -> np.ndarray:
        if self.invert:
            return self._tokens_at(np.asarray(inputs))
        keys = self._keys(inputs)
        indices = np.array([self._lookup(key) for key in keys.ravel().tolist()], dtype=np.int64)
        return self.encode_indices(indices.reshape(keys.shape))

    def encode_indices(self, indices: np.ndarray) -> np.ndarray:
        """Returns the output for indices of tokens in the output mode; -1 is a masked token."""
        if self.output_mode == "int":
            return indices
        if self.output_mode == "tf_idf":
            if self._idf_weights is None:
                raise ValueError(f"Layer {self.name!r} has no idf_weights: adapt or pass them.")
            counts = host_layers.encoded_categories(indices, "count", self._depth())
            return (counts * self._idf_weights).astype(counts.dtype)
        return host_layers.encoded_categories(indices, self.output_mode, self._depth())

    def _lookup(self, key: Any) -> int:
        index = self._vocabulary.index.get(key)
        if index is not None:
            return index
        if self.mask_token is not None and key == self._key(self.mask_token):
            return 0 if self.output_mode == "int" else -1
        if self.num_oov_indices == 0:
            raise _unknown(self._token(key), self.name)
        if self.num_oov_indices == 1:
            return self._oov_start()
        return self._oov_start() + self._bucket(key)

    def _tokens_at(self, indices: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def compute_output_shape(self, input_shape: Any) -> Any:
        return host_layers.encoded_shape(input_shape, self.output_mode, self._depth())

    def compute_output_spec(self, inputs: Any) -> Any:
        dtype = "int64" if self.output_mode == "int" else keras.config.floatx()
        if self.invert:
            dtype = self.vocabulary_dtype
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype=dtype)

    # -- saving --

    def get_config(self) -> dict[str, Any]:
        vocabulary, weights = self.input_vocabulary, self.input_idf_weights
        return {
            **super().get_config(),
            "invert": self.invert,
            "max_tokens": self.max_tokens,
            "num_oov_indices": self.num_oov_indices,
            "oov_token": self.oov_token,
            "mask_token": self.mask_token,
            "output_mode": self.output_mode,
            "sparse": False,
            "pad_to_max_tokens": self.pad_to_max_tokens,
            "idf_weights": None if weights is None else np.asarray(weights).tolist(),
            "vocabulary": None
            if vocabulary is None
            else [self._token(key) for key in self._keys(vocabulary).tolist()],
            "vocabulary_size": self.vocabulary_size(),
            "oov_method": self.oov_method,
            "salt": None,
        }

    def save_own_variables(self, store: Any) -> None:
        if self._idf_weights is not None:
            store["idf_weights"] = self._idf_weights

    def load_own_variables(self, store: Any) -> None:
        if self.output_mode == "tf_idf":
            self._idf_weights = np.asarray(store["idf_weights"])

    def save_assets(self, dir_path: str) -> None:
        if self.input_vocabulary is None:  # otherwise, the configuration contains it
            lines = map(str, self.get_vocabulary())
            with open(os.path.join(dir_path, "vocabulary.txt"), "w", encoding="utf-8") as file:
                file.write("\n".join(lines))

    def load_assets(self, dir_path: str) -> None:
        if self.input_vocabulary is not None:
            return
        path = os.path.join(dir_path, "vocabulary.txt")

        def lines_of(text: str) -> list[str]:
            lines = text.split("\n")
            while lines and not lines[-1]:
                lines.pop()
            return lines[self._token_start() :]

        tokens = self._tokens_in(path, lines_of)
        try:
            self._check_tokens(tokens)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        self._set_tokens(tokens)


def _unknown(token: Any, layer: str) -> InvalidArgumentError:
    error = InvalidArgumentError(
        message=f"With num_oov_indices=0 every token must be in the vocabulary of layer {layer!r}. "
        f"Received: {token!r}. Set num_oov_indices=1, or add it to the vocabulary."
    )
    # Keras would replace it by a new exception with a message only.
    error._keras_call_info_injected = True  # type: ignore[attr-defined]
    return error


@keras.saving.register_keras_serializable("unison")
class StringLookup(IndexLookup):
    """The index of a string in a vocabulary, computed on the host.

    Args:
        max_tokens: The maximum size of the vocabulary, including special tokens.
        num_oov_indices: The number of indices for unknown strings, by FarmHash as in TensorFlow.
        mask_token: The string whose index is 0, or that is not counted.
        oov_token: The name of unknown strings in `get_vocabulary`.
        vocabulary: The strings, or the path of a file with one a line.
        idf_weights: For output mode "tf_idf", the strings' weights.
        invert: Whether to map indices to strings.
        output_mode: "int", "one_hot", "multi_hot", "count" or "tf_idf".
        pad_to_max_tokens: Whether vectors have `max_tokens` elements.
        sparse: Must be False.
        encoding: The encoding of `bytes`.
        name: The layer's name.
        salt: Must be None.
        kwargs: Further entries of a saved configuration.

    Examples:
        >>> lookup = StringLookup(vocabulary=["a", "b"])
        >>> lookup(["b", "?", "a"]).tolist(), lookup.get_vocabulary()
        ([2, 0, 1], ['[UNK]', 'a', 'b'])

    TF: `tf.keras.layers.StringLookup`.
    """

    vocabulary_dtype = "string"

    def __init__(
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: str | None = None,
        oov_token: str = "[UNK]",
        vocabulary: Any = None,
        idf_weights: Any = None,
        invert: bool = False,
        output_mode: str = "int",
        pad_to_max_tokens: bool = False,
        sparse: bool = False,
        encoding: str = "utf-8",
        name: str | None = None,
        salt: Any = None,
        oov_method: str = "floormod",
        **kwargs: Any,
    ):
        self.encoding = encoding
        super().__init__(
            max_tokens,
            num_oov_indices,
            mask_token,
            oov_token,
            vocabulary,
            idf_weights,
            invert,
            output_mode,
            pad_to_max_tokens,
            sparse,
            oov_method,
            name,
            salt,
            **kwargs,
        )

    def _keys(self, inputs: Any) -> np.ndarray:
        return host_layers.text_array(inputs)

    def _token(self, key: bytes) -> str:
        return key.decode(self.encoding)

    def _bucket(self, key: bytes) -> int:
        return fingerprint64(key) % self.num_oov_indices

    def _tokens_at(self, indices: np.ndarray) -> np.ndarray:
        vocabulary = self.get_vocabulary()
        known = [
            vocabulary[index] if 0 <= index < len(vocabulary) else self.oov_token
            for index in indices.ravel().tolist()
        ]
        return host_layers.text_array(np.array(known, dtype=object)).reshape(indices.shape)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "encoding": self.encoding}


@keras.saving.register_keras_serializable("unison")
class IntegerLookup(IndexLookup):
    """The index of an integer in a vocabulary.

    For arrays in a compiled program, it is computed there; otherwise on the host.

    Args:
        max_tokens: The maximum size of the vocabulary, including special tokens.
        num_oov_indices: The number of indices for unknown integers, by their remainder.
        mask_token: The integer whose index is 0, or that is not counted.
        oov_token: The name of unknown integers in `get_vocabulary`.
        vocabulary: The integers, or the path of a file with one a line.
        vocabulary_dtype: Must be "int64".
        idf_weights: For output mode "tf_idf", the integers' weights.
        invert: Whether to map indices to integers of the vocabulary.
        output_mode: "int", "one_hot", "multi_hot", "count" or "tf_idf".
        sparse: Must be False.
        pad_to_max_tokens: Whether vectors have `max_tokens` elements.
        oov_method: "floormod", or "farmhash" of the digits.
        salt: Must be None.
        name: The layer's name.
        kwargs: Further entries of a saved configuration.

    Examples:
        >>> IntegerLookup(vocabulary=[12, 36])([36, 7, 12]).tolist()
        [2, 0, 1]

    TF: `tf.keras.layers.IntegerLookup`.
    """

    vocabulary_dtype = "int64"

    def __init__(
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: int | None = None,
        oov_token: int = -1,
        vocabulary: Any = None,
        vocabulary_dtype: str = "int64",
        idf_weights: Any = None,
        invert: bool = False,
        output_mode: str = "int",
        sparse: bool = False,
        pad_to_max_tokens: bool = False,
        oov_method: str = "floormod",
        salt: Any = None,
        name: str | None = None,
        **kwargs: Any,
    ):
        if vocabulary_dtype != "int64":
            raise ValueError(f"vocabulary_dtype must be 'int64'. Received: {vocabulary_dtype!r}")
        super().__init__(
            max_tokens,
            num_oov_indices,
            mask_token,
            oov_token,
            vocabulary,
            idf_weights,
            invert,
            output_mode,
            pad_to_max_tokens,
            sparse,
            oov_method,
            name,
            salt,
            **kwargs,
        )

    def call(self, inputs: Any) -> Any:
        if not isinstance(inputs, jax.core.Tracer):
            return super().call(inputs)
        if self.invert:
            return self._traced_tokens(inputs)
        indices = self._traced_indices(inputs)
        if self.output_mode == "int":
            return indices
        mode = "count" if self.output_mode == "tf_idf" else self.output_mode
        encoded = host_layers.traced_categories(indices, mode, self._depth())
        return encoded if self._idf_weights is None else encoded * self._idf_weights

    def _traced_tokens(self, indices: jax.Array) -> jax.Array:
        vocabulary = jnp.asarray(self.get_vocabulary(), device_dtype("int64"))
        known = (indices >= 0) & (indices < len(vocabulary))
        return jnp.where(known, vocabulary[jnp.where(known, indices, 0)], self.oov_token)

    def _traced_indices(self, inputs: jax.Array) -> jax.Array:
        dtype = device_dtype("int64")
        inputs = inputs.astype(dtype)
        order = np.argsort(self._vocabulary.tokens)
        keys = jnp.asarray(np.asarray(self._vocabulary.tokens, dtype=np.int64)[order], dtype)
        position = jnp.clip(jnp.searchsorted(keys, inputs), 0, len(keys) - 1)
        found = keys[position] == inputs
        unknown = jnp.asarray(-1, dtype)
        if self.num_oov_indices:
            unknown = self._oov_start() + inputs % self.num_oov_indices
        indices = jnp.where(found, self._token_start() + jnp.asarray(order)[position], unknown)
        if self.mask_token is None:
            return indices.astype(dtype)
        masked = 0 if self.output_mode == "int" else -1
        return jnp.where(inputs == self.mask_token, masked, indices).astype(dtype)

    def _keys(self, inputs: Any) -> np.ndarray:
        return np.asarray(inputs).astype(np.int64)

    def _token(self, key: int) -> int:
        return int(key)

    def _parsed(self, line: str) -> int:
        number = int(line)
        limits = np.iinfo(np.int64)
        if not limits.min <= number <= limits.max:
            raise ValueError(f"{line[:100]!r} is not a number of 64 bits")
        return number

    def _bucket(self, key: int) -> int:
        if self.oov_method == "farmhash":
            return fingerprint64(str(key).encode()) % self.num_oov_indices
        return key % self.num_oov_indices

    def _tokens_at(self, indices: np.ndarray) -> np.ndarray:
        vocabulary = np.asarray(self.get_vocabulary(), np.int64)
        known = (indices >= 0) & (indices < len(vocabulary))
        return np.where(known, vocabulary[np.where(known, indices, 0)], self.oov_token)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "vocabulary_dtype": self.vocabulary_dtype}
