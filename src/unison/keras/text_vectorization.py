"""`TextVectorization` and `Hashing`: from text to numbers, without TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.saving import serialization_lib

from unison.keras import host_layers
from unison.keras.host_layers import HostLayer
from unison.keras.lookup import StringLookup

#: The characters that Keras strips: ASCII punctuation.
_PUNCTUATION = re.compile(rb"""[!"#$%&()*+,\-./:;<=>?@\[\\\]^_`{|}~']""")

_STANDARDIZATIONS: dict[str, Callable[[bytes], bytes]] = {
    "lower": bytes.lower,
    "strip_punctuation": lambda text: _PUNCTUATION.sub(b"", text),
    "lower_and_strip_punctuation": lambda text: _PUNCTUATION.sub(b"", text.lower()),
}
_SPLITS: dict[str, Callable[[bytes], list[bytes]]] = {
    "whitespace": bytes.split,
    "character": lambda text: [character.encode() for character in text.decode(errors="replace")],
}


@keras.saving.register_keras_serializable("unison")
class TextVectorization(HostLayer):
    """Maps texts to the indices of their words, computed on the host.

    Args:
        max_tokens: The maximum size of the vocabulary, including the two special tokens.
        standardize: "lower_and_strip_punctuation", "lower", "strip_punctuation", None, or a
            function of an array of texts.
        split: "whitespace", "character", None, or a function of an array of texts that returns a
            list of tokens for each.
        ngrams: The maximum number of words in a token, or a tuple of numbers.
        output_mode: "int", "multi_hot", "count" or "tf_idf".
        output_sequence_length: The number of indices to which texts are padded or cut. Default:
            that of the longest text of the batch.
        pad_to_max_tokens: Whether vectors have `max_tokens` elements.
        vocabulary: The words, or the path of a file with one a line.
        idf_weights: For output mode "tf_idf", the words' weights.
        sparse: Must be False.
        ragged: Must be False.
        encoding: The encoding of `bytes`.
        name: The layer's name.
        kwargs: Further entries of a saved configuration.

    Examples:
        >>> vectorize = TextVectorization(output_sequence_length=4)
        >>> vectorize.adapt(["the cat", "The dog, the cow"])
        >>> vectorize.get_vocabulary(), vectorize(["the sow"]).tolist()
        (['', '[UNK]', 'the', 'dog', 'cow', 'cat'], [[2, 1, 0, 0]])

    TF: `tf.keras.layers.TextVectorization`.
    """

    def __init__(
        self,
        max_tokens: int | None = None,
        standardize: str | Callable[[Any], Any] | None = "lower_and_strip_punctuation",
        split: str | Callable[[Any], Any] | None = "whitespace",
        ngrams: int | tuple[int, ...] | None = None,
        output_mode: str = "int",
        output_sequence_length: int | None = None,
        pad_to_max_tokens: bool = False,
        vocabulary: Any = None,
        idf_weights: Any = None,
        sparse: bool = False,
        ragged: bool = False,
        encoding: str = "utf-8",
        name: str | None = None,
        **kwargs: Any,
    ):
        output_mode = host_layers.output_mode_of(output_mode)
        _check_choice("standardize", standardize, _STANDARDIZATIONS)
        _check_choice("split", split, _SPLITS)
        if output_mode != "int" and output_sequence_length is not None:
            raise ValueError(
                "output_sequence_length requires output_mode='int'. Received: "
                f"output_mode={output_mode!r}"
            )
        if ragged:
            raise ValueError("ragged=True is not supported: texts are padded. Leave it False.")
        for ignored in ("trainable", "dtype", "vocabulary_size", "has_input_vocabulary"):
            kwargs.pop(ignored, None)
        super().__init__(name, **kwargs)
        self._standardize = standardize
        self._split = split
        self._ngrams = tuple(range(1, ngrams + 1)) if isinstance(ngrams, int) else ngrams
        self._given_ngrams = ngrams
        self._output_mode = output_mode
        self._output_sequence_length = output_sequence_length
        self._lookup_layer = StringLookup(
            max_tokens=max_tokens,
            mask_token="",
            vocabulary=vocabulary,
            idf_weights=idf_weights,
            output_mode=output_mode,
            pad_to_max_tokens=pad_to_max_tokens,
            sparse=sparse,
            encoding=encoding,
        )

    # -- the vocabulary, which is that of the lookup --

    def adapt(self, data: Any, batch_size: int | None = None, steps: int | None = None) -> None:
        """Learns the vocabulary: the words of `data`, the most frequent first.

        Args:
            data: An array, a list, or an iterable of batches.
            batch_size: Ignored.
            steps: For an iterable, the number of batches to read.
        """
        del batch_size
        host_layers.adapt(self, data, steps)

    def update_state(self, data: Any) -> None:
        """Counts the words of a batch of texts."""
        self._lookup_layer.count_documents(self._tokens(data))

    def finalize_state(self) -> None:
        """Sets the vocabulary to the words that were counted."""
        self._lookup_layer.finalize_state()

    def reset_state(self) -> None:
        """Resets the counts of `update_state`."""
        self._lookup_layer.reset_state()

    def get_vocabulary(self, include_special_tokens: bool = True) -> list[str]:
        """Returns the words, each at its index; see `StringLookup.get_vocabulary`."""
        return self._lookup_layer.get_vocabulary(include_special_tokens)

    def vocabulary_size(self) -> int:
        """Returns the number of indices, including those of padding and unknown words."""
        return self._lookup_layer.vocabulary_size()

    def set_vocabulary(self, vocabulary: Any, idf_weights: Any = None) -> None:
        """Sets the vocabulary; see `StringLookup.set_vocabulary`."""
        self._lookup_layer.set_vocabulary(vocabulary, idf_weights)

    # -- from text to indices --

    def encode(self, inputs: Any) -> np.ndarray:
        lookup = self._lookup_layer
        if self._split is None and self._ngrams is None and self._output_sequence_length is None:
            return lookup.encode(self._standardized(inputs))
        documents = self._tokens(inputs)
        is_scalar = np.ndim(inputs) == 0
        if self._output_mode != "int":
            rows = [
                lookup.encode_indices(_indices(lookup, document)[None])[0] for document in documents
            ]
        else:
            length = self._output_sequence_length
            if length is None:
                length = max(map(len, documents), default=0)
            rows = [_fitted(_indices(lookup, document), length) for document in documents]
        return rows[0] if is_scalar else np.array(rows)

    def _tokens(self, inputs: Any) -> list[list[bytes]]:
        """Returns the tokens of every text."""
        documents = self._documents(self._standardized(inputs))
        if self._ngrams is None:
            return documents
        return [_ngrams_of(document, self._ngrams) for document in documents]

    def _documents(self, texts: np.ndarray) -> list[list[bytes]]:
        if self._split is None:
            rows = np.atleast_1d(texts)
            return rows.reshape(-1, rows.shape[-1]).tolist()
        if texts.ndim > 1:
            if texts.shape[-1] != 1:
                raise ValueError(
                    "TextVectorization splits texts: its input must have one axis, or a last "
                    f"axis of size 1. Received: shape {texts.shape}"
                )
            texts = texts[..., 0]
        return self._splitted(np.atleast_1d(texts))

    def _standardized(self, inputs: Any) -> np.ndarray:
        if callable(self._standardize):
            return host_layers.text_array(self._standardize(self._for_functions(inputs)))
        texts = host_layers.text_array(inputs)
        if self._standardize is None:
            return texts
        change = _STANDARDIZATIONS[self._standardize]
        changed = np.empty(texts.size, dtype=object)
        changed[:] = [change(text) for text in texts.ravel().tolist()]
        return changed.reshape(texts.shape)

    def _splitted(self, texts: np.ndarray) -> list[list[bytes]]:
        if callable(self._split):
            parts = self._split(self._for_functions(texts))
            return [host_layers.text_array(part).tolist() for part in parts]
        assert self._split is not None
        split = _SPLITS[self._split]
        return [split(text) for text in texts.ravel().tolist()]

    def _for_functions(self, texts: Any) -> Any:
        """Returns texts in the form that the user's functions get."""
        return host_layers.text_array(texts)

    def compute_output_shape(self, input_shape: Any) -> Any:
        if self._output_mode == "int":
            return (input_shape[0], self._output_sequence_length)
        if self._split is not None:
            input_shape = (*input_shape, None)
        elif len(input_shape) <= 1:
            input_shape = (*input_shape, 1)
        if len(input_shape) > 2:
            input_shape = (input_shape[0], input_shape[-1])
        return self._lookup_layer.compute_output_shape(input_shape)

    def compute_output_spec(self, inputs: Any) -> Any:
        dtype = "int64" if self._output_mode == "int" else keras.config.floatx()
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype=dtype)

    # -- saving --

    def get_config(self) -> dict[str, Any]:
        lookup = self._lookup_layer.get_config()
        shared = "max_tokens pad_to_max_tokens sparse vocabulary idf_weights encoding".split()
        return {
            **super().get_config(),
            **{name: lookup[name] for name in shared},
            "standardize": self._standardize,
            "split": self._split,
            "ngrams": self._given_ngrams,
            "output_mode": self._output_mode,
            "output_sequence_length": self._output_sequence_length,
            "ragged": False,
            "vocabulary_size": self.vocabulary_size(),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TextVectorization:
        for name in ("standardize", "split"):
            if isinstance(config[name], dict):
                config[name] = serialization_lib.deserialize_keras_object(config[name])
        if isinstance(config["ngrams"], list):
            config["ngrams"] = tuple(config["ngrams"])
        return cls(**config)

    def save_own_variables(self, store: Any) -> None:
        self._lookup_layer.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        self._lookup_layer.load_own_variables(store)

    def save_assets(self, dir_path: str) -> None:
        self._lookup_layer.save_assets(dir_path)

    def load_assets(self, dir_path: str) -> None:
        self._lookup_layer.load_assets(dir_path)


def _check_choice(argument: str, value: Any, choices: dict[str, Any]) -> None:
    if value is not None and not callable(value) and value not in choices:
        raise ValueError(
            f"{argument} must be one of {sorted(choices)}, None or a function. Received: {value!r}"
        )


def _indices(lookup: StringLookup, document: Sequence[bytes]) -> np.ndarray:
    return np.array([lookup._lookup(token) for token in document], dtype=np.int64)


def _fitted(indices: np.ndarray, length: int) -> np.ndarray:
    return np.pad(indices[:length], (0, max(length - len(indices), 0)))


def _ngrams_of(tokens: Sequence[bytes], sizes: Sequence[int]) -> list[bytes]:
    return [
        b" ".join(tokens[start : start + size])
        for size in sizes
        for start in range(len(tokens) - size + 1)
    ]
