"""`tf.linalg`: matrices, in the last two axes of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
from jax import lax

from unison.errors import InvalidArgumentError
from unison.tf import dtypes
from unison.tf.math import einsum, global_norm, l2_normalize, matmul, norm, tensordot
from unison.tf.missing import names_missing_from
from unison.tf.tensors import convert_to_tensor, eye, invalid_arguments, operands, tensor_dtype

__all__ = ["einsum", "eye", "global_norm", "l2_normalize", "matmul", "norm", "tensordot"]

__getattr__ = names_missing_from(__name__)


class SignAndLog(NamedTuple):
    """The sign and the logarithm of the absolute value of a determinant."""

    sign: jax.Array
    log_abs_determinant: jax.Array


class OrthogonalAndTriangular(NamedTuple):
    """The factors of a QR decomposition."""

    q: jax.Array
    r: jax.Array


class PackedAndPermutation(NamedTuple):
    """The factors of an LU decomposition in one matrix, and the permutation of rows."""

    lu: jax.Array
    p: jax.Array


def adjoint(matrix: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.linalg.adjoint`."""
    return jnp.conj(convert_to_tensor(matrix).mT)


def matrix_transpose(a: Any, name: str = "matrix_transpose", conjugate: bool = False) -> jax.Array:
    """TF: `tf.linalg.matrix_transpose`."""
    transposed = convert_to_tensor(a).mT
    return jnp.conj(transposed) if conjugate else transposed


def matvec(
    a: Any,
    b: Any,
    transpose_a: bool = False,
    adjoint_a: bool = False,
    a_is_sparse: bool = False,
    b_is_sparse: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Returns the product of matrices and vectors. TF: `tf.linalg.matvec`."""
    column = convert_to_tensor(b)[..., None]
    return matmul(a, column, transpose_a=transpose_a, adjoint_a=adjoint_a)[..., 0]


def trace(x: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.linalg.trace`."""
    return jnp.trace(convert_to_tensor(x), axis1=-2, axis2=-1)


def det(input: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.linalg.det`."""
    return jnp.linalg.det(convert_to_tensor(input))


def slogdet(input: Any, name: str | None = None) -> SignAndLog:
    """TF: `tf.linalg.slogdet`."""
    return SignAndLog(*jnp.linalg.slogdet(convert_to_tensor(input)))


def logdet(matrix: Any, name: str | None = None) -> jax.Array:
    """Returns the logarithm of a positive definite matrix' determinant. TF: `tf.linalg.logdet`."""
    return 2 * jnp.sum(jnp.log(jnp.diagonal(cholesky(matrix), axis1=-2, axis2=-1)), -1)


def inv(input: Any, adjoint: bool = False, name: str | None = None) -> jax.Array:
    """TF: `tf.linalg.inv`."""
    with invalid_arguments("tf.linalg.inv"):
        inverse = jnp.linalg.inv(convert_to_tensor(input))
    return jnp.conj(inverse.mT) if adjoint else inverse


def pinv(
    a: Any, rcond: Any = None, validate_args: bool = False, name: str | None = None
) -> jax.Array:
    """TF: `tf.linalg.pinv`."""
    return jnp.linalg.pinv(convert_to_tensor(a), rtol=rcond)


def solve(matrix: Any, rhs: Any, adjoint: bool = False, name: str | None = None) -> jax.Array:
    """TF: `tf.linalg.solve`."""
    matrix, rhs = operands(convert_to_tensor(matrix), convert_to_tensor(rhs))
    with invalid_arguments("tf.linalg.solve"):
        return jnp.linalg.solve(jnp.conj(matrix.mT) if adjoint else matrix, rhs)


def triangular_solve(
    matrix: Any, rhs: Any, lower: bool = True, adjoint: bool = False, name: str | None = None
) -> jax.Array:
    """TF: `tf.linalg.triangular_solve`."""
    matrix, rhs = operands(convert_to_tensor(matrix), convert_to_tensor(rhs))
    return lax.linalg.triangular_solve(
        matrix, rhs, left_side=True, lower=lower, transpose_a=adjoint, conjugate_a=adjoint
    )


def lstsq(
    matrix: Any,
    rhs: Any,
    l2_regularizer: float = 0.0,
    fast: bool = True,
    name: str | None = None,
) -> jax.Array:
    """Returns the least-squares solution, by the normal equations if `fast`.

    TF: `tf.linalg.lstsq`.
    """
    matrix, rhs = operands(convert_to_tensor(matrix), convert_to_tensor(rhs))
    if not fast:
        return pinv(matrix) @ rhs
    rows, columns = matrix.shape[-2:]
    is_wide = rows < columns  # then, of many solutions, the shortest
    gram = matrix @ adjoint(matrix) if is_wide else adjoint(matrix) @ matrix
    gram += l2_regularizer * jnp.eye(gram.shape[-1], dtype=gram.dtype)
    if is_wide:
        return adjoint(matrix) @ cholesky_solve(cholesky(gram), rhs)
    return cholesky_solve(cholesky(gram), adjoint(matrix) @ rhs)


def cholesky(input: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.linalg.cholesky`."""
    return jnp.linalg.cholesky(convert_to_tensor(input))


def cholesky_solve(chol: Any, rhs: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.linalg.cholesky_solve`."""
    chol, rhs = operands(convert_to_tensor(chol), convert_to_tensor(rhs))
    return triangular_solve(chol, triangular_solve(chol, rhs), adjoint=True)


def qr(input: Any, full_matrices: bool = False, name: str | None = None) -> OrthogonalAndTriangular:
    """TF: `tf.linalg.qr`."""
    mode = "complete" if full_matrices else "reduced"
    return OrthogonalAndTriangular(*jnp.linalg.qr(convert_to_tensor(input), mode))


def svd(
    tensor: Any, full_matrices: bool = False, compute_uv: bool = True, name: str | None = None
) -> Any:
    """Returns `(s, u, v)` with `tensor = u @ diag(s) @ adjoint(v)`, or `s` alone.

    TF: `tf.linalg.svd`.
    """
    tensor = convert_to_tensor(tensor)
    if not compute_uv:
        return jnp.linalg.svd(tensor, compute_uv=False)
    u, s, vh = jnp.linalg.svd(tensor, full_matrices=full_matrices)
    return s, u, adjoint(vh)


def eigh(tensor: Any, name: str | None = None) -> tuple[Any, Any]:
    """Returns eigenvalues and eigenvectors of self-adjoint matrices. TF: `tf.linalg.eigh`."""
    values, vectors = jnp.linalg.eigh(convert_to_tensor(tensor))
    return values, vectors


def eigvalsh(tensor: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.linalg.eigvalsh`."""
    return jnp.linalg.eigvalsh(convert_to_tensor(tensor))


def eig(tensor: Any, name: str | None = None) -> tuple[Any, Any]:
    """Returns eigenvalues and eigenvectors, complex; on CPUs only. TF: `tf.linalg.eig`."""
    values, vectors = jnp.linalg.eig(convert_to_tensor(tensor))
    return values, vectors


def eigvals(tensor: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.linalg.eigvals`."""
    return jnp.linalg.eigvals(convert_to_tensor(tensor))


def expm(input: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.linalg.expm`."""
    return jsl.expm(convert_to_tensor(input))


def sqrtm(input: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.linalg.sqrtm`."""
    input = convert_to_tensor(input)
    of_matrices = jnp.vectorize(jsl.sqrtm, signature="(n,n)->(n,n)")
    root = of_matrices(input)
    return root if jnp.iscomplexobj(input) else jnp.real(root)


def matrix_rank(
    a: Any, tol: Any = None, validate_args: bool = False, name: str | None = None
) -> jax.Array:
    """TF: `tf.linalg.matrix_rank`."""
    return jnp.linalg.matrix_rank(convert_to_tensor(a), rtol=tol).astype(jnp.int32)


def cross(a: Any, b: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.linalg.cross`."""
    return jnp.cross(*operands(convert_to_tensor(a), convert_to_tensor(b)))


def band_part(input: Any, num_lower: Any, num_upper: Any, name: str | None = None) -> jax.Array:
    """Returns the matrix within so many diagonals below and above; -1 keeps that side whole.

    TF: `tf.linalg.band_part`.
    """
    input = convert_to_tensor(input)
    rows, columns = input.shape[-2:]
    distance = jnp.arange(columns)[None, :] - jnp.arange(rows)[:, None]
    is_kept = ((num_lower < 0) | (-distance <= num_lower)) & (
        (num_upper < 0) | (distance <= num_upper)
    )
    return jnp.where(is_kept, input, jnp.zeros((), input.dtype))


def diag(
    diagonal: Any,
    name: str = "diag",
    k: Any = 0,
    num_rows: int = -1,
    num_cols: int = -1,
    padding_value: Any = 0,
    align: str = "RIGHT_LEFT",
) -> jax.Array:
    """Returns matrices with this diagonal, the k-th, and `padding_value` elsewhere.

    Args:
        diagonal: The diagonals; of several, one behind the other from the highest down, as
            `diag_part` returns them.
        name: Without effect.
        k: The number of the diagonal, above the main one; or the lowest and the highest of several.
        num_rows: The number of rows. Default: the least, or a square matrix.
        num_cols: The number of columns. Likewise.
        padding_value: What is elsewhere.
        align: At which end of a row those of several diagonals that are shorter are filled up: for
            those above the main one, and those below.

    TF: `tf.linalg.diag`.
    """
    diagonal = convert_to_tensor(diagonal)
    low, high = _range_of_diagonals(k)
    longest = diagonal.shape[-1]
    rows, columns = longest - min(high, 0), longest + max(low, 0)
    if num_rows == num_cols == -1:
        rows = columns = max(rows, columns)
    rows, columns = (
        least if wanted == -1 else wanted
        for least, wanted in ((rows, num_rows), (columns, num_cols))
    )
    batch = diagonal.shape[: -1 if low == high else -2]
    matrix = jnp.full((*batch, rows, columns), padding_value, diagonal.dtype)
    return set_diag(matrix, diagonal, k=k, align=align)


def diag_part(
    input: Any,
    name: str = "diag_part",
    k: Any = 0,
    padding_value: Any = 0,
    align: str = "RIGHT_LEFT",
) -> jax.Array:
    """Returns the k-th diagonal; of several, rows from the highest down, filled up; see `diag`.

    TF: `tf.linalg.diag_part`.
    """
    input = convert_to_tensor(input)
    low, high = _range_of_diagonals(k)
    if low == high:
        return jnp.diagonal(input, low, -2, -1)
    places = _places_of_diagonals(input.shape, low, high, align)
    padding = jnp.asarray(padding_value, input.dtype)
    return jnp.where(places.is_there, input[..., places.rows, places.columns], padding)


def set_diag(
    input: Any, diagonal: Any, name: str = "set_diag", k: Any = 0, align: str = "RIGHT_LEFT"
) -> jax.Array:
    """Returns the matrices with this for their k-th diagonal, or several; see `diag`.

    TF: `tf.linalg.set_diag`.
    """
    input, diagonal = operands(convert_to_tensor(input), convert_to_tensor(diagonal))
    low, high = _range_of_diagonals(k)
    if low == high:
        steps = jnp.arange(diagonal.shape[-1])
        return input.at[..., steps + max(-low, 0), steps + max(low, 0)].set(diagonal)
    places = _places_of_diagonals(input.shape, low, high, align)
    there = places.is_there
    rows, columns = places.rows[there], places.columns[there]
    return input.at[..., rows, columns].set(diagonal[..., *np.nonzero(there)])


class _Places(NamedTuple):
    """The places of diagonals in a matrix: `[diagonals, longest]`."""

    rows: np.ndarray
    columns: np.ndarray
    is_there: np.ndarray


def _range_of_diagonals(k: Any) -> tuple[int, int]:
    numbers = np.atleast_1d(np.asarray(k)).tolist()
    if len(numbers) > 2 or numbers[0] > numbers[-1]:
        raise InvalidArgumentError(
            message=f"k must be a diagonal's number, or the lowest and the highest. Received: {k}"
        )
    return numbers[0], numbers[-1]


def _places_of_diagonals(shape: Sequence[int], low: int, high: int, align: str) -> _Places:
    rows, columns = shape[-2:]
    above, _, below = align.partition("_")
    if {above, below} - {"LEFT", "RIGHT"}:
        raise InvalidArgumentError(
            message="align must be LEFT or RIGHT twice, as RIGHT_LEFT: for the diagonals above the "
            f"main one, and below. Received: {align!r}"
        )
    numbers = np.arange(high, low - 1, -1)[:, None]
    lengths = np.minimum(rows + np.minimum(numbers, 0), columns - np.maximum(numbers, 0))
    longest = lengths.max()
    is_left = ((numbers >= 0) & (above == "LEFT")) | ((numbers <= 0) & (below == "LEFT"))
    steps = np.arange(longest)[None] - np.where(is_left, 0, longest - lengths)
    is_there = (steps >= 0) & (steps < lengths)
    steps = np.where(is_there, steps, 0)
    return _Places(steps - np.minimum(numbers, 0), steps + np.maximum(numbers, 0), is_there)


def tensor_diag(diagonal: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.linalg.tensor_diag`."""
    diagonal = convert_to_tensor(diagonal)
    return jnp.diag(diagonal.ravel()).reshape(diagonal.shape * 2)


def tensor_diag_part(input: Any, name: str | None = None) -> jax.Array:
    """TF: `tf.linalg.tensor_diag_part`."""
    input = convert_to_tensor(input)
    shape = input.shape[: input.ndim // 2]
    return jnp.diagonal(input.reshape(int(np.prod(shape)), -1)).reshape(shape)


def normalize(
    tensor: Any, ord: Any = "euclidean", axis: Any = None, name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns `tensor / norm` and the norm. TF: `tf.linalg.normalize`."""
    tensor = convert_to_tensor(tensor)
    length = norm(tensor, ord, axis, keepdims=True)
    return tensor / length, length


def lu(
    input: Any, output_idx_type: Any = dtypes.int32, name: str | None = None
) -> PackedAndPermutation:
    """Returns the packed factors and the permutation of rows. TF: `tf.linalg.lu`."""
    packed, _, permutation = lax.linalg.lu(convert_to_tensor(input))
    return PackedAndPermutation(packed, permutation.astype(tensor_dtype(output_idx_type)))
